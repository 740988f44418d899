"""The conservation law as a property: any sizes, any sequence of steps, flushes, restored states and skipped syncs."""

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from models import gate, wrap


class Vectors(nn.Module):
    """The gradient of vector i at a step is what small_integers() says."""

    def __init__(self, sizes):
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, step):
        return sum((p * small_integers(step, i, p.numel())).sum() for i, p in enumerate(self.vectors))


def small_integers(step, index, count):
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + dist.get_rank())
    return torch.randint(-8, 9, (count,), generator=generator).float()


def scenario(sizes, actions, codec, bucket_mb):
    ddp = wrap(Vectors(sizes), bucket_mb)
    state = gate(ddp, mode="on", codecs=[codec])
    given_sum = [torch.zeros(size) for size in sizes]
    sent = [torch.zeros(size) for size in sizes]
    for step, action in enumerate(["step", *actions]):
        if action == "flush":
            state.flush()
        if action == "reload":
            state.load_state_dict(state.state_dict())
        ddp.zero_grad(set_to_none=True)
        if action == "accumulate":
            with ddp.no_sync():
                ddp(1000 + step).backward()
        ddp(step).backward()
        for i, p in enumerate(ddp.module.vectors):
            given_sum[i] += small_integers(step, i, sizes[i])
            if action == "accumulate":
                given_sum[i] += small_integers(1000 + step, i, sizes[i])
            sent[i] += p.grad * dist.get_world_size()
    residuals = state.residuals()
    for i, size in enumerate(sizes):
        left = residuals.get(f"vectors.{i}", torch.zeros(size))
        both = torch.stack([given_sum[i], left])
        dist.all_reduce(both)
        assert torch.equal(sent[i] + both[1], both[0]), (i, sizes, actions)
    state.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    actions=st.lists(st.sampled_from(["step", "step", "flush", "reload", "accumulate"]), max_size=8),
    codec=st.sampled_from(["chunk-topk:8/1024", "chunk-topk:1/256", "chunk-topk:300/2048"]),
    bucket_mb=st.sampled_from([0.001, 0.005, 25]),
)
def test_what_was_sent_and_what_is_left_is_what_was_given(pool, sizes, actions, codec, bucket_mb):
    pool.run(2, scenario, sizes, actions, codec, bucket_mb)
