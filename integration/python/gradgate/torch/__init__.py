"""A gate in front of the gradient reduction of DistributedDataParallel.

    state = gradgate.torch.GateState(ddp, codecs=["bf16", "int8"], mode="auto")
    ddp.register_comm_hook(state, gradgate.torch.gated_hook)
"""

import torch as _torch

if not _torch.distributed.is_available() or tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 1):
    raise ImportError(f"gradgate.torch needs torch 2.1 or newer with torch.distributed, found {_torch.__version__}")

from ._hook import gated_hook
from ._state import GateState

__all__ = ["GateState", "gated_hook"]
