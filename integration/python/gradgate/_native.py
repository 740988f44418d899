"""The C interface (gradgate_c.h) through ctypes: loading, signatures, and errors as exceptions.

The shared library is found beside this file; ``GRADGATE_LIBRARY`` names another one (a build tree). It is loaded on
first use, and its version must be the package's.
"""

import ctypes
import os
import pathlib
import threading
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from ._version import __version__

STATUS_NAMES = (
    "ok",
    "invalid_argument",
    "unsupported",
    "workspace_too_small",
    "payload_too_small",
    "bad_payload",
    "peer_mismatch",
    "timeout",
    "peer_failed",
    "aborted",
    "bad_state",
    "out_of_memory",
    "io_error",
    "internal",
)
MODES = ("auto", "on", "off", "observe")


class Error(RuntimeError):
    """A failed gradgate call.

    ``code`` is the status of gradgate/status.h (int), ``name`` its name ("peer_mismatch", "timeout", …).
    """

    def __init__(self, code: int, text: str):
        self.code = int(code)
        self.name = STATUS_NAMES[self.code] if 0 <= self.code < len(STATUS_NAMES) else "unknown"
        super().__init__(f"{text} [{self.name}]")
        self._text = text

    def __reduce__(self):
        return (Error, (self.code, self._text))


COLLECTIVE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_double)
BROADCAST = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_double)
BARRIER = ctypes.CFUNCTYPE(c_int, c_void_p, c_double)
ABORT = ctypes.CFUNCTYPE(None, c_void_p)
LAST_ERROR = ctypes.CFUNCTYPE(c_void_p, c_void_p)
LOG = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)
EXPLAIN = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class CommunicatorOps(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("all_reduce_sum", COLLECTIVE),
        ("all_gather", COLLECTIVE),
        ("all_to_all", COLLECTIVE),
        ("reduce_scatter_sum", COLLECTIVE),
        ("broadcast", BROADCAST),
        ("barrier", BARRIER),
        ("abort", ABORT),
        ("last_error", LAST_ERROR),
        ("start_all_gather", COLLECTIVE),
        ("finish_all_gather", BARRIER),
    ]


class LinkProfile(ctypes.Structure):
    COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
    _fields_ = [("ranks", c_uint32)]
    _fields_ += [(f"{name}_{what}", c_double) for name in COLLECTIVES for what in ("alpha_s", "beta_bytes_per_s")]


class SessionOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("mode", c_int),
        ("codecs", c_char_p),
        ("seed", c_uint64),
        ("timeout_s", c_double),
        ("link_alpha_s", c_double),
        ("link_beta_bytes_per_s", c_double),
        ("log", LOG),
        ("log_context", c_void_p),
        ("explain", EXPLAIN),
        ("explain_context", c_void_p),
        ("error_budget", c_double),
        ("profile", LinkProfile),
        ("ranks_per_node", c_int),
        ("node_link_alpha_s", c_double),
        ("node_link_beta_bytes_per_s", c_double),
    ]


class ParamSlice(ctypes.Structure):
    _fields_ = [("param_id", c_uint64), ("offset", c_size_t), ("count", c_size_t)]


class Bucket(ctypes.Structure):
    _fields_ = [("dtype", c_int), ("slices", POINTER(ParamSlice)), ("slice_count", c_size_t)]


class SessionStats(ctypes.Structure):
    _fields_ = [
        (name, c_uint64)
        for name in (
            "steps",
            "dense_buckets",
            "compressed_buckets",
            "dense_bytes",
            "wire_bytes",
            "non_finite",
            "dropped_residuals",
        )
    ]
    _fields_ += [
        (name, c_double) for name in ("dropped_sum", "encode_s", "transfer_s", "decode_s", "gate_s", "saved_s")
    ]
    _fields_ += [(name, c_uint64) for name in ("skipped_steps", "failed_exchanges", "demotions")]
    _fields_ += [("compression_error", c_double), ("residual_ratio", c_double)]


class Call(ctypes.Structure):
    _fields_ = [("kind", c_int), ("send", c_void_p), ("recv", c_void_p), ("count", c_size_t), ("dtype", c_int)]


class HookGateOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("dense_bytes", c_double),
        ("timeout_s", c_double),
        ("log", LOG),
        ("log_context", c_void_p),
        ("explain", EXPLAIN),
        ("explain_context", c_void_p),
    ]


class HookGateStats(ctypes.Structure):
    _fields_ = [("steps", c_uint64), ("hook_steps", c_uint64)]
    _fields_ += [(name, c_double) for name in ("saved_s", "dense_step_s", "plan_step_s")]


_SIGNATURES = {
    "gg_version": (c_char_p, []),
    "gg_status_message": (c_char_p, [c_int]),
    "gg_now": (c_double, []),
    "gg_comm_create_callbacks": (
        c_int,
        [c_int, c_int, POINTER(CommunicatorOps), c_void_p, c_char_p, POINTER(c_void_p), c_char_p, c_size_t],
    ),
    "gg_comm_create_shaped": (c_int, [c_void_p, c_double, c_double, c_int, POINTER(c_void_p)]),
    "gg_comm_destroy": (None, [c_void_p]),
    "gg_session_options_init": (None, [POINTER(SessionOptions)]),
    "gg_session_create": (c_int, [c_void_p, POINTER(SessionOptions), POINTER(c_void_p), c_char_p, c_size_t]),
    "gg_session_destroy": (None, [c_void_p]),
    "gg_session_set_layout": (c_int, [c_void_p, POINTER(Bucket), c_size_t]),
    "gg_session_all_reduce": (c_int, [c_void_p, c_uint32, c_void_p, c_size_t, c_int]),
    "gg_session_all_reduce_overlapped": (c_int, [c_void_p, c_uint32, c_void_p, c_size_t, c_int]),
    "gg_session_finish": (c_int, [c_void_p]),
    "gg_session_unfinished": (c_int, [c_void_p]),
    "gg_session_bucket_ready": (None, [c_void_p, c_uint32, c_double]),
    "gg_session_all_reduce_dense": (c_int, [c_void_p, c_void_p, c_size_t, c_int]),
    "gg_session_set_gradient_scale": (c_int, [c_void_p, c_double]),
    "gg_session_skip_step": (c_int, [c_void_p]),
    "gg_session_set_dense_division": (None, [c_void_p, c_int]),
    "gg_session_residual": (c_void_p, [c_void_p, c_uint32]),
    "gg_nccl_make_id": (c_int, [c_void_p, c_char_p, c_size_t]),
    "gg_comm_create_nccl": (c_int, [c_char_p, c_int, c_int, c_double, POINTER(c_void_p), c_char_p, c_size_t]),
    "gg_session_all_reduce_on": (c_int, [c_void_p, c_uint32, c_void_p, c_size_t, c_int, c_void_p]),
    "gg_session_all_reduce_dense_on": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_void_p]),
    "gg_session_join": (c_int, [c_void_p, c_void_p]),
    "gg_session_synchronize": (c_int, [c_void_p]),
    "gg_session_read_residual": (c_int, [c_void_p, c_uint32, c_void_p]),
    "gg_session_flush": (c_int, [c_void_p]),
    "gg_session_get_stats": (None, [c_void_p, POINTER(SessionStats)]),
    "gg_session_explain": (c_char_p, [c_void_p, c_uint32]),
    "gg_session_phase": (c_char_p, [c_void_p]),
    "gg_session_state_bytes": (c_size_t, [c_void_p]),
    "gg_session_save_state": (c_int, [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)]),
    "gg_session_load_state": (c_int, [c_void_p, c_char_p, c_size_t]),
    "gg_session_last_error": (c_char_p, [c_void_p]),
    "gg_exchange_create": (
        c_int,
        [c_char_p, c_size_t, c_int, c_int, c_int, POINTER(c_void_p), c_char_p, c_size_t],
    ),
    "gg_exchange_destroy": (None, [c_void_p]),
    "gg_exchange_begin": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_uint64, c_uint32, c_uint32]),
    "gg_exchange_next": (c_int, [c_void_p, POINTER(Call)]),
    "gg_hook_gate_create": (c_int, [c_void_p, POINTER(HookGateOptions), POINTER(c_void_p), c_char_p, c_size_t]),
    "gg_hook_gate_destroy": (None, [c_void_p]),
    "gg_hook_gate_plan": (c_int, [c_void_p]),
    "gg_hook_gate_end_step": (c_int, [c_void_p, c_double]),
    "gg_hook_gate_explain": (c_char_p, [c_void_p]),
    "gg_hook_gate_phase": (c_char_p, [c_void_p]),
    "gg_hook_gate_get_stats": (None, [c_void_p, POINTER(HookGateStats)]),
    "gg_hook_gate_last_error": (c_char_p, [c_void_p]),
}

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def library_path() -> pathlib.Path:
    """The shared library that will be, or was, loaded."""
    named = os.environ.get("GRADGATE_LIBRARY")
    return pathlib.Path(named) if named else pathlib.Path(__file__).with_name("libgradgate.so")


def library() -> ctypes.CDLL:
    """Loads the native library once. Raises Error(unsupported) with one line when it is missing or another version."""
    global _loaded
    with _lock:
        if _loaded is None:
            path = library_path()
            try:
                loaded = ctypes.CDLL(str(path))
            except OSError as error:
                raise Error(2, f"gradgate: cannot load {path}: {error}") from None
            for name, (result, arguments) in _SIGNATURES.items():
                try:
                    function = getattr(loaded, name)
                except AttributeError:
                    raise Error(2, f"gradgate: {path} has no {name}; it is not gradgate {__version__}") from None
                function.restype, function.argtypes = result, arguments
            found = loaded.gg_version().decode()
            if found != __version__:
                raise Error(2, f"gradgate: package version {__version__}, but {path} is version {found}")
            _loaded = loaded
    return _loaded


def native_version() -> str:
    """Version of the loaded library."""
    return library().gg_version().decode()


def now() -> float:
    """Seconds on the library's steady clock."""
    return library().gg_now()


def created(function, *arguments) -> c_void_p:
    """Calls a gg_*_create function that ends in (out, why, why_bytes); the handle, or Error with its text."""
    handle = c_void_p()
    why = ctypes.create_string_buffer(512)
    code = function(*arguments, byref(handle), why, len(why))
    if code != 0:
        raise Error(code, why.value.decode(errors="replace"))
    return handle
