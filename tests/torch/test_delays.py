"""Ranks that are late at random, bucket by bucket, for 1000 steps: results right, decisions identical."""

import random
import time

import torch
import torch.distributed as dist
from torch import nn

from models import deep, gate, train, weights, wrap


def delays(steps):
    ddp = wrap(deep(width=16, layers=10), 0.0003)
    lines = []
    state = gate(ddp, mode="auto", codecs=["int8", "chunk-topk:8/1024"], log=lines.append)
    rank = dist.get_rank()
    delay = random.Random(rank)
    for p in list(ddp.parameters())[::4]:
        p.register_hook(lambda g: time.sleep(0.0003 * delay.random()) if delay.random() < 0.2 else None)
    train(ddp, steps, lr=0.01, width=16)
    assert len(state.explain()) >= 8
    mine = torch.cat([w.flatten() for w in weights(ddp)])
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)
    return lines


def test_random_delays_keep_ranks_and_logs_identical(pool):
    logs = pool.run(3, delays, 1000, timeout_s=200)
    assert logs[0] == logs[1] == logs[2]
    assert any('"event":"hold"' in line for line in logs[0])


class Integers(nn.Module):
    """Twelve vectors, each in a bucket of its own, with small integers as gradients: sums are exact."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(300)) for _ in range(12))

    def forward(self, given):
        return sum((p * row).sum() for p, row in zip(self.parts, given))


def delayed_sums(steps):
    """Every rank is late at random in every bucket; what is sent and left must be what was given, with ==."""
    ddp = wrap(Integers(), 0.0003)
    lines = []
    state = gate(ddp, mode="auto", codecs=["chunk-topk:8/1024", "topk:0.02"], log=lines.append, link=(50e-6, 1e6))
    delay = random.Random(dist.get_rank())
    for p in ddp.parameters():
        p.register_hook(lambda g: time.sleep(0.0003 * delay.random()) if delay.random() < 0.2 else None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    given, sent = torch.zeros(12, 300), torch.zeros(12, 300)
    for _ in range(steps):
        rows = torch.randint(-8, 9, (12, 300), generator=generator).float()
        ddp.zero_grad(set_to_none=True)
        ddp(rows).backward()
        given += rows
        sent += torch.stack([p.grad for p in ddp.module.parts]) * dist.get_world_size()
    assert len(state.explain()) >= 8 and state.stats()["gradgate/compressed/buckets"] > 90  # of one window at least
    left = state.residuals()
    both = torch.stack([given, torch.stack([left[f"parts.{i}"] for i in range(12)])])
    dist.all_reduce(both)
    assert torch.equal(sent + both[1], both[0])
    return lines


def test_random_delays_keep_the_law_and_logs_identical(pool):
    first, second = pool.run(2, delayed_sums, 1000, timeout_s=200)
    assert first == second and any('"event":"hold"' in line for line in first)
