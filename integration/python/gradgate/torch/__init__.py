"""A gate in front of the gradient reduction of DistributedDataParallel.

    state = gradgate.torch.GateState(ddp, codecs=["bf16", "int8"], mode="auto")
    ddp.register_comm_hook(state, gradgate.torch.gated_hook)
"""

try:
    import torch as _torch
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ImportError("gradgate.torch needs torch 2.1 or newer, which is not installed", name="torch") from None

if not _torch.distributed.is_available() or tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 1):
    _found = _torch.__version__
    raise ImportError(f"gradgate.torch needs torch 2.1 or newer with torch.distributed, found {_found}", name="torch")

from ._foreign import HookGateState, gated, gated_bf16, gated_fp16, gated_power_sgd
from ._hook import gated_hook
from ._state import GateState
from ._tensorboard import log_to_tensorboard

__all__ = [
    "GateState",
    "HookGateState",
    "gated",
    "gated_bf16",
    "gated_fp16",
    "gated_hook",
    "gated_power_sgd",
    "log_to_tensorboard",
]
