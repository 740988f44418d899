"""A rank that dies, stalls or fails: every other rank gets an error in time, with names. Configured differently: test_arguments.py."""

import os
import time

import pytest
import torch.distributed as dist

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
