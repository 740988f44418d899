"""The compressed path under everything DDP does to buckets. What becomes of residuals: test_residuals.py."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

import gradgate.torch as gg
from models import Linear, backward, batch, deep, equal, gate, gradients, wrap

TOPK = "chunk-topk:1/1024"


def average_is_six(mode, codecs):
    ddp = wrap(Linear(1000))
    gate(ddp, mode=mode, codecs=codecs)
    x = torch.full((1000,), 3.0 * (dist.get_rank() + 1))
    return [backward(ddp, x).unique().tolist() for _ in range(4)]


# DDP-7.
@pytest.mark.parametrize("mode,codecs", [("off", ["int8"]), ("on", ["int8"]), ("on", ["bf16"]), ("auto", ["int8"])])
def test_averages_once(pool, mode, codecs):
    assert pool.run(3, average_is_six, mode, codecs) == [[[6.0]] * 4] * 3


def accumulate():
    ddp = wrap(Linear(1))
    state = gate(ddp, mode="on", codecs=["int8:ef"])
    rank = dist.get_rank()
    backward(ddp, torch.zeros(1))
    ddp.zero_grad(set_to_none=True)
    with ddp.no_sync():
        ddp(torch.tensor([1.0 + rank])).backward()
    inside = ddp.module.weight.grad.item()
    steps_inside = state.steps
    ddp(torch.tensor([10.0 + 10 * rank])).backward()
    return inside, steps_inside, ddp.module.weight.grad.item(), state.steps


# DDP-1.
def test_no_sync_sends_the_accumulated_gradient_once(pool):
    assert pool.run(2, accumulate) == [(1.0, 1, 16.5, 2), (2.0, 1, 16.5, 2)]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, x, use_b, use_c):
        out = self.a * x
        if use_b:
            out = out + self.b * x
        if use_c:
            out = out + self.c * x
        return out.sum()


def unused(codecs):
    ddp = wrap(Branches(), find_unused_parameters=True)
    gate(ddp, mode="on", codecs=codecs)
    seen = []
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(torch.ones(1), dist.get_rank() == 0, step == 0).backward()
        module = ddp.module
        seen.append([None if p.grad is None else p.grad.item() for p in (module.a, module.b, module.c)])
    return seen


# DDP-2.
def test_unused_parameters_get_nothing(pool):
    for seen in pool.run(2, unused, ["int8:ef"]):
        assert seen[0] == [1.0, 0.5, 1.0]
        for a, b, c in seen[1:]:
            assert a == 1.0 and abs(b - 0.5) < 0.005 and c is None


def uneven(mode, codecs, by_initial_size=True):
    ddp = wrap(Linear(600))
    state = gate(ddp, mode=mode, codecs=codecs)
    rank, seen = dist.get_rank(), []
    with Join([ddp], divide_by_initial_world_size=by_initial_size):
        for _ in range(1 if rank == 0 else 3):
            seen.append(backward(ddp, torch.full((600,), 2.0 * (rank + 1))).unique().tolist())
    return seen, state.steps


# DDP-5.
@pytest.mark.parametrize("mode,codecs", [("off", []), ("auto", ["int8"]), ("on", ["int8"]), ("on", [TOPK])])
def test_join_with_uneven_inputs(pool, mode, codecs):
    (short, short_steps), (long, long_steps) = pool.run(2, uneven, mode, codecs)
    assert short == [[3.0]] and short_steps == long_steps == 3
    if codecs != [TOPK]:
        assert long == [[3.0], [2.0], [2.0]]


def test_join_divides_by_all_ranks_whatever_it_is_told(pool):
    _, (long, _) = pool.run(2, uneven, "on", ["int8"], False)
    assert long == [[3.0], [2.0], [2.0]]


class Mixed(nn.Module):
    """f32 parameters of 3, 0 and 1 elements, f64 of 5, a complex one, and a sparse embedding."""

    def __init__(self, sparse):
        super().__init__()
        self.x, self.y, self.z = (nn.Parameter(torch.zeros(n)) for n in (3, 0, 1))
        self.d = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.i = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.table = nn.Embedding(4, 3, sparse=True) if sparse else None

    def forward(self, value):
        out = (self.x * value).sum() + (self.y * value).sum() + (self.z * value).sum() + (self.d * value).sum()
        out = out + torch.view_as_real(self.i * value).sum()
        if self.table is not None:
            out = out + (self.table(torch.tensor([1, 2])) * value).sum()
        return out


def mixed(sparse):
    ddp = wrap(Mixed(sparse), 0.00001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = gate(ddp, mode="on", codecs=["int8:ef"])
        seen = []
        for _ in range(4):
            ddp.zero_grad(set_to_none=True)
            ddp(float(dist.get_rank() + 1)).backward()
            found = [p.grad for p in ddp.module.parameters() if p.numel()]
            seen.append([g.to_dense() if g.is_sparse else g for g in found])
    texts = [str(w.message) for w in caught if "gradgate" in str(w.message)]
    assert len([t for t in texts if "float64" in t]) == 1, texts
    assert set(state.residuals()) == {"x", "y", "z", "i"}
    for step in seen:
        for gradient in step[:3]:
            assert torch.allclose(gradient, torch.full_like(gradient, 1.5), rtol=1e-2), gradient
        assert torch.equal(step[2], torch.full((5,), 1.5, dtype=torch.float64))
        if sparse:
            assert torch.equal(step[4][1:3], torch.full((2, 3), 1.5))


# DTY-2 and DTY-5.
@pytest.mark.parametrize("sparse", [False, True])
def test_dtypes_and_lengths_that_change_under_a_bucket_index(pool, sparse):
    pool.run(2, mixed, sparse)


def guarded():
    ddp = wrap(Linear(5000))
    state = gate(ddp, mode="on", codecs=["int4:noef", "int8"], error_budget=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(70):
        backward(ddp, torch.randn(5000, generator=generator))
    return state.stats()["gradgate/demotions"], state.stats()["gradgate/compression_error"], state.explain()[0]


@pytest.mark.parametrize("size", [2, 3])
def test_the_guard_acts_in_mode_on(pool, size):
    for demotions, error, line in pool.run(size, guarded):
        assert demotions == 1 and 0 < error < 0.05 and "int8" in line, line


def two_modules():
    torch.manual_seed(0)
    first, second = wrap(deep()), wrap(deep(layers=3))
    gate(first, mode="on", codecs=["int8"], seed=1)
    gate(second, mode="auto", codecs=["int8"])
    for step in range(6):
        first.zero_grad()
        second.zero_grad()
        (first(batch(step)).square().mean() + second(batch(step)).square().mean()).backward()
        # Other collectives of the program are not touched, and may come between.
        metric = torch.tensor([1e6 + 1, 1e-6])
        dist.all_reduce(metric)
        assert torch.equal(metric, torch.tensor([1e6 + 1, 1e-6]) * 2)
    return gradients(first), gradients(second)


def metric_of(value: float) -> torch.Tensor:
    """A collective of the program's own, which must come out exact."""
    metric = torch.tensor([1e6 + value, 1e-6])
    dist.all_reduce(metric)
    return metric


class Measuring(Linear):
    """Reduces a metric inside its forward pass."""

    def forward(self, x):
        self.inside = metric_of(1)
        return super().forward(x)


def metrics():
    ddp = wrap(Measuring(600))
    state = gate(ddp, mode="on", codecs=["int8"])
    for _ in range(4):
        backward(ddp, torch.full((600,), float(dist.get_rank())))
        for metric in (ddp.module.inside, metric_of(1)):
            assert torch.equal(metric, torch.tensor([1e6 + 1, 1e-6]) * 2)
    assert state.stats()["gradgate/steps"] == 4 and state.stats()["gradgate/compressed/buckets"] == 3


# COL-10.
def test_metrics_in_the_forward_pass_and_before_the_step_are_exact(pool):
    pool.run(2, metrics)


def test_several_modules_and_other_collectives(pool):
    (a1, a2), (b1, b2) = pool.run(2, two_modules)
    assert equal(a1, b1) and equal(a2, b2)


def sub_group():
    group = dist.new_group([0, 2])
    rank = dist.get_rank()
    if rank == 1:
        return None
    ddp = wrap(Linear(8), process_group=group)
    state = gate(ddp, mode="on", codecs=["int8"])
    with pytest.raises(RuntimeError):
        ddp.register_comm_hook(state, gg.gated_hook)
    return [backward(ddp, torch.full((8,), float(rank + 1))).unique().tolist() for _ in range(3)]


def wrapped_in_fp16():
    ddp = wrap(Linear(600))
    state = gg.GateState(ddp, mode="on", codecs=["int8"], say=None)
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(gg.gated_hook))
    seen = [backward(ddp, torch.full((600,), float(dist.get_rank() + 1))) for _ in range(4)]
    assert all(gradient.dtype == torch.float32 for gradient in seen)
    assert state.stats()["gradgate/dense/bytes"] == 4 * 600 * 2 and state.stats()["gradgate/compressed/buckets"] == 3
    return [gradient.unique().tolist() for gradient in seen]


# DDP-10, with the next test.
def test_torchs_fp16_wrapper_around_the_hook(pool):
    assert pool.run(2, wrapped_in_fp16) == [[[1.5]] * 4] * 2


def low_precision(dtype, mode):
    ddp = wrap(Linear(600).to(dtype))
    state = gate(ddp, mode=mode, codecs=["int8"])
    seen = [backward(ddp, torch.full((600,), float(dist.get_rank() + 1), dtype=dtype)) for _ in range(4)]
    assert all(gradient.dtype == dtype for gradient in seen)
    if mode == "on":
        assert state.stats()["gradgate/compressed/buckets"] == 3
    return [gradient.unique().tolist() for gradient in seen]


# DTY-6: gloo sums neither dtype as int8 payloads need it; payloads travel as bytes.
@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision(pool, dtype, mode):
    assert pool.run(2, low_precision, dtype, mode) == [[[1.5]] * 4] * 2


def test_sub_group_averages_over_its_own_ranks_and_a_second_hook_is_refused(pool):
    assert pool.run(3, sub_group) == [[[2.0]] * 3, None, [[2.0]] * 3]


def aliasing(view):
    ddp = wrap(Linear(300), gradient_as_bucket_view=view)
    state = gate(ddp, mode="on", codecs=["int8:ef"])
    rank, seen = dist.get_rank(), []
    for t in range(1, 7):
        seen.append(backward(ddp, torch.full((300,), float((rank + 1) * t))).unique().tolist())
        before = {name: value.clone() for name, value in state.residuals().items()}
        ddp.module.weight.grad.mul_(100)
        assert equal(before.values(), state.residuals().values())
    return seen


# DDP-6.
@pytest.mark.parametrize("view", [False, True])
def test_results_do_not_alias_the_librarys_memory(pool, view):
    assert pool.run(2, aliasing, view) == [[[1.5 * t] for t in range(1, 7)]] * 2
