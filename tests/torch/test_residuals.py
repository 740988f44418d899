"""Residuals by DDP: nothing is lost, through flushes, rebuilt and other buckets, and parameters that take no part."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradgate.torch as gg
from models import Linear, backward, gate, wrap

TOPK = "chunk-topk:1/1024"


def reference_sequence():
    ddp = wrap(Linear(4))
    state = gate(ddp, mode="on", codecs=[TOPK])
    g = torch.tensor([4.0, 3.0, 2.0, 1.0])
    outputs = [backward(ddp, g) for _ in range(8)]
    residual = state.residuals()["weight"]
    # The layout is learnt in the first step, which is dense.
    assert torch.equal(outputs[0], g)
    sent = sum(outputs) * dist.get_world_size()
    everywhere = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, residual)
    return sent + sum(everywhere), [out.tolist() for out in outputs], everywhere


# EF-1, by DDP.
def test_top_k_with_feedback_conserves_what_it_was_given(pool):
    for total, outputs, _ in pool.run(2, reference_sequence):
        assert torch.equal(total, 8 * 2 * torch.tensor([4.0, 3.0, 2.0, 1.0]))
        assert all(sum(value != 0 for value in out) <= 2 for out in outputs[1:])


def flush_between():
    ddp = wrap(Linear(4))
    state = gate(ddp, mode="on", codecs=[TOPK])
    g = torch.tensor([4.0, 3.0, 2.0, 1.0])
    outputs = [backward(ddp, g) for _ in range(3)]
    state.flush()
    outputs.append(backward(ddp, g))
    assert all(not residual.any() for residual in state.residuals().values())
    return torch.stack(outputs)


# EF-4.
def test_flush_sends_everything(pool):
    first, second = pool.run(2, flush_between)
    assert torch.equal(first, second)
    assert torch.equal(first.sum(0), 4 * torch.tensor([4.0, 3.0, 2.0, 1.0]))


def law(options, codec, steps):
    """Sum of what was sent, times N, plus all residuals, equals all gradients: with small integers, exactly."""
    size, rank = dist.get_world_size(), dist.get_rank()

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            for name, n in (("a", 300), ("b", 1), ("empty", 0), ("c", 1500), ("scalar", None), ("d", 700)):
                self.register_parameter(name, nn.Parameter(torch.zeros(()) if n is None else torch.zeros(n)))

        def forward(self, step):
            total = 0
            for index, p in enumerate(self.parameters()):
                total = total + (p * self.grad_of(step, index, p)).sum()
            return total

        def grad_of(self, step, index, p):
            generator = torch.Generator().manual_seed(step * 100 + index * 10 + rank)
            return torch.randint(-8, 9, p.shape, generator=generator).float()

    ddp = wrap(Wide(), 0.0015, **options)
    state = gate(ddp, mode="on", codecs=[codec])
    given = {name: torch.zeros_like(p) for name, p in ddp.module.named_parameters()}
    sent = {name: torch.zeros_like(p) for name, p in ddp.module.named_parameters()}
    for step in range(steps):
        ddp.zero_grad(set_to_none=True)
        ddp(step).backward()
        for index, (name, p) in enumerate(ddp.module.named_parameters()):
            given[name] += ddp.module.grad_of(step, index, p)
            if p.numel():
                sent[name] += p.grad * size
    residuals = state.residuals()
    stats = state.stats()
    assert stats["gradgate/steps"] == steps
    assert stats["gradgate/compressed/buckets"] > 0 and stats["gradgate/dropped_residuals"] == 0
    for name in given:
        mine = given[name].reshape(-1) - residuals.get(name, torch.zeros(given[name].numel()))
        dist.all_reduce(mine)
        assert torch.equal(mine, sent[name].reshape(-1)), name
    return {name: value.tolist() for name, value in sent.items()}


# EF-3.
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_lost_through_rebuilt_buckets(pool, options, size):
    results = pool.run(size, law, options, "chunk-topk:8/1024", 6)
    assert all(result == results[0] for result in results)


class Three(nn.Module):
    """Three vectors whose gradients are given; the middle one may take no part. 1000 is no multiple of 256."""

    def __init__(self):
        super().__init__()
        self.a, self.c, self.b = (nn.Parameter(torch.zeros(1000)) for _ in range(3))

    def forward(self, given, use_c):
        out = (self.a * given[0]).sum() + (self.b * given[2]).sum()
        return out + (self.c * given[1]).sum() if use_c else out


def unused_with_a_residual(codec):
    """c is used in steps 0 to 3 and in the last one; in between its residual waits, and reaches neither a nor b."""
    ddp = wrap(Three(), 25, find_unused_parameters=True)
    state = gate(ddp, mode="on", codecs=[codec])
    generator = torch.Generator().manual_seed(dist.get_rank())
    given, sent, waiting = torch.zeros(3, 1000), torch.zeros(3, 1000), None
    for step in range(9):
        use_c = step < 4 or step == 8
        rows = torch.randint(-8, 9, (3, 1000), generator=generator).float()
        ddp.zero_grad(set_to_none=True)
        ddp(rows, use_c).backward()
        for row, (name, parameter) in enumerate(zip("acb", (ddp.module.a, ddp.module.c, ddp.module.b))):
            if name == "c" and not use_c:
                assert parameter.grad is None
                waiting = state.residuals()["c"] if waiting is None else waiting
                assert torch.equal(state.residuals()["c"], waiting) and waiting.any()
                continue
            given[row] += rows[row]
            sent[row] += parameter.grad * dist.get_world_size()
    left = state.residuals()
    both = torch.stack([given, torch.stack([left[name] for name in "acb"])])
    dist.all_reduce(both)
    assert torch.equal(sent + both[1], both[0])


# DDP-2, with something to lose.
@pytest.mark.parametrize("size", [2, 4])
def test_the_residual_of_an_unused_parameter_waits(pool, size):
    pool.run(size, unused_with_a_residual, "chunk-topk:4/1024")


class FakeBucket:
    """A bucket as DDP shows it, of parameters and in an order that the test chooses."""

    def __init__(self, index, parameters, values, last):
        self._index, self._parameters, self._buffer, self._last = index, parameters, values, last

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def is_last(self):
        return self._last


# Each layout for 5 steps: buckets of the same size in another order, other cuts, and the first again.
LAYOUTS = [["abc", "d"], ["bac", "d"], ["cab", "d"], ["a", "bd", "c"], ["abcd"], ["abc", "d"]]


def relaid(codec):
    sizes = {"a": 700, "b": 700, "c": 700, "d": 3000}
    ddp = wrap(nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}))
    state = gg.GateState(ddp, mode="on", codecs=[codec], say=None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    given, sent = ({name: torch.zeros(size) for name, size in sizes.items()} for _ in range(2))
    for layout in LAYOUTS:
        for _ in range(5):
            futures = []
            for index, names in enumerate(layout):
                mine = [torch.randint(-8, 9, (sizes[name],), generator=generator).float() for name in names]
                for name, values in zip(names, mine):
                    given[name] += values
                parameters = [ddp.module[name] for name in names]
                bucket = FakeBucket(index, parameters, torch.cat(mine), index + 1 == len(layout))
                futures.append((names, gg.gated_hook(state, bucket)))
            for names, future in futures:
                for name, values in zip(names, future.wait().split([sizes[name] for name in names])):
                    sent[name] += values * dist.get_world_size()
        assert any(values.any() for values in state.residuals().values())  # something that could be mixed up
    left = state.residuals()
    for name in sizes:
        both = torch.stack([given[name], left[name]])
        dist.all_reduce(both)
        assert torch.equal(sent[name] + both[1], both[0]), name
    stats = state.stats()
    assert stats["gradgate/dropped_residuals"] == 0 and stats["gradgate/compressed/buckets"] > 30
    return torch.cat(list(sent.values()))


# EF-3, while residuals wait, and DTY-2: DDP's own rebuilding comes before there are any.
@pytest.mark.parametrize("codec", ["chunk-topk:8/1024", "topk:0.01"])
def test_residuals_follow_their_parameters_into_other_orders_and_buckets(pool, codec):
    first, second = pool.run(2, relaid, codec)
    assert torch.equal(first, second)
