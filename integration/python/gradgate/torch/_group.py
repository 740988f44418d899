"""torch.distributed as a communicator of the native library: blocking collectives on the memory it names."""

import collections
import ctypes
import math
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import _native
from .._native import Error

# DType of gradgate/types.h.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_BYTES = (4, 2, 2, 8, 1)
# What choose_all_to_all() times: bytes to each rank, calls after one to warm up; and what rounds must gain.
TRIAL_BYTES, TRIALS, TRIAL_GAIN = (16 << 10, 64 << 10, 256 << 10), 3, 0.05
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


def over_mpi(group: dist.ProcessGroup) -> bool:
    """Whether torch's MPI backend carries this group. No torch with it was at hand: see docs/pytorch.md."""
    return "mpi" in str(dist.get_backend(group))


def sibling_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """A new group of the ranks of ``group``: over gloo collective among those only. MPI makes groups with all ranks of
    the program and knows no timeout, so a module must hold them all."""
    ranks = dist.get_process_group_ranks(group)
    if over_mpi(group):
        if len(ranks) != dist.get_world_size():
            text = f"the module's process group has {len(ranks)} of {dist.get_world_size()} ranks, accepted: all of them"
            raise Error(2, f"gradgate: over MPI {text}")
        return dist.new_group(ranks=ranks, backend=dist.get_backend(group))
    try:
        return dist.new_group(
            ranks=ranks,
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
        self._mpi = over_mpi(group)
        self._started: collections.deque[tuple[dist.Work, dist.Work]] = collections.deque()
        self.rounds_from = math.inf  # bytes to each rank from which all_to_all goes in rounds; the same on every rank
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
            *self._overlap(),
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

    def _overlap(self) -> tuple:
        """All_gathers that are started and waited for later: between two ranks, where one message each way is all."""
        if self.size != 2:
            return _native.COLLECTIVE(), _native.BARRIER()
        return _native.COLLECTIVE(self._guard(self._start_all_gather)), _native.BARRIER(self._guard(self._finish))

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
        result, own = view_memory(recv, self.size * count, dtype), view_memory(send, count, dtype)
        if self.size == 2 and count > 0:
            # gloo's all_gather goes in segments, through buffers of its own and another thread.
            for work in self._swap(result, own):
                work.wait()
        elif self._mpi:  # which gathers into tensors of their own only
            dist.all_gather(list(result.chunk(self.size)), own, group=self.group)
        else:
            _all_gather(result, own, group=self.group)

    def _start_all_gather(self, send, recv, count, dtype, _timeout) -> None:
        self._started.append(self._swap(view_memory(recv, 2 * count, dtype), view_memory(send, count, dtype)))

    def _finish(self, _timeout) -> None:
        for work in self._started.popleft():
            work.wait()

    def drop_started(self) -> None:
        """Nothing that arrives from now on is written to memory: after a failure, before that memory goes."""
        self._started.clear()

    def _swap(self, result: torch.Tensor, own: torch.Tensor) -> tuple[dist.Work, dist.Work]:
        """Starts an all_gather between two ranks: one message each way."""
        blocks, peer = result.chunk(2), 1 - self.rank
        if blocks[self.rank].data_ptr() != own.data_ptr():
            blocks[self.rank].copy_(own)
        return self.group.recv([blocks[peer]], peer, 0), self.group.send([own], peer, 0)

    def _all_to_all(self, send, recv, count, dtype, _timeout) -> None:
        result, given = view_memory(recv, self.size * count, dtype), view_memory(send, self.size * count, dtype)
        (self._in_rounds if count * _BYTES[dtype] >= self.rounds_from else self._at_once)(result, given)

    def _at_once(self, result: torch.Tensor, given: torch.Tensor) -> None:
        dist.all_to_all_single(result, given, group=self.group)

    def _in_rounds(self, result: torch.Tensor, given: torch.Tensor) -> None:
        """In round i to the i-th rank after this one, and from the i-th before it: no link carries two messages."""
        if given.numel() == 0:
            return
        to, into = given.view(torch.uint8).chunk(self.size), result.view(torch.uint8).chunk(self.size)
        into[self.rank].copy_(to[self.rank])
        for distance in range(1, self.size):
            after, before = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            received = self.group.recv([into[before]], before, 0)
            sent = self.group.send([to[after]], after, 0)
            received.wait()
            sent.wait()

    def choose_all_to_all(self) -> None:
        """Collective. gloo sends to all ranks at once. Where the link is the bottleneck large messages then get in each
        other's way, and rounds of one message a link are faster; small ones, or ranks that are slow to wake up, would
        only wait for more rounds. Both are timed.
        """
        if self.size <= 2:
            return
        seconds = torch.zeros(len(TRIAL_BYTES), 2, 1 + TRIALS, dtype=torch.float64)
        for size, row in zip(TRIAL_BYTES, seconds):
            given = torch.zeros(self.size * size, dtype=torch.uint8)
            result = torch.empty_like(given)
            for trial in range(1 + TRIALS):
                for operation, times in zip((self._at_once, self._in_rounds), row):
                    dist.barrier(group=self.group)
                    begin = time.perf_counter()
                    operation(result, given)
                    times[trial] = time.perf_counter() - begin
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.group)
        for size, row in reversed(list(zip(TRIAL_BYTES, seconds.tolist()))):
            at_once, in_rounds = (statistics.median(times[1:]) for times in row)
            if in_rounds >= (1 - TRIAL_GAIN) * at_once:
                break
            self.rounds_from = size

    def _reduce_scatter(self, send, recv, count, dtype, _timeout) -> None:
        result = view_memory(recv, count, dtype)
        _reduce_scatter(result, view_memory(send, self.size * count, dtype), group=self.group)

    def _broadcast(self, data, count, dtype, root, _timeout) -> None:
        source = dist.get_global_rank(self.group, root)
        dist.broadcast(view_memory(data, count, dtype), src=source, group=self.group)

    def _barrier(self, _timeout) -> None:
        dist.barrier(group=self.group)
