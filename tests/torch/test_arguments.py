"""Arguments that are wrong, or not the same on every rank: an error on all of them that names the argument and both values."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import gradgate
import gradgate.torch as gg
from models import deep, wrap


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
