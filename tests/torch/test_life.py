"""The state's life beside the training: threads, overlap, random state, compiled modules, clipping."""

import gc
import random
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import gradgate.torch as gg
from models import batch, deep, equal, gate, train, weights, wrap


def random_state():
    python_before = random.getstate()
    ddp = wrap(deep())
    state = torch.get_rng_state()
    gate(ddp, mode="on", codecs=["int8:sr"])  # which draws random numbers
    train(ddp, 3)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_before


# DDP-9.
def test_global_random_state_is_not_touched(pool):
    pool.run(2, random_state)


def life():
    ddp = wrap(deep())
    state = gg.GateState(ddp, mode="on", codecs=["int8"], say=None)
    ddp.register_comm_hook(state, gg.gated_hook)
    train(ddp, 2)
    reference = weakref.ref(state)
    gc.collect()
    gc.disable()
    try:
        issuer = state._issuer
        del ddp, state
        assert reference() is None or gc.collect() >= 0  # DDP itself may be part of a cycle
        assert reference() is None
        assert not issuer._thread.is_alive()
    finally:
        gc.enable()


def test_a_dropped_state_ends_its_thread(pool):
    pool.run(2, life)


def compiled():
    torch._dynamo.config.optimize_ddp = True
    model = deep()
    plain = wrap(deep(), 25)
    expected = train(plain, 4)
    ddp = wrap(torch.compile(model, backend="eager"), 25)
    state = gate(ddp, mode="observe", codecs=["int8"])
    seen = train(ddp, 4)
    assert all(equal(a, b) for a, b in zip(expected, seen))
    assert all("_orig_mod" not in name for name in state.state_dict()["names"])


def test_compiled_module(pool):
    pool.run(2, compiled, timeout_s=200)


def compiled_outside(codec):
    """torch.compile around DDP, which cuts the graph at its buckets; against the same training uncompiled."""
    torch._dynamo.config.optimize_ddp = True
    runs = []
    for wrapped in (lambda ddp: ddp, lambda ddp: torch.compile(ddp, backend="eager")):
        ddp = wrap(deep(width=400, layers=8), 1)  # torch.compile wants buckets of 1 MB or more
        state = gate(ddp, mode="on", codecs=[codec])
        model = wrapped(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step, 400)).square().mean().backward()
            optimizer.step()
        assert state.stats()["gradgate/compressed/buckets"] >= 12
        runs.append((weights(ddp), state.residuals()))
    (expected, left), (seen, left_compiled) = runs
    assert equal(expected, seen) and left.keys() == left_compiled.keys()
    assert all(torch.equal(left[name], left_compiled[name]) for name in left)


@pytest.mark.parametrize("codec", ["int8", "chunk-topk:8/1024"])
def test_a_compiled_ddp_module_is_compressed_as_it_is_uncompiled(pool, codec):
    pool.run(2, compiled_outside, codec, timeout_s=200)


def clipped(mode):
    ddp = wrap(deep())
    gate(ddp, mode=mode, codecs=["chunk-topk:64/1024"])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01).item())
        optimizer.step()
    return norms, weights(ddp)


def test_clipping_sees_the_same_norm_on_every_rank(pool):
    (norms, mine), (others, theirs) = pool.run(2, clipped, "on")
    assert norms == others and min(norms) > 0.01 and equal(mine, theirs)


def under_pressure(synchronised, steps):
    """A run whose thread frees and takes memory of a bucket's size while buckets are on their way."""
    ddp = wrap(deep())
    state = gg.GateState(ddp, mode="on", codecs=["int8:sr:ef"], say=None)
    in_flight, overlapped = [], 0

    def hook(s: gg.GateState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal overlapped
        size = bucket.buffer().numel()
        future = gg.gated_hook(s, bucket)
        if synchronised:
            future.wait()
        overlapped += not future.done()
        for value in (float("nan"), 1e30):
            in_flight.append(torch.full((size,), value))
        del in_flight[:-4]
        return future

    ddp.register_comm_hook(state, hook)
    seen = sum(train(ddp, steps, lr=0.01), [])
    return seen, overlapped


# DDP-11 in host memory: what a bucket or payload was in is not used again too early, and nobody waits for everything.
def test_memory_pressure_changes_no_bit(pool):
    free, overlapped = zip(*pool.run(2, under_pressure, False, 300, timeout_s=200))
    synchronised, none = zip(*pool.run(2, under_pressure, True, 300, timeout_s=200))
    assert equal(free[0], free[1]) and equal(free[0], synchronised[0])
    assert min(overlapped) > 300 and none == (0, 0)


def hooks_do_not_wait():
    ddp = wrap(deep())
    state = gg.GateState(ddp, mode="on", codecs=["int8"], say=None)
    called = []

    def counting(s: gg.GateState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        called.append(bucket.index())
        return gg.gated_hook(s, bucket)

    ddp.register_comm_hook(state, counting)
    train(ddp, 3)
    buckets = called[-1] + 1
    release = threading.Event()
    called.clear()
    ddp.zero_grad()
    loss = ddp(batch(3)).square().mean()
    state._issuer.submit(release.wait)  # nothing can be reduced now
    backward = threading.Thread(target=loss.backward)
    backward.start()
    limit = time.monotonic() + 30
    while len(called) < buckets and time.monotonic() < limit:
        time.sleep(0.01)
    seen, alive = list(called), backward.is_alive()
    release.set()
    backward.join(30)
    assert seen == list(range(buckets)) and buckets >= 3 and alive
    assert not backward.is_alive() and state.steps == 4


def test_every_hook_returns_while_nothing_is_reduced_yet(pool):
    pool.run(2, hooks_do_not_wait)
