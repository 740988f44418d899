"""A rank that dies, stalls, fails or is configured differently: every other rank gets an error in time, with names."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import gradgate
import gradgate.torch as gg
from models import deep, gate, train, wrap

TIMEOUT_S = 5.0


def fails_in_step_3(how, mode):
    rank = dist.get_rank()
    ddp = wrap(deep())
    state = gate(ddp, mode=mode, codecs=["int8"])
    train(ddp, 3)
    begin = time.monotonic()
    if rank == 1 and how == "dies":
        os._exit(1)
    if rank == 1 and how == "stalls":
        time.sleep(TIMEOUT_S * 3)
        os._exit(1)
    if rank == 1 and how == "raises":

        def refuse(*_):
            raise MemoryError("injected: out of memory")

        state._core.session.all_reduce_overlapped = refuse
    try:
        train(ddp, 2, first=3)
    except Exception as error:
        outcome = (str(error), time.monotonic() - begin)
    else:
        outcome = ("", time.monotonic() - begin)
    if rank == 0:
        time.sleep(1.5)  # the rendezvous store lives here: let the others read it
    return outcome


# COL-7 and COL-8.
# Between two ranks a bucket is on the wire while the next one is encoded.
@pytest.mark.parametrize(
    "how,mode,ranks",
    [("dies", "on", 3), ("stalls", "auto", 3), ("raises", "on", 3), ("dies", "on", 2), ("stalls", "on", 2)],
)
def test_the_other_ranks_get_an_error_in_time(pool, how, mode, ranks):
    results = pool.outcomes(ranks, fails_in_step_3, how, mode, timeout_s=60, group_timeout_s=TIMEOUT_S)
    for rank in (0, 2)[: ranks - 1]:
        assert isinstance(results[rank], tuple), results[rank]
        text, after = results[rank]
        assert after < TIMEOUT_S + 4, results[rank]
        assert f"gradgate: rank {rank}, step 3 bucket" in text and "failed after" in text and "rank 1:" in text, text
    if how == "raises":
        text, after = results[1]
        assert "injected: out of memory" in text and after < TIMEOUT_S
    else:
        assert results[1] is None


def gated_fails_in_step_3(make, how):
    ddp = wrap(deep())
    state, hook = getattr(gg, make)(ddp, say=None)
    ddp.register_comm_hook(state, hook)
    train(ddp, 3)
    begin = time.monotonic()
    if dist.get_rank() == 1:
        if how == "stalls":
            time.sleep(TIMEOUT_S * 3)
        os._exit(1)
    try:
        train(ddp, 4, first=3)
    except Exception as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


@pytest.mark.parametrize("make,how", [("gated_fp16", "dies"), ("gated_power_sgd", "stalls")])
def test_behind_a_gated_hook_too(pool, make, how):
    results = pool.outcomes(2, gated_fails_in_step_3, make, how, timeout_s=60, group_timeout_s=TIMEOUT_S)
    assert results[1] is None and isinstance(results[0], tuple), results
    text, after = results[0]
    assert text and after < TIMEOUT_S + 4, results
    # Dense or the hook, as the gate's start-up has it.
    assert "gradgate: rank 0, step 3 bucket" in text and " failed after " in text and "rank 1: has not" in text, text


def differs(name, values):
    options = {"mode": "on", "codecs": ["int8"], "say": None, name: values[dist.get_rank()]}
    if name == "scaler":
        options["scaler"] = torch.amp.GradScaler("cpu") if options["scaler"] else None
    try:
        gg.GateState(wrap(deep()), **options)
    except gradgate.Error as error:
        return error.name, str(error)
    return "none", ""


# COL-9.
@pytest.mark.parametrize(
    "name,values,words",
    [
        ("codecs", (["chunk-topk:8/1024"], ["chunk-topk:9/1024"]), ("codecs", "topk:8/1024", "topk:9/1024")),
        ("codecs", (["int8"], ["bf16"]), ("codecs", "int8", "bf16")),
        ("seed", (1, 2), ("seed", "'1'", "'2'")),
        ("mode", ("on", "auto"), ("mode", "'on'", "'auto'")),
        ("mode", ("off", "on"), ("mode", "'off'", "'on'")),
        ("start_step", (0, 3), ("start_step", "'0'", "'3'")),
        ("error_budget", (0.1, 0.2), ("error_budget", "'0.1'", "'0.2'")),
        ("scaler", (True, False), ("scaler", "'given'", "'none'")),
    ],
)
def test_different_configuration_is_named_on_every_rank(pool, name, values, words):
    for code, text in pool.run(2, differs, name, values):
        assert code == "peer_mismatch", text
        for word in words:
            assert word in text, text


def power_sgd_of_rank():
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=1 + dist.get_rank())
    try:
        gg.gated(wrap(deep()), state, powerSGD_hook.powerSGD_hook, say=None)
    except gradgate.Error as error:
        return error.name, str(error)
    return "none", ""


def test_a_gated_hook_of_different_settings_is_named_on_every_rank(pool):
    for code, text in pool.run(2, power_sgd_of_rank):
        assert code == "peer_mismatch" and "matrix_approximation_rank is '1' on rank 0 and '2' on rank 1" in text, text


def logs_nowhere(make, path):
    ddp = wrap(deep())
    try:
        make(ddp, log=path, say=None)
    except gradgate.Error as error:
        return error.name, str(error)
    return "none", ""


@pytest.mark.parametrize("make", [gg.GateState, gg.gated_fp16])
def test_a_log_that_cannot_be_written_is_named_on_every_rank(pool, tmp_path, make):
    path = str(tmp_path / "missing" / "run.jsonl")
    (code, text), (other_code, other) = pool.run(2, logs_nowhere, make, path)
    assert code == other_code == "io_error" and path in text and "No such file" in text
    assert path in other and "rank 0" in other, other


def bad_arguments():
    ddp = wrap(deep())
    for arguments, words in (
        ({"mode": "maybe"}, "accepted: auto, on, off, observe"),
        ({"codecs": ["int9"]}, "int9"),
        ({"start_step": -1}, "start_step"),
        ({"error_budget": 0}, "error_budget"),
    ):
        with pytest.raises(gradgate.Error, match=words):
            gg.GateState(ddp, say=None, **arguments)
    for make in (gg.GateState, gg.gated_fp16, gg.gated_bf16, gg.gated_power_sgd):
        with pytest.raises(gradgate.Error, match="Sequential, accepted: a DistributedDataParallel"):
            make(deep())
    state = gg.GateState(ddp, say=None)
    with pytest.raises(gradgate.Error, match="attached already"):
        state.attach(ddp)
    state.close()
    with pytest.raises(RuntimeError, match="closed"):
        state.flush()


def test_bad_arguments_name_what_is_accepted(pool):
    pool.run(2, bad_arguments)


def on_interface(name):
    ddp = wrap(deep())
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        gg.GateState(ddp, say=None)
    except gradgate.Error as error:
        return str(error)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    return ""


# BLD-7.
def test_an_interface_that_gloo_cannot_use_is_named(pool):
    assert pool.run(2, on_interface, "lo") == ["", ""]
    for text in pool.outcomes(2, on_interface, "^lo", timeout_s=60, group_timeout_s=TIMEOUT_S):
        assert "GLOO_SOCKET_IFNAME" in text and "^lo" in text, text
