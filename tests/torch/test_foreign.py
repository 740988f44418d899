"""gated(): other people's hooks against dense. What is faster is decided by a link that the test controls."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradgate
import gradgate.torch as gg
from models import deep, train, weights, wrap

MANY_STEPS = 2 + 10 + 64 + 20  # ungated, start-up, at most two rounds of windows, a piece of hold


def slow(seconds):
    """A hook that averages exactly and takes its time."""

    def slow_average(state, bucket):
        buffer = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(buffer, async_op=True).get_future()

        def later(done):
            time.sleep(seconds)
            return done.value()[0]

        return future.then(later)

    return slow_average


def gated_run(hook_s, dense_s, steps=MANY_STEPS):
    ddp = wrap(deep(width=8, layers=2), 25)
    lines, said = [], []
    state, hook = gg.gated(ddp, None, slow(hook_s), name="mine", log=lines.append, say=said.append)
    dense = state._dense
    state._dense = lambda bucket: slow_dense(dense(bucket), dense_s)
    ddp.register_comm_hook(state, hook)
    train(ddp, steps, width=8)
    found = (state.phase(), state.stats(), state.explain(), lines, said)
    mine = torch.cat([w.flatten() for w in weights(ddp)])
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    assert all(torch.equal(mine, other) for other in everywhere)
    state.close()
    return found


def slow_dense(future, seconds):
    def later(done):
        time.sleep(seconds)
        return done.value()

    return future.then(later)


def test_a_faster_hook_is_verified_and_runs(pool):
    results = pool.run(2, gated_run, 0.0, 0.02)
    phase, stats, line, lines, said = results[0]
    assert phase in ("hold", "verify") and "mine (verified" in line, line  # verify: a busy machine may ask for a check
    assert stats["gradgate/saved_s"] > 0 and stats["gradgate/hook_steps"] > 40
    assert any('"verdict":"win"' in entry for entry in lines) and results[0][3] == results[1][3]
    assert any("verified" in entry for entry in said) and not results[1][4]


def test_a_slower_hook_is_closed_for_good(pool):
    for phase, stats, line, lines, _ in pool.run(2, gated_run, 0.02, 0.0):
        assert phase == "hold" and "dense" in line and "closed for good" in line, line
        assert any('"event":"close"' in entry and "lost_verification" in entry for entry in lines)


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x):
        return (self.weight * x).sum()


def power_sgd_law(steps):
    """While PowerSGD runs, error and gradients add up; when the gate closes, its error is sent."""
    ddp = wrap(Matrix(), 25)
    state, hook = gg.gated_power_sgd(ddp, say=None)
    ddp.register_comm_hook(state, hook)
    plans = iter([3] * 6 + [1] * 2 + [3] * 2 + [2] + [0] * steps)
    state._core.gate.plan = lambda: next(plans)
    state._core.gate.end_step = lambda now_s: None
    size, rank = dist.get_world_size(), dist.get_rank()
    given, sent = torch.zeros(64, 64), torch.zeros(64, 64)
    errors = []
    for step in range(2 + 6 + 2 + 2 + 1 + 1):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step * 10 + rank))
        ddp.zero_grad(set_to_none=True)
        ddp(x).backward()
        total = x.clone()
        dist.all_reduce(total)
        given += total
        sent += ddp.module.weight.grad * size
        error = sum((value.abs().sum().item() for value in state.inner.error_dict.values()), 0.0)
        errors.append(error)
        left = sum(state.inner.error_dict.values(), torch.zeros(64 * 64)).view(64, 64).clone()
        dist.all_reduce(left)
        assert torch.allclose(sent + left, given, atol=1e-3), step
    assert errors[7] > 0 and errors[8] == errors[9] == errors[7]  # probes leave it alone
    assert errors[12] == 0 and errors[13] == 0  # flushed


def test_power_sgd_is_flushed_when_the_gate_closes(pool):
    pool.run(2, power_sgd_law, 5)


class Writer:
    """As torch.utils.tensorboard.SummaryWriter."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))


def shipped():
    for make in (gg.gated_fp16, gg.gated_bf16, gg.gated_power_sgd):
        ddp = wrap(deep())  # several buckets: hooks of several phases must keep their order
        state, hook = make(ddp, say=None)
        ddp.register_comm_hook(state, hook)
        train(ddp, 20)
        mine = weights(ddp)
        expected = wrap(deep(), 25)
        train(expected, 20)
        assert all(torch.allclose(a, b, atol=0.1) for a, b in zip(mine, weights(expected)))
        assert state.stats()["gradgate/steps"] == 20 - 2
        writer = Writer()
        gg.log_to_tensorboard(writer, state)
        assert ("gradgate/steps", 18, 18) in writer.scalars
        assert all(value == value for _, value, _ in writer.scalars)
        state.close()


def test_the_hooks_that_torch_ships(pool):
    pool.run(2, shipped)


def fails():
    ddp = wrap(deep(), 25)

    def broken(state, bucket):
        raise ValueError("this hook is broken")

    ddp.register_comm_hook(*gg.gated(ddp, None, broken, say=None))
    with pytest.raises(Exception, match="this hook is broken"):
        train(ddp, 1)
    other = wrap(deep(), 25)
    with pytest.raises(gradgate.Error, match="hook is 'a' on rank 0 and 'b' on rank 1"):
        gg.gated(other, None, broken, name="ab"[dist.get_rank()], say=None)


def test_errors_of_a_hook_reach_the_caller_and_names_are_compared(pool):
    pool.run(2, fails)
