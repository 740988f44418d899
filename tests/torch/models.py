"""Small models and one training loop for the tests: every rank has other data, and several buckets."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradgate.torch as gg

MANY_BUCKETS_MB = 0.002  # about 500 floats a bucket


def deep(width: int = 24, layers: int = 6, dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*parts).to(dtype)


class Linear(torch.nn.Module):
    """sum(weight * x): the gradient of the weight is x."""

    def __init__(self, n):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return (self.weight * x).sum()


def batch(step: int, width: int = 24, rank: int | None = None, dtype=torch.float32):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, width, generator=generator).to(dtype)


def wrap(model, bucket_mb: float = MANY_BUCKETS_MB, **options):
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)


def gate(ddp, **options):
    """A silent GateState, registered."""
    options.setdefault("say", None)
    state = gg.GateState(ddp, **options)
    ddp.register_comm_hook(state, gg.gated_hook)
    return state


def gradients(ddp) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in ddp.parameters() if p.grad is not None]


def weights(ddp) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ddp.parameters()]


def train(ddp, steps, first=0, lr=0.05, set_to_none=True, width=24, dtype=torch.float32):
    """SGD steps; the gradients of every step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        ddp(batch(step, width, dtype=dtype)).square().mean().backward()
        seen.append(gradients(ddp))
        optimizer.step()
    return seen


def equal(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def backward(ddp, x) -> torch.Tensor:
    """Of a Linear: the gradient of its weight."""
    ddp.zero_grad(set_to_none=True)
    ddp(x).backward()
    return ddp.module.weight.grad.clone()
