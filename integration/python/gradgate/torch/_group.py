"""torch.distributed as a communicator of the native library: blocking collectives on the memory it names."""

import ctypes
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import _native
from .._native import Error

# DType of gradgate/types.h.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_BYTES = (4, 2, 2, 8, 1)
# Named anew in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def view_memory(pointer: int | None, count: int, dtype: int) -> torch.Tensor:
    """The ``count`` elements at ``pointer`` as a tensor, without a copy."""
    if count == 0:
        return torch.empty(0, dtype=DTYPES[dtype])
    memory = (ctypes.c_char * (count * _BYTES[dtype])).from_address(pointer)
    return torch.frombuffer(memory, dtype=DTYPES[dtype], count=count)


def status_of(error: BaseException) -> int:
    """Status code that stands for an exception of torch.distributed."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:
        return 7
    if "closed by peer" in text or "reset by peer" in text or "connection" in text:
        return 8
    return 13


def sibling_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """A new gloo group of the ranks of ``group``; collective among those only."""
    try:
        return dist.new_group(
            ranks=dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
        )
    except (RuntimeError, ValueError) as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        hint = f"; GLOO_SOCKET_IFNAME is {interface!r}, accepted: names of interfaces, e.g. lo" if interface else ""
        raise Error(12, f"gradgate: cannot make a gloo group of its own: {error}{hint}") from error


class Communicator:
    """``group`` as a gg_comm. Used by one thread; ``failure`` is the exception behind the last error."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.failure: BaseException | None = None
        self._text = ctypes.create_string_buffer(400)
        self._ops = _native.CommunicatorOps(
            ctypes.sizeof(_native.CommunicatorOps),
            _native.COLLECTIVE(self._guard(self._all_reduce)),
            _native.COLLECTIVE(self._guard(self._all_gather)),
            _native.COLLECTIVE(self._guard(self._all_to_all)),
            _native.COLLECTIVE(self._guard(self._reduce_scatter)),
            _native.BROADCAST(self._guard(self._broadcast)),
            _native.BARRIER(self._guard(self._barrier)),
            _native.ABORT(),
            _native.LAST_ERROR(lambda _: ctypes.addressof(self._text)),
        )
        name = f"torch.distributed {dist.get_backend(group)}, {self.size} ranks"
        self.handle = _native.created(
            _native.library().gg_comm_create_callbacks,
            self.rank,
            self.size,
            ctypes.byref(self._ops),
            None,
            name.encode(),
        )

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            _native.library().gg_comm_destroy(handle)
        self._ops = None

    def _guard(self, operation):
        def call(_, *arguments) -> int:
            try:
                operation(*arguments)
                return 0
            except BaseException as error:  # nothing may pass through the C frames below
                self.failure = error
                self._text.value = str(error).split("\n", 1)[0].encode(errors="replace")[:399]
                return status_of(error)

        return call

    def _all_reduce(self, send, recv, count, dtype, _timeout) -> None:
        result = view_memory(recv, count, dtype)
        if send != recv:
            result.copy_(view_memory(send, count, dtype))
        dist.all_reduce(result, group=self.group)

    def _all_gather(self, send, recv, count, dtype, _timeout) -> None:
        result = view_memory(recv, self.size * count, dtype)
        _all_gather(result, view_memory(send, count, dtype), group=self.group)

    def _all_to_all(self, send, recv, count, dtype, _timeout) -> None:
        result = view_memory(recv, self.size * count, dtype)
        dist.all_to_all_single(result, view_memory(send, self.size * count, dtype), group=self.group)

    def _reduce_scatter(self, send, recv, count, dtype, _timeout) -> None:
        result = view_memory(recv, count, dtype)
        _reduce_scatter(result, view_memory(send, self.size * count, dtype), group=self.group)

    def _broadcast(self, data, count, dtype, root, _timeout) -> None:
        source = dist.get_global_rank(self.group, root)
        dist.broadcast(view_memory(data, count, dtype), src=source, group=self.group)

    def _barrier(self, _timeout) -> None:
        dist.barrier(group=self.group)
