"""A session of the C interface as an object. One thread at a time; every call is one C call."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_uint64, c_void_p

from . import _native
from ._native import Error


def param_id(name: str) -> int:
    """The id by which a parameter's residual is kept: FNV-1a of its name, 64 bits, the same in every process."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def _first_collective(candidate: str) -> int | None:
    """Kind of the collective (GG_ALL_TO_ALL, …) with which a candidate's exchange between two ranks begins; None where
    there is no such candidate."""
    native = _native.library()
    try:
        exchange = _native.created(native.gg_exchange_create, candidate.encode(), 1, 0, 0, 2)
    except Error:
        return None
    try:
        gradient, call = ctypes.c_float(0), _native.Call()
        begun = native.gg_exchange_begin(exchange, byref(gradient), None, 0, 0, 0, 0) == 0
        return call.kind if begun and native.gg_exchange_next(exchange, byref(call)) == 0 else None
    finally:
        native.gg_exchange_destroy(exchange)


def between(ranks: int, mode: str, codecs: Sequence[str]) -> list[str]:
    """The candidates for a link between ``ranks`` ranks. Between two an all_gather carries the bytes of a two_shot in
    one collective in the place of two and rounds once, so codecs that name no exchange travel by it."""
    candidates = list(codecs)
    if ranks != 2:
        return candidates
    if mode in ("auto", "observe") and not any(codec.startswith("bf16") for codec in candidates):
        candidates.append("bf16")  # which takes part in any case
    all_to_all, all_gather = 3, 2
    for index, codec in enumerate(candidates):
        gathered = f"{codec}@all_gather"
        if _first_collective(codec) == all_to_all and "@" not in codec and _first_collective(gathered) == all_gather:
            candidates[index] = gathered
    return candidates


def _attach(options, log: Callable[[str], None] | None, say: Callable[[str], None] | None) -> list:
    """Sets the callbacks for log and explaining lines; what it returns must live as long as the library calls them."""
    callbacks = []
    if log is not None:
        options.log = _native.LOG(lambda _, line, size: log(ctypes.string_at(line, size).decode()))
        callbacks.append(options.log)
    if say is not None:
        options.explain = _native.EXPLAIN(lambda _, line: say(line.decode()))
        callbacks.append(options.explain)
    return callbacks


class Session:
    """``communicator`` is a gg_comm handle that must outlive the session (collective: every rank creates one)."""

    def __init__(
        self,
        communicator: c_void_p,
        mode: str,
        codecs: str,
        seed: int,
        timeout_s: float,
        link: tuple[float, float] | None = None,
        error_budget: float = 0.1,
        log: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
        profile: dict[str, float] | None = None,
    ):
        self._native = _native.library()
        options = _native.SessionOptions()
        self._native.gg_session_options_init(byref(options))
        options.mode = _native.MODES.index(mode)
        options.codecs = codecs.encode()
        options.seed = c_uint64(seed)
        options.timeout_s = timeout_s
        options.error_budget = error_budget
        if link is not None:
            options.link_alpha_s, options.link_beta_bytes_per_s = link
        if profile is not None:
            options.profile = _native.LinkProfile(**profile)
        self._callbacks = _attach(options, log, say)
        self._handle = _native.created(self._native.gg_session_create, communicator, byref(options))

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.gg_session_destroy(handle)
        self._callbacks = []

    def _check(self, code: int) -> None:
        if code != 0:
            raise Error(code, self._native.gg_session_last_error(self._handle).decode(errors="replace"))

    def set_layout(self, buckets: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> None:
        """``buckets``: per bucket its dtype code and (param id, elements) in the order in which they lie in it."""
        described = (_native.Bucket * max(len(buckets), 1))()
        kept = []
        for bucket, (dtype, params) in zip(described, buckets):
            slices = (_native.ParamSlice * max(len(params), 1))()
            offset = 0
            for piece, (identity, count) in zip(slices, params):
                piece.param_id, piece.offset, piece.count = identity, offset, count
                offset += count
            kept.append(slices)
            bucket.dtype, bucket.slices, bucket.slice_count = dtype, slices, len(params)
        self._check(self._native.gg_session_set_layout(self._handle, described, len(buckets)))

    def all_reduce(self, bucket: int, pointer: int, count: int, dtype: int, ready_s: float) -> None:
        """Averages ``count`` elements at ``pointer`` over the ranks, in place."""
        self._native.gg_session_bucket_ready(self._handle, bucket, ready_s)
        self._check(self._native.gg_session_all_reduce(self._handle, bucket, pointer, count, dtype))

    def all_reduce_overlapped(self, bucket: int, pointer: int, count: int, dtype: int, ready_s: float) -> bool:
        """The same; True where the bucket is still on the wire: its average is there after finish() or the next bucket's
        call, which also raises what went wrong with it."""
        self._native.gg_session_bucket_ready(self._handle, bucket, ready_s)
        self._check(self._native.gg_session_all_reduce_overlapped(self._handle, bucket, pointer, count, dtype))
        return self._native.gg_session_unfinished(self._handle) != 0

    def finish(self) -> None:
        """Waits for the bucket that is still on the wire, if one is."""
        self._check(self._native.gg_session_finish(self._handle))

    def all_reduce_dense(self, pointer: int, count: int, dtype: int) -> None:
        self._check(self._native.gg_session_all_reduce_dense(self._handle, pointer, count, dtype))

    def all_reduce_on(self, bucket: int, pointer: int, count: int, dtype: int, stream: int) -> None:
        """The same in device memory: enqueued behind ``stream`` (a cudaStream_t), and returns."""
        self._check(self._native.gg_session_all_reduce_on(self._handle, bucket, pointer, count, dtype, stream))

    def all_reduce_dense_on(self, pointer: int, count: int, dtype: int, stream: int) -> None:
        self._check(self._native.gg_session_all_reduce_dense_on(self._handle, pointer, count, dtype, stream))

    def join(self, stream: int) -> None:
        """What is enqueued on ``stream`` from now on comes after all reductions so far."""
        self._check(self._native.gg_session_join(self._handle, stream))

    def synchronize(self) -> None:
        """Waits for what was enqueued, and raises what went wrong with it. Host memory: nothing to do."""
        self._check(self._native.gg_session_synchronize(self._handle))

    def set_gradient_scale(self, scale: float) -> None:
        self._check(self._native.gg_session_set_gradient_scale(self._handle, scale))

    def skip_step(self) -> None:
        self._check(self._native.gg_session_skip_step(self._handle))

    def set_dense_division(self, divide: bool) -> None:
        self._native.gg_session_set_dense_division(self._handle, int(divide))

    def residual(self, bucket: int, count: int) -> list[float] | None:
        """A copy of this rank's residual of a bucket, sum units; None where there is none."""
        if not self._native.gg_session_residual(self._handle, bucket):
            return None
        self.synchronize()
        values = (ctypes.c_float * count)()
        self._check(self._native.gg_session_read_residual(self._handle, bucket, values))
        return list(values)

    def flush(self) -> None:
        self._check(self._native.gg_session_flush(self._handle))

    def stats(self) -> dict[str, int | float]:
        stats = _native.SessionStats()
        self._native.gg_session_get_stats(self._handle, byref(stats))
        return {name: getattr(stats, name) for name, _ in stats._fields_}

    def explain(self, bucket: int) -> str:
        return self._native.gg_session_explain(self._handle, bucket).decode()

    def phase(self) -> str:
        return self._native.gg_session_phase(self._handle).decode()

    def save_state(self) -> bytearray:
        self.synchronize()
        state = bytearray(self._native.gg_session_state_bytes(self._handle))
        written = c_size_t()
        view = (ctypes.c_char * len(state)).from_buffer(state)
        self._check(self._native.gg_session_save_state(self._handle, view, len(state), byref(written)))
        del view
        return state[: written.value]

    def load_state(self, state: bytes) -> None:
        self._check(self._native.gg_session_load_state(self._handle, bytes(state), len(state)))


class HookGate:
    """The gate around a reduction that is not gradgate's (gg_hook_gate). One thread at a time."""

    DENSE, PROBE, FLUSH, HOOK = range(4)

    def __init__(
        self,
        communicator: c_void_p,
        name: str,
        dense_bytes: int,
        timeout_s: float,
        log: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self._native = _native.library()
        options = _native.HookGateOptions(ctypes.sizeof(_native.HookGateOptions), name.encode(), dense_bytes, timeout_s)
        self._callbacks = _attach(options, log, say)
        self._handle = _native.created(self._native.gg_hook_gate_create, communicator, byref(options))

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.gg_hook_gate_destroy(handle)
        self._callbacks = []

    def plan(self) -> int:
        return self._native.gg_hook_gate_plan(self._handle)

    def end_step(self, now_s: float) -> None:
        code = self._native.gg_hook_gate_end_step(self._handle, now_s)
        if code != 0:
            raise Error(code, self._native.gg_hook_gate_last_error(self._handle).decode(errors="replace"))

    def explain(self) -> str:
        return self._native.gg_hook_gate_explain(self._handle).decode()

    def phase(self) -> str:
        return self._native.gg_hook_gate_phase(self._handle).decode()

    def stats(self) -> dict[str, int | float]:
        stats = _native.HookGateStats()
        self._native.gg_hook_gate_get_stats(self._handle, byref(stats))
        return {name: getattr(stats, name) for name, _ in stats._fields_}
