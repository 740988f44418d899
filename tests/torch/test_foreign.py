"""gated(): other people's hooks against dense. What is faster is decided by a link that the test controls."""

import io
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradgate
import gradgate.torch as gg
from gradgate._session import HookGate
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


def forced(state, plan):
    """Lets a gated hook do what the test says."""
    state._core.gate.plan = lambda: plan
    state._core.gate.end_step = lambda now_s: None


def sums(ddp, step):
    """One step of integers; the sum over ranks of the gradients given, and of what came out."""
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    ddp.zero_grad(set_to_none=True)
    loss, given = 0, []
    for parameter in ddp.module.parameters():
        x = torch.randint(-8, 9, parameter.shape, generator=generator).float()
        loss = loss + (parameter * x).sum()
        given.append(x.reshape(-1))
    ddp(loss).backward()
    total = torch.cat(given)
    dist.all_reduce(total)
    return total, torch.cat([p.grad.reshape(-1) for p in ddp.module.parameters()]) * dist.get_world_size()


class Several(nn.Module):
    """Four matrices, in several buckets; the forward pass gives the loss through."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(32, 32)) for _ in range(4))

    def forward(self, loss):
        return loss


def gated_power_sgd(bucket_mb):
    ddp = wrap(Several(), bucket_mb)
    state, hook = gg.gated_power_sgd(ddp, say=None)
    ddp.register_comm_hook(state, hook)
    forced(state, HookGate.HOOK)
    return ddp, state


def left_by(state):
    left = sum(value.sum(dtype=torch.float64).item() for value in state.inner.error_dict.values())
    everywhere = torch.tensor([left], dtype=torch.float64)
    dist.all_reduce(everywhere)
    return everywhere.item()


def saved_hook(steps, bucket_mb):
    ddp, state = gated_power_sgd(bucket_mb)
    given, sent = (sum(column).sum().item() for column in zip(*(sums(ddp, step) for step in range(steps))))
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    return buffer.getvalue(), given, sent, left_by(state), sorted(state.inner.error_dict)


def resumed_hook(files, first, bucket_mb):
    ddp, state = gated_power_sgd(bucket_mb)
    loaded = torch.load(io.BytesIO(files[dist.get_rank()]), weights_only=True)
    state.load_state_dict(loaded)
    again = state.state_dict()  # before the first step it is what was loaded
    assert again["steps"] == loaded["steps"] and again["layout"] == loaded["layout"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [sums(ddp, first + step) for step in range(6)]
    assert all(torch.equal(a, b) for a, b in rows[:2])  # dense, the hook's residual waits
    given, sent = (sum(column).sum().item() for column in zip(*rows))
    texts = [str(w.message) for w in caught if "gradgate" in str(w.message)]
    return given, sent, left_by(state), texts, isinstance(state.inner.process_group, dist.ProcessGroup)


# Of random state PowerSGD keeps the seed, so only the sums are compared: nothing of its error is lost on the way.
def test_a_gated_hooks_state_goes_on_where_it_was_saved(pool):
    saved = pool.run(2, saved_hook, 8, 0.003)
    resumed = pool.run(2, resumed_hook, [row[0] for row in saved], 8, 0.003)
    for (_, given, sent, left, buckets), (more, sent_then, left_then, texts, has_group) in zip(saved, resumed):
        assert len(buckets) >= 3 and abs(left) > 1
        assert abs(sent + left - given) < 0.05
        assert abs(sent + sent_then + left_then - given - more) < 0.1
        assert texts == [] and has_group


def test_a_gated_hooks_state_of_other_buckets_is_said_and_not_used(pool):
    saved = pool.run(2, saved_hook, 8, 0.003)
    for given, sent, left, texts, _ in pool.run(2, resumed_hook, [row[0] for row in saved], 8, 25):
        assert len(texts) == 1 and "other buckets" in texts[0], texts
        assert abs(sent + left - given) < 0.1  # of its own steps alone


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()


def refusals(files):
    ddp = wrap(Several(), 0.003)
    state, _ = gg.gated(ddp, Unpicklable(), slow(0), name="locked", say=None)
    with pytest.raises(gradgate.Error, match="'locked', a Unpicklable, cannot be pickled.*__getstate__"):
        state.state_dict()
    stateless, hook = gg.gated_fp16(wrap(Several(), 0.003), say=None)
    assert stateless.state_dict()["inner"] is None
    texts = []
    loaded = torch.load(io.BytesIO(files[dist.get_rank()]), weights_only=True)
    wrongs = {"version": 9, "hook": "other", "world_size": 4, "rank": 7, "inner": loaded["inner"][:9]}
    for field, value in wrongs.items():
        ddp, power = gated_power_sgd(0.003)
        # Rank 1 alone has the wrong one: both refuse.
        wrong = {**loaded, field: value} if dist.get_rank() == 1 else loaded
        with pytest.raises(gradgate.Error) as caught:
            power.load_state_dict(wrong)
        assert power.state_dict()["steps"] == 0 and not power.inner.error_dict
        texts.append(str(caught.value))
    sums(ddp, 0)
    with pytest.raises(gradgate.Error, match="before the first"):
        power.load_state_dict(loaded)
    return texts


def test_states_of_a_gated_hook_that_cannot_be_used_are_refused_by_all(pool):
    files = [row[0] for row in pool.run(2, saved_hook, 3, 0.003)]
    here, there = pool.run(2, refusals, files)
    for mine, other, word in zip(here, there, ("version 9", "'other'", "world_size 4", "rank 7", "cannot be read")):
        assert word in mine and "rank 1" in mine and word in other, (mine, other)


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
