"""Loss scaling: growth, backoff and skipped steps against an unscaled run, bit for bit."""

import pytest
import torch
import torch.distributed as dist

from models import batch, deep, gate, weights, wrap


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
