"""Loss scaling: growth, backoff and skipped steps against an unscaled run, bit for bit."""

import pickle

import pytest
import torch
import torch.distributed as dist

import gradgate.torch as gg
from models import batch, deep, equal, gate, weights, wrap


def run(codec, scaled, poisoned, steps, mode="on"):
    """SGD without momentum; steps in ``poisoned`` have an Inf in one gradient of rank 1 and must leave no trace."""
    ddp = wrap(deep())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if scaled else None
    state = gate(ddp, mode=mode, codecs=[codec], scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.25)
    scales, index = [], 0
    for step in range(steps):
        optimizer.zero_grad()
        if step in poisoned and not scaled:
            continue
        loss = ddp(batch(index)).square().mean()
        if not scaled:
            loss.backward()
            optimizer.step()
            index += 1
            continue
        if step in poisoned and dist.get_rank() == 1:
            handle = list(ddp.parameters())[5].register_hook(lambda g: g * float("inf"))
        scaler.scale(loss).backward()
        if step in poisoned and dist.get_rank() == 1:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        index += step not in poisoned
    return weights(ddp), scales, state.stats()["gradgate/skipped_steps"], state.residuals()


def both(codec, poisoned, steps, mode="on"):
    expected, _, _, plain_residuals = run(codec, False, poisoned, steps, mode)
    seen, scales, skipped, residuals = run(codec, True, poisoned, steps, mode)
    assert skipped == len(poisoned)
    for a, b in zip(expected, seen):
        assert torch.equal(a, b), (a - b).abs().max()
    used = scales[-2]  # of the last step; the last entry is already the next one's
    for name, value in plain_residuals.items():
        assert torch.equal(value * used, residuals[name]), name
    return scales


# DDP-8.
@pytest.mark.parametrize("codec", ["chunk-topk:64/1024", "int8:ef", "int8"])
def test_scaled_equals_unscaled(pool, codec):
    first, second = pool.run(2, both, codec, (4, 5, 9), 14)
    assert first == second
    assert first[4] == first[3] / 2 and first[5] == first[4] / 2  # backed off on both ranks
    assert max(first) > first[0]  # and grew


def test_a_dense_step_shows_the_overflow_to_every_rank(pool):
    first, second = pool.run(2, both, "int8", (3,), 6, "auto")
    assert first == second and first[3] == first[2] / 2


def pickled_in_between(unscaled):
    """As run(), with a state that is pickled after 4 steps and attached again: to a scaler, where there is one."""
    ddp = wrap(deep())
    scaler = None if unscaled else torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    options = {"mode": "on", "codecs": ["chunk-topk:64/1024"]}
    holder = [gg.GateState(ddp, **options, scaler=scaler, say=None)]

    def hook(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return gg.gated_hook(holder[0], bucket)

    ddp.register_comm_hook(None, hook)
    for step in range(8):
        if step == 4:
            kept = pickle.dumps(holder[0])
            holder[0].close()
            holder[0] = pickle.loads(kept)
            lines = []
            holder[0].attach(ddp, scaler=scaler, log=lines.append, say=None)
        ddp.zero_grad()
        loss = ddp(batch(step)).square().mean()
        (loss if unscaled else scaler.scale(loss)).backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.25 * (p.grad if unscaled else p.grad / scaler.get_scale())
        if not unscaled:
            scaler._per_optimizer_states.clear()
            scaler.update(scaler.get_scale() * (2.0 if step % 2 else 1.0))
    assert lines  # the log goes on
    return weights(ddp)


def test_a_state_attached_again_follows_the_scaler_it_is_given(pool):
    for expected, seen in zip(pool.run(2, pickled_in_between, True), pool.run(2, pickled_in_between, False)):
        assert equal(expected, seen)
