"""The compressed path under everything DDP does to buckets."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

import gradgate
import gradgate.torch as gg
from gradgate._session import between
from gradgate.torch import _group
from models import batch, deep, equal, gate, gradients, train, wrap
from ranks import free_port

TOPK = "chunk-topk:1/1024"


class Linear(nn.Module):
    """sum(weight * x): the gradient of the weight is x."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return (self.weight * x).sum()


def backward(ddp, x):
    ddp.zero_grad(set_to_none=True)
    ddp(x).backward()
    return ddp.module.weight.grad.clone()


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


def by_exchange(codec):
    ddp = wrap(Linear(600))
    gate(ddp, mode="on", codecs=[codec])
    generator = torch.Generator().manual_seed(dist.get_rank())
    backward(ddp, torch.zeros(600))
    return backward(ddp, torch.randn(600, generator=generator))


def test_two_ranks_need_one_collective_a_bucket(pool):
    plain, gathered, two = (pool.run(2, by_exchange, "int8" + e) for e in ("", "@all_gather", "@two_shot"))
    assert equal(plain, gathered) and not equal(plain, two)


def test_more_ranks_keep_the_exchange_of_the_codec(pool):
    plain, two = (pool.run(3, by_exchange, "int8" + exchange) for exchange in ("", "@two_shot"))
    assert equal(plain, two)


def in_rounds(codec, always):
    ddp = wrap(Linear(1001))  # which no number of ranks here divides
    state = gate(ddp, mode="on", codecs=[codec])
    chosen = state._core.communicator.rounds_from
    state._core.communicator.rounds_from = 0 if always else math.inf
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = [backward(ddp, torch.randn(1001, generator=generator)) for _ in range(4)]
    return chosen, seen


@pytest.mark.parametrize("codec", ["int8", "bf16", "chunk-topk:8/1024"])
@pytest.mark.parametrize("size", [3, 4])
def test_an_all_to_all_in_rounds_gives_the_same_bits(pool, size, codec):
    rounds, at_once = (pool.run(size, in_rounds, codec, always) for always in (True, False))
    assert all(equal(seen, at_once[0][1]) for _, seen in [*rounds, *at_once])
    for results in (rounds, at_once):
        assert len({chosen for chosen, _ in results}) == 1  # the ranks measured, and agreed


def over_another_backend(name, port, codec):
    """A training over gloo by another name, without what torch's MPI backend does not do; its gradients, and those of a
    group of some of the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # all are connected: none is left alone by what follows
    dist.destroy_process_group()
    if name != "gloo":

        def create(store, rank, size, timeout):
            return dist.ProcessGroupGloo(store, rank, size, timeout)

        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu"])
        new_group, gather = dist.new_group, _group._all_gather

        def new_group_with_all(*arguments, use_local_synchronization=False, **named):
            assert not use_local_synchronization
            return new_group(*arguments, **named)

        dist.new_group, _group._all_gather = new_group_with_all, None
    try:
        dist.init_process_group(name, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        ddp = wrap(deep())
        state = gate(ddp, mode="on", codecs=[codec])
        seen = sum(train(ddp, 5), [])
        assert state.stats()["gradgate/compressed/buckets"] > 0
        state.close()
        some = dist.new_group([0, 1])
        if name != "gloo" and size > 2 and rank < 2:
            with pytest.raises(gradgate.Error, match="2 of 3 ranks, accepted: all of them"):
                gate(wrap(Linear(4), process_group=some), mode="on")
        return seen
    finally:
        if name != "gloo":
            dist.new_group, _group._all_gather = new_group, gather


# What can be tested of MPI with a torch that has none.
@pytest.mark.parametrize("codec", ["int8", "topk:0.05"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_backend_that_makes_groups_with_all_ranks_only(pool, size, codec):
    gloo, other = (pool.run(size, over_another_backend, name, free_port(), codec) for name in ("gloo", "mpi_like"))
    assert all(equal(seen, gloo[0]) for seen in [*gloo, *other])


def test_only_two_shots_become_all_gathers_and_names_are_kept():
    codecs = ["int8", "chunk-topk:8/1024:bf16", "topk:0.01", "none", "int4@two_shot", "no-such-codec"]
    gathered = ["int8@all_gather", "chunk-topk:8/1024:bf16@all_gather", *codecs[2:]]
    assert between(2, "on", codecs) == gathered
    assert between(2, "auto", codecs) == [*gathered, "bf16@all_gather"]
    assert between(3, "auto", codecs) == codecs


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
