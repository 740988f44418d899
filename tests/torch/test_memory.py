"""Memory: what a state adds, and that nothing grows from step to step."""

import ctypes
import gc
import os
import threading

import pytest
import torch
from torch import nn

from models import deep, gate, train, wrap


def resident() -> int:
    """Bytes in use: what the allocator holds free is given back first, else its habits drown what is looked for."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def flat(steps):
    ddp = wrap(deep(width=16, layers=5), 0.0003)
    lines = 0

    def count(_):
        nonlocal lines
        lines += 1

    state = gate(ddp, mode="on", codecs=["int8:ef"], log=count)
    seen = []
    for block in range(steps // 7):
        train(ddp, 7, first=7 * block, lr=0.001, width=16)
        state.flush()
        state.stats()
        if block * 7 >= steps // 2:  # before, the allocator and torch still warm up
            seen.append((resident(), len(os.listdir("/proc/self/fd")), threading.active_count()))
    growth = min(r for r, _, _ in seen[-5:]) - min(r for r, _, _ in seen[:5])
    return growth, {fds for _, fds, _ in seen}, {threads for _, _, threads in seen}


# MEM-4.
def test_nothing_grows(pool):
    for growth, fds, threads in pool.run(2, flat, 420, timeout_s=200):
        assert growth < 256 << 10, growth
        assert len(fds) == 1 and len(threads) == 1, (fds, threads)


def added(codecs):
    """Bytes that the library holds for 2,000,000 f32 parameters in one bucket, by the layout's own sizes."""
    ddp = wrap(nn.Linear(2000, 1000, bias=False), 25)
    state = gate(ddp, mode="on", codecs=codecs)
    x = torch.ones(1, 2000)

    def step():
        ddp.zero_grad(set_to_none=True)
        ddp(x).sum().backward()

    for _ in range(5):
        step()
    before = resident()
    for _ in range(15):
        step()
    return resident() - before, sum(value.numel() * 4 for value in state.residuals().values())


# MEM-1.
@pytest.mark.parametrize("codecs,residual", [(["int8"], 0), (["int8:ef"], 8_000_000)])
def test_feedback_adds_one_copy_and_steps_add_none(pool, codecs, residual):
    for growth, held in pool.run(2, added, codecs):
        assert held == residual
        assert growth < 4 << 20, growth  # not one copy of the 8 MB gradient stays


ELEMENTS = 2_000_000


def held(codecs):
    """Bytes that are in use between steps with a state beyond those without a hook. Each is the least of two runs: at
    times a module's last gradient is freed after the next has begun. The first run of all warms up."""
    seen = []
    for chosen in (None, None, None, codecs, codecs):
        ddp = wrap(nn.Linear(2000, 1000, bias=False), 25)
        state = gate(ddp, mode="on", codecs=chosen) if chosen else None
        x = torch.ones(1, 2000)
        for _ in range(6):
            ddp.zero_grad(set_to_none=True)
            ddp(x).sum().backward()
        seen.append(resident())
        if state is not None:
            state.close()
        del ddp, state
    return min(seen[3:]) - min(seen[1:3])


# MEM-1: no copy of the gradient beside the residual. Two buckets' workspaces, of one's own payload and those of both ranks.
@pytest.mark.parametrize("codec,wire,residual", [("bf16", 2, 0), ("int8", 1.016, 0), ("int8:ef", 1.016, 4)])
def test_a_state_holds_its_residual_and_payloads(pool, codec, wire, residual):
    bound = ELEMENTS * (residual + 2 * 3 * wire) + (3 << 20)
    for bytes_ in pool.run(2, held, [codec]):
        assert bytes_ < bound, (bytes_, bound)
        if residual:
            assert bytes_ > ELEMENTS * residual / 2, bytes_  # else nothing was looked at
