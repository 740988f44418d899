"""The hook. No postponed annotations in this file: DDP compares them with the classes themselves."""

import torch
import torch.distributed as dist

from ._state import GateState


def gated_hook(state: GateState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for ``ddp.register_comm_hook(GateState(ddp), gated_hook)``.

    Takes a bucket of gradients (flat, any dtype) and returns at once; the future holds the average over the ranks, in
    the bucket's own memory.
    """
    return state._reduce(bucket)
