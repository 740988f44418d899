"""Buckets in device memory: the same steps as in _core.py, enqueued on streams by the hook itself. NCCL ranks of its own.

Nothing here touches torch.cuda: streams are numbers (cudaStream_t), so that the path can be run with any device memory.
"""

import ctypes

import torch
import torch.distributed as dist

from .. import _native
from ._core import Arrival, Core

_ID_BYTES = 128


class NcclCommunicator:
    """NCCL ranks, one for each of ``group``, on the CUDA devices that are current. ``failure`` is always None: what went
    wrong is in the session's text."""

    failure = None

    def __init__(self, group: dist.ProcessGroup, timeout_s: float):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        native = _native.library()
        name, text = ctypes.create_string_buffer(_ID_BYTES), ctypes.create_string_buffer(512)
        code = native.gg_nccl_make_id(name, text, len(text)) if self.rank == 0 else 0
        # Rank 0 tells in any case: a rank that waits for an id that does not come would wait for its timeout.
        said = [(code, name.raw, text.value.decode(errors="replace"))]
        dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
        code, identity, why = said[0]
        if code != 0:
            raise _native.Error(code, why)
        # c_char_p would end at the id's first zero byte: it is handed over as memory.
        memory = ctypes.create_string_buffer(identity, _ID_BYTES)
        self.handle = _native.created(
            native.gg_comm_create_nccl, ctypes.cast(memory, ctypes.c_char_p), self.rank, self.size, timeout_s
        )

    def choose_all_to_all(self) -> None:
        """NCCL chooses for itself."""

    def drop_started(self) -> None:
        """Nothing is started here that the session does not wait for."""

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            _native.library().gg_comm_destroy(handle)


class DeviceCore(Core):
    """Core over device memory. Called by the hook, from whatever thread DDP calls it, one at a time; ``finish`` of an
    arrival is called when its reduction is enqueued: join() a stream before the result is used on it."""

    def _connect(self, group: dist.ProcessGroup, timeout_s: float) -> NcclCommunicator:
        return NcclCommunicator(group, timeout_s)

    def _reduce(self, index: int, buffer: torch.Tensor, dtype: int, arrival: Arrival) -> None:
        self.session.all_reduce_on(index, buffer.data_ptr(), buffer.numel(), dtype, arrival.stream)

    def _reduce_dense(self, buffer: torch.Tensor, dtype: int, arrival: Arrival) -> None:
        self.session.all_reduce_dense_on(buffer.data_ptr(), buffer.numel(), dtype, arrival.stream)

    def join(self, stream: int) -> None:
        self.session.join(stream)

    def stats(self) -> dict[str, int | float]:
        self.session.synchronize()
        return super().stats()
