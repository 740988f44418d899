"""GateState: what ``register_comm_hook`` keeps for a DDP module."""

import pathlib
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .. import _native
from .._native import Error
from .._session import between, param_id
from ._core import Arrival, BucketKey, Core
from ._device import DeviceCore
from ._group import DTYPE_CODES, over_mpi, sibling_group
from ._issuer import Issuer
from ._profile import read as read_profile
from ._support import LogTarget, Scaler, agree, check_module, close_issuer, log_function, print_line, result_of, timeout_of
from ._words import LastWords


def canonical_name(name: str) -> str:
    """A parameter's name without the wrappers that come and go: DDP's ``module.``, torch.compile's ``_orig_mod.``."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[:1] == ["module"] and len(parts) > 1 else parts)


class GateState:
    """The gate of one DDP module: a thread, a process group and a session of its own.

    Collective: every rank of the module's process group constructs it, with equal arguments.

    ddp: the DistributedDataParallel module (names, devices, process group). It is not kept alive by the state.
    codecs: candidates, e.g. ``["bf16", "int8"]``; anything lossier than int8 takes part only when listed. In mode
        ``on`` the first is used, and the others are what the guard falls back to.
    mode: ``auto``, ``on``, ``off`` or ``observe`` (docs/gate.md).
    scaler: the ``GradScaler`` of the training, if any; its scale is read at every step.
    start_step: synchronised steps at the beginning that are dense and not looked at.
    log: a path (rank 0 writes JSON lines to it; ``{rank}`` in the name: every rank) or a function of one line.
    say: a function of one explaining line, called on rank 0; by default it prints to stderr. None: silent.
    seed: of stochastic codecs, 64 bits.
    timeout_s: of every wait for another rank, seconds; by default the timeout of the module's process group.
    link: (start-up seconds, bytes per second) of a known link; by default the link is probed.
    profile: a file that ``torchrun -m gradgate calibrate`` wrote on this group: its link in the place of a probe. One
        for another place, or a damaged one, is ignored, which ``say`` tells; so it is where ``link`` is given.
    error_budget: relative L2 error at which the guard demotes a codec without feedback (docs/gate.md).
    """

    def __init__(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        codecs: Sequence[str] = ("bf16", "int8"),
        mode: str = "auto",
        scaler: Scaler | None = None,
        start_step: int = 0,
        log: LogTarget = None,
        say: Callable[[str], None] | None = print_line,
        seed: int = 0,
        timeout_s: float | None = None,
        link: tuple[float, float] | None = None,
        error_budget: float = 0.1,
        profile: str | pathlib.Path | None = None,
    ):
        if mode not in _native.MODES:
            raise Error(1, f"gradgate: mode is {mode!r}, accepted: {', '.join(_native.MODES)}")
        if isinstance(codecs, str):
            codecs = [codecs]
        if int(start_step) < 0:
            raise Error(1, f"gradgate: start_step is {start_step}, accepted: 0 or more")
        self.options = {
            "codecs": list(codecs),
            "mode": mode,
            "start_step": int(start_step),
            "seed": int(seed),
            "timeout_s": timeout_s,
            "link": link,
            "error_budget": float(error_budget),
            "profile": None if profile is None else str(profile),
        }
        self._waiting_state: dict | None = None
        self.attach(ddp, scaler, log, say)

    # --- life

    def attach(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        scaler: Scaler | None = None,
        log: LogTarget = None,
        say: Callable[[str], None] | None = print_line,
    ) -> None:
        """Collective. Connects a state that was unpickled to a module; the constructor does it for a new one. What is
        of a process and not of a state, scaler, log and say, is given anew."""
        if getattr(self, "_core", None) is not None or getattr(self, "_plain", False):
            raise Error(10, "gradgate: this GateState is attached already")
        check_module(ddp)
        self._scaler, self._log, self._say = scaler, None, say
        self._group = ddp.process_group
        self._size = dist.get_world_size(self._group)
        self._compare(log)
        self._names = {
            id(parameter): canonical_name(name)
            for name, parameter in ddp.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        ids = {param_id(name) for name in set(self._names.values())}
        if len(ids) != len(set(self._names.values())):
            raise Error(1, "gradgate: two parameter names have the same 64-bit hash; rename one of them")
        self._ids = {identity: param_id(name) for identity, name in self._names.items()}
        self._failure: Error | None = None
        self._core: Core | None = None
        self._steps_plain = 0
        self._warned: set[str] = set()
        self._ranges: list[tuple[int, int]] = []
        self._divide = False
        if ddp.gradient_as_bucket_view and self._size & (self._size - 1) != 0:
            self._watch_views(ddp)
        device = next((p.device.type for p in ddp.parameters() if p.requires_grad), "cpu")
        backend = dist.get_backend(self._group)
        self._on_device = device == "cuda" and "nccl" in str(backend)
        on_host = device == "cpu" and ("gloo" in str(backend) or over_mpi(self._group))
        self._plain = self.options["mode"] == "off" or not (on_host or self._on_device)
        if self._plain:
            if self.options["mode"] != "off":
                self._warn_once(
                    "device",
                    f"gradgate: gradients on {device} over {backend} are reduced dense: accepted are gradients in "
                    "host memory over gloo or mpi, and on cuda over nccl",
                )
        else:
            self._start()
        waiting, self._waiting_state = self._waiting_state, None
        if waiting is not None:
            self.load_state_dict(waiting)

    def _compare(self, log: LogTarget) -> None:
        """Collective. Opens the log, and raises on every rank where one cannot or has other arguments. Only what may
        differ is left out: log, say, and the profile, which the session compares by its numbers."""
        refusal = None
        try:
            self._log = log_function(log, dist.get_rank(self._group)) if self.options["mode"] != "off" else None
        except Error as error:
            refusal = error
        arguments = {name: value for name, value in self.options.items() if name != "profile"}
        arguments["codecs"] = ",".join(self.options["codecs"])
        agree(self._group, {**arguments, "scaler": "none" if self._scaler is None else "given"}, refusal)

    def _start(self) -> None:
        timeout_s = self.options["timeout_s"] or timeout_of(self._group)
        group = self._group if self._on_device else sibling_group(self._group, timeout_s)
        rank = dist.get_rank(group)
        profile = self._read_profile()
        options = {
            "mode": self.options["mode"],
            "codecs": ",".join(between(self._size, self.options["mode"], self.options["codecs"])),
            "seed": self.options["seed"],
            "timeout_s": timeout_s,
            "link": self.options["link"],
            "error_budget": self.options["error_budget"],
            "profile": profile,
        }
        if self._on_device:
            return self._start_on_device(options)
        self._issuer = Issuer(f"gradgate-{rank}")
        words = LastWords(getattr(group, "group_name", "group"))
        try:
            arguments = (group, options, self.options["start_step"], self._log, self._say, words, self._issuer.submit)
            self._core = self._issuer.call(Core, *arguments)
        except BaseException:
            self._issuer.close()
            raise
        self._finalizer = weakref.finalize(self, close_issuer, self._issuer, self._core)

    def _start_on_device(self, options: dict) -> None:
        """No thread: the hook enqueues, and results are handed over on a stream that follows the session's."""
        self._issuer = None
        self._core = DeviceCore(self._group, options, self.options["start_step"], self._log, self._say, None)
        self._results = torch.cuda.Stream()
        self._finalizer = weakref.finalize(self, self._core.close)

    def _read_profile(self) -> dict | None:
        """The numbers of the profile; None where there is none to use. A rank that has none lets all of them probe."""
        path = self.options["profile"]
        if path is None or self.options["mode"] == "on":
            return None
        numbers, ignored = read_profile(path, self._group)
        if ignored and self._say is not None and dist.get_rank(self._group) == 0:
            self._say(ignored)
        return numbers

    def close(self) -> None:
        """Ends the thread and frees the session. Later buckets raise."""
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is not None:
            finalizer()

    def __getstate__(self) -> dict:
        return {"options": self.options, "state": self.state_dict()}

    def __setstate__(self, pickled: dict) -> None:
        self.options = pickled["options"]
        self._waiting_state = pickled["state"]
        self._core, self._plain = None, False

    # --- the hook

    def _watch_views(self, ddp) -> None:
        """DDP divides a gradient that already lives in its bucket and multiplies one that is copied in. They round
        apart unless N is a power of two, and a hook cannot see which it was: look before the backward pass."""
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        reference = weakref.ref(self)

        def before_forward(*_):
            state = reference()
            if state is not None:
                first = next((p.grad for p in parameters if p.grad is not None), None)
                address = first.data_ptr() if first is not None else 0
                state._divide = any(begin <= address < end for begin, end in state._ranges)

        ddp.register_forward_pre_hook(before_forward)

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=3)

    def _describe(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> BucketKey:
        dtype = None if buffer.is_sparse else DTYPE_CODES.get(buffer.dtype)
        if dtype is None or buffer.dtype == torch.float64:
            kind = "sparse" if buffer.is_sparse else str(buffer.dtype).removeprefix("torch.")
            self._warn_once(kind, f"gradgate: no codec takes {kind} gradients; their buckets are reduced dense")
        parameters = bucket.parameters()
        try:
            # DDP reduces a complex gradient as pairs of reals.
            params = tuple((self._ids[id(p)], p.numel() * (2 if p.is_complex() else 1)) for p in parameters)
        except KeyError:
            raise Error(1, "gradgate: the bucket has a parameter that is not of this state's module") from None
        total = sum(count for _, count in params)
        if dtype is not None and total != buffer.numel():
            raise Error(13, f"gradgate: bucket {bucket.index()} has {buffer.numel()} elements, its parameters {total}")
        return BucketKey(dtype, params, bucket.is_last())

    def _reduce_plainly(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if bucket.is_last():
            self._steps_plain += 1
        if self._divide or buffer.is_sparse:
            buffer.div_(self._size)
        else:
            buffer.mul_(1.0 / self._size)
        work = self._group.allreduce([buffer])  # dist.all_reduce checks and logs for as long again
        return work.get_future().then(lambda future: future.value()[0])

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._core is None and not self._plain:
            raise Error(10, "gradgate: this GateState was unpickled; attach() it to its DDP module first")
        if bucket.index() == 0:
            self._ranges, self._step_divides = [], self._divide
        buffer = bucket.buffer()
        self._ranges.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) if not buffer.is_sparse else (0, 0))
        if self._plain:
            return self._reduce_plainly(bucket)
        core = self._core
        if core.failure is not None:
            raise core.failure
        if self._on_device:
            return self._reduce_on_device(bucket, buffer)
        outcome: torch.futures.Future = torch.futures.Future()
        result = outcome.then(result_of)  # before the issuer wakes up and wants the interpreter too
        arrival = Arrival(
            key=self._describe(bucket, buffer),
            buffer=buffer,
            index=bucket.index(),
            ready_s=_native.now(),
            scale=float(self._scaler.get_scale()) if self._scaler is not None else None,
            divide=self._step_divides,
            finish=outcome.set_result,
        )
        self._issuer.submit(lambda: core.arrive(arrival))
        return result

    def _reduce_on_device(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Enqueues, and returns a future whose event lies behind the reduction. Not yet run on a GPU (docs/pytorch.md)."""
        outcome: torch.futures.Future = torch.futures.Future(devices=[buffer.device])

        def finish(result) -> None:
            if isinstance(result, BaseException):
                return outcome.set_exception(result)
            self._core.join(self._results.cuda_stream)
            with torch.cuda.stream(self._results):  # the future's event is recorded on it
                outcome.set_result(result)

        self._core.arrive(
            Arrival(
                key=self._describe(bucket, buffer),
                buffer=buffer,
                index=bucket.index(),
                ready_s=0.0,  # taken from events
                scale=float(self._scaler.get_scale()) if self._scaler is not None else None,
                divide=self._step_divides,
                finish=finish,
                stream=torch.cuda.current_stream(buffer.device).cuda_stream,
            )
        )
        return outcome

    # --- between steps

    def _call(self, function, *arguments):
        if self._core is None:
            raise Error(10, "gradgate: this GateState is not attached, or its mode is off")
        return function(*arguments) if self._issuer is None else self._issuer.call(function, *arguments)

    @property
    def steps(self) -> int:
        """Synchronised backward passes so far."""
        return self._steps_plain if self._plain else self._call(lambda: self._core.steps)

    def flush(self) -> None:
        """Every rank, between steps: the next step sends all residuals, dense. Before an evaluation, a change of the
        number of ranks, or the end of the training."""
        if not self._plain:
            self._call(self._core.flush)

    def stats(self) -> dict[str, int | float]:
        """Totals of this rank since the state was made, under slash names, for any experiment tracker.

        gradgate/steps, skipped_steps: synchronised backward passes; those that the scaler skipped.
        gradgate/dense/buckets, compressed/buckets, failed_exchanges, demotions: reductions by kind; compressed ones
            that were repeated dense; buckets in which the guard closed a codec.
        gradgate/dense/bytes, wire/bytes, ratio: bytes of all gradients; bytes that were sent for them, both without
            the backend's own copies; the first divided by the second.
        gradgate/encode_s, transfer_s, decode_s, gate_s: seconds spent; gate_s is probing, measuring and agreeing.
        gradgate/saved_s: seconds saved against dense, verified; negative where the gate lost time.
        gradgate/compression_error, residual_ratio: the largest relative L2 error, and norm of residual ÷ norm of
            gradient, of a bucket when the guard last looked.
        gradgate/non_finite: elements that were Inf or NaN when they were encoded.
        gradgate/dropped_residuals, dropped_sum: residual elements whose parameter vanished or changed size; their sum.

        In mode off, and where everything is dense because of the device, only gradgate/steps.
        """
        if self._plain:
            return {"gradgate/steps": self._steps_plain}
        found = self._call(self._core.stats)
        stats = {}
        for name, value in found.items():
            stats["gradgate/" + name.replace("_bytes", "/bytes").replace("_buckets", "/buckets")] = value
        stats["gradgate/ratio"] = found["dense_bytes"] / found["wire_bytes"] if found["wire_bytes"] else 1.0
        return stats

    def explain(self) -> list[str]:
        """One line per bucket: the inequality with its numbers (milliseconds), and what is sent. Empty in mode off."""
        return [] if self._plain else self._call(self._core.explain)

    def phase(self) -> str:
        """Phase of the gate: startup, verify, hold, … (docs/gate.md); "fixed" in off."""
        return "fixed" if self._plain else self._call(self._core.session.phase)

    def residuals(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's residuals by parameter name: flat, f32, sum units (before the average)."""
        if self._plain:
            return {}
        names = {param_id(name): name for name in self._names.values()}
        return {names[identity]: value for identity, value in self._call(self._core.residuals).items()}

    def state_dict(self) -> dict:
        """This rank's state: residuals by parameter, step, seed, decisions. Plain values and tensors; save one per
        rank."""
        if self._waiting_state is not None:
            return self._waiting_state
        state = {"version": 1, "mode": self.options["mode"], "names": sorted(set(self._names.values()))}
        if self._plain:
            rank = dist.get_rank(self._group)
            plain = {"steps": self._steps_plain, "layout": None, "session": None}
            return {**state, **plain, "rank": rank, "world_size": self._size}
        return {**state, **self._call(self._core.save)}

    def load_state_dict(self, state: dict) -> None:
        """Collective. Goes on where state_dict() was called, on the same rank of the same number of ranks and with the
        same parameters; anything else raises Error and changes nothing."""
        refusal = self._refusal(state)
        if not self._plain:
            return self._call(self._core.load, state, refusal)
        if refusal:
            raise Error(6, refusal)
        self._steps_plain = state["steps"]

    def _refusal(self, state: dict) -> str:
        """Why this rank cannot take the state; empty: it can."""
        if state.get("version") != 1:
            return f"gradgate: state version {state.get('version')!r}, accepted: 1"
        here = set(self._names.values())
        differ = sorted(here ^ set(state["names"]))
        if differ:
            return f"gradgate: parameter {differ[0]!r} is in {'the module' if differ[0] in here else 'the state'} only"
        for field, mine in (("world_size", self._size), ("rank", dist.get_rank(self._group))):
            if state[field] != mine:
                text = f"gradgate: the state is of {field} {state[field]}, this process has {mine}"
                return f"{text}; flush() before saving, or start without a state"
        if self._plain and state["session"] is not None:
            return f"gradgate: the state is of a session, which mode {self.options['mode']} has not here; flush() first"
        return ""

