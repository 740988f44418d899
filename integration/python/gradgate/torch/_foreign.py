"""gated(): a gate around any other communication hook. No postponed annotations in this file: DDP compares them with
the classes themselves."""

import pickle
import time
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from .. import _native
from .._native import Error
from .._session import HookGate
from ._group import Communicator, sibling_group, status_of
from ._issuer import Issuer
from ._state import canonical_name
from ._support import LogTarget, agree, check_module, close_issuer, log_function, print_line, result_of, timeout_of
from ._words import LastWords

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]
Flush = Callable[[object, dist.GradBucket], None]

# Steps that a hook runs ungated before its first window: DDP rebuilds its buckets in them.
WARM_UP_STEPS = 2


def flush_power_sgd(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> None:
    """Adds the error that PowerSGD keeps for this bucket to its gradient, and forgets it."""
    error = state.error_dict.pop(bucket.index(), None)
    if error is not None and error.numel() == bucket.buffer().numel():
        bucket.buffer().add_(error)


def _known(state, hook) -> tuple[Callable | None, int]:
    """Flush function and first step of hooks that torch ships."""
    if hook in (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook):
        return flush_power_sgd, max(WARM_UP_STEPS, int(state.start_powerSGD_iter))
    return None, WARM_UP_STEPS


def _settings(inner: object) -> dict[str, object]:
    """What must be the same on every rank in the state of a hook that torch ships: the sizes of its messages follow
    from it."""
    if not isinstance(inner, powerSGD_hook.PowerSGDState):
        return {}
    return {name: value for name, value in _attributes(inner).items() if isinstance(value, (bool, int, float))}


def _pickled(inner, name: str) -> torch.Tensor | None:
    """A hook's own state as bytes; None for the hooks whose state is none, or a process group."""
    if inner is None or isinstance(inner, dist.ProcessGroup):
        return None
    try:
        return torch.frombuffer(bytearray(pickle.dumps(inner)), dtype=torch.uint8)
    except Exception as error:
        text = f"gradgate: the state of hook {name!r}, a {type(inner).__name__}, cannot be pickled: {error}"
        raise Error(2, f"{text}; save it on your own, or give its class __getstate__") from error


def _attributes(inner) -> dict:
    names = [name for kind in type(inner).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(inner, name) for name in names if hasattr(inner, name)}
    return {**found, **getattr(inner, "__dict__", {})}


def _take_over(inner, saved):
    """A hook's state with the values of a saved one: the same object where it has attributes; its process groups stay
    those of this process."""
    if type(inner) is not type(saved) or not _attributes(inner):
        return saved
    for name, value in _attributes(saved).items():
        if not isinstance(getattr(inner, name, None), dist.ProcessGroup):
            setattr(inner, name, value)
    return inner


class _Core:
    """What runs on the issuer's thread."""

    def __init__(self, group, name, dense_bytes, timeout_s, log, say):
        self.communicator = Communicator(group)
        try:
            self.gate = HookGate(self.communicator.handle, name, dense_bytes, timeout_s, log, say)
        except Error:
            self.communicator.close()
            raise
        self.failure: Error | None = None
        self.group = group
        self._words = LastWords(getattr(group, "group_name", "group"))

    def fail(self, error: BaseException, where: str, what: str) -> Error:
        """What every later bucket gets too: who, where, what, and where the other ranks were last."""
        rank, size = self.communicator.rank, self.communicator.size
        text = f"gradgate: rank {rank}, {where}: {what}: {type(error).__name__}: {error}"
        self.failure = Error(status_of(error), text + self._words.last_words(rank, size, where))
        self.failure.__cause__ = error
        return self.failure

    def refuse(self, refusal: str) -> None:
        """Collective. Raises on every rank when one has a reason to."""
        refusals = [""] * self.communicator.size
        dist.all_gather_object(refusals, refusal, group=self.group)
        for rank, text in enumerate(refusals):
            if text:
                raise Error(6, refusal or f"gradgate: rank {rank} cannot load its state: {text}")

    def close(self) -> None:
        self.gate.close()
        self.communicator.close()

    def end_step(self, now_s: float) -> None:
        try:
            if self.failure is None:
                self.gate.end_step(now_s)
        except Error as error:
            self.failure = error


class HookGateState:
    """State of a gated hook; made by gated(). ``inner`` is the wrapped hook's own state."""

    def __init__(
        self,
        ddp: torch.nn.parallel.DistributedDataParallel,
        inner: object,
        hook: Hook,
        flush: Flush | None,
        name: str,
        start_step: int | None,
        log: LogTarget,
        say: Callable[[str], None] | None,
        timeout_s: float | None,
    ):
        check_module(ddp)
        known_flush, first = _known(inner, hook)
        self.inner, self._hook, self._name = inner, hook, name
        self._names = {
            id(parameter): canonical_name(text) for text, parameter in ddp.named_parameters(remove_duplicate=False)
        }
        self._layout: list[tuple[str, ...]] = []  # of the last whole step: names by bucket
        self._arriving: list[tuple[str, ...]] = []
        self._unsettled = 0  # steps of a loaded state until DDP shows its final buckets
        self._waiting = None  # the hook's own state until then
        self._flush = flush if flush is not None else known_flush
        self._warm_up = first if start_step is None else int(start_step)
        self._group = ddp.process_group
        self._size = dist.get_world_size(self._group)
        self._steps = 0
        self._action = HookGate.DENSE
        bytes_of = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
        backend = str(dist.get_backend(self._group))
        if "gloo" not in backend:
            raise Error(2, f"gradgate: gated() times host futures: gloo groups only, found {backend}")
        rank, lines, refusal = dist.get_rank(self._group), None, None
        try:
            lines = log_function(log, rank)
        except Error as error:
            refusal = error
        flushed = "none" if self._flush is None else "given"
        arguments = {"hook": name, "start_step": self._warm_up, "flush": flushed, "timeout_s": timeout_s}
        arguments.update(_settings(inner))
        agree(self._group, arguments, refusal)
        timeout_s = timeout_s or timeout_of(self._group)
        self._own_group = group = sibling_group(self._group, timeout_s)
        self._issuer = Issuer(f"gradgate-hook-{rank}")
        try:
            self._core = self._issuer.call(
                _Core, group, name, bytes_of, timeout_s, lines, say
            )
        except BaseException:
            self._issuer.close()
            raise
        self._finalizer = weakref.finalize(self, close_issuer, self._issuer, self._core)

    def close(self) -> None:
        """Ends the thread. Later buckets raise."""
        self._finalizer()

    def stats(self) -> dict[str, int | float]:
        """Totals of this rank under slash names: gradgate/steps and hook_steps (counts; those after start_step, and
        those of them that ran the hook), saved_s (seconds, verified), dense_step_s and plan_step_s (seconds of a step,
        dense and with the hook; NaN before they were measured)."""
        stats = self._issuer.call(self._core.gate.stats)
        return {f"gradgate/{name}": value for name, value in stats.items()}

    def explain(self) -> str:
        """One line: what runs, and why."""
        return self._issuer.call(self._core.gate.explain)

    def phase(self) -> str:
        """startup, verify, hold, … (docs/gate.md)."""
        return self._issuer.call(self._core.gate.phase)

    def state_dict(self) -> dict:
        """This rank's state between steps: the hook's own, pickled, and the number of steps. Save one per rank. What
        the gate has found out is not part of it."""
        inner = self._waiting[0] if self._waiting is not None else self.inner
        return {
            "version": 1,
            "hook": self._name,
            "rank": dist.get_rank(self._group),
            "world_size": self._size,
            "steps": self._steps,
            "layout": self._waiting[1] if self._waiting is not None else [list(names) for names in self._layout],
            "inner": self._issuer.call(_pickled, inner, self._name),
        }

    def load_state_dict(self, state: dict) -> None:
        """Collective, before the first step. Takes a state of the same hook, rank and number of ranks; anything else
        raises Error on every rank and changes nothing. It is unpickled: load only what you have saved.

        A fresh process shows DDP's first buckets for 2 steps, which are dense and leave the hook alone; its state then
        takes effect if the buckets are those it was saved with. Otherwise it starts anew, with a warning.
        """
        refusal, inner = self._refusal(state), None
        if not refusal and state["inner"] is not None:
            try:
                inner = pickle.loads(state["inner"].numpy().tobytes())
            except Exception as error:
                refusal = f"gradgate: the state of hook {self._name!r} cannot be read: {type(error).__name__}: {error}"
        self._issuer.call(self._core.refuse, refusal)
        self._steps = state["steps"]
        self._unsettled = WARM_UP_STEPS
        self._waiting = (inner, [list(names) for names in state["layout"]]) if inner is not None else None

    def _refusal(self, state: dict) -> str:
        if state.get("version") != 1:
            return f"gradgate: state version {state.get('version')!r}, accepted: 1"
        mine = {"hook": self._name, "world_size": self._size, "rank": dist.get_rank(self._group)}
        for field, value in mine.items():
            if state[field] != value:
                return f"gradgate: the state is of {field} {state[field]!r}, this process has {value!r}"
        if self._arriving or self._layout:
            return "gradgate: load_state_dict() after a step, accepted: before the first"
        return ""

    def _settle(self, bucket: dist.GradBucket) -> None:
        """Keeps book of DDP's buckets; at the end of the steps in which they may still change, a loaded state of the
        hook takes effect."""
        names = tuple(self._names.get(id(parameter), "") for parameter in bucket.parameters())
        self._arriving = [names] if bucket.index() == 0 else [*self._arriving, names]
        if not bucket.is_last():
            return
        self._layout = self._arriving
        if self._unsettled > 0:
            self._unsettled -= 1

    def _install(self) -> None:
        """The first bucket of the first settled step: DDP's buckets are final."""
        (saved, layout), self._waiting = self._waiting, None
        if layout == [list(names) for names in self._layout]:
            self.inner = self._issuer.call(_take_over, self.inner, saved)
            return
        text = f"gradgate: the state of hook {self._name!r} is of other buckets; the hook starts anew without it"
        warnings.warn(text, stacklevel=2)

    def _begin_step(self) -> None:
        # Waits for the agreement that the last step may have asked for.
        if self._unsettled > 0:
            self._action = HookGate.PROBE
            return
        if self._waiting is not None:
            self._install()
        if self._steps < self._warm_up:
            self._action = HookGate.HOOK
            return
        self._action = self._issuer.call(self._core.gate.plan)
        if self._core.failure is not None:
            raise self._core.failure

    def _dense(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if self._action == HookGate.FLUSH and self._flush is not None:
            self._flush(self.inner, bucket)
        if buffer.is_sparse:
            buffer.div_(self._size)
        else:
            buffer.mul_(1.0 / self._size)
        work = dist.all_reduce(buffer, group=self._own_group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """One bucket after the other, on the issuer's thread: a hook that starts a second collective when its first is
        complete would otherwise start them in another order on each rank."""
        if bucket.index() == 0:
            self._begin_step()
        last = bucket.is_last()
        counted = self._unsettled == 0 and self._steps + last > self._warm_up
        self._settle(bucket)
        where = f"step {self._steps} bucket {bucket.index()}"
        if last:
            self._steps += 1
        run, what = (self._run_hook, self._name) if self._action == HookGate.HOOK else (self._dense, "all_reduce")
        outcome: torch.futures.Future = torch.futures.Future()
        core = self._core

        def task() -> None:
            begin = time.monotonic()
            try:
                result = run(bucket).wait() if core.failure is None else core.failure
            except BaseException as error:
                result = core.fail(error, where, f"{what} failed after {time.monotonic() - begin:.1f} s")
            if last and counted:
                core.end_step(_native.now())
            outcome.set_result(result)

        self._issuer.submit(task)
        return outcome.then(result_of)

    def _run_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._hook(self.inner, bucket)


def gated_foreign_hook(state: HookGateState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook that gated() returns: runs the wrapped hook, or dense, as the gate decides for the whole step."""
    return state._reduce(bucket)


def gated(
    ddp: torch.nn.parallel.DistributedDataParallel,
    state: object,
    hook: Hook,
    flush: Flush | None = None,
    name: str | None = None,
    start_step: int | None = None,
    log: LogTarget = None,
    say: Callable[[str], None] | None = print_line,
    timeout_s: float | None = None,
) -> tuple[HookGateState, Hook]:
    """Gates any DDP communication hook against dense: ``ddp.register_comm_hook(*gated(ddp, state, hook))``.

    Collective. The hook is a black box: whole steps with it are compared with dense ones on the running job (paired
    windows, sign test, all ranks agree), and it runs only while it is measurably faster.

    flush: ``flush(state, bucket)`` adds what the hook kept back to ``bucket.buffer()`` (sum units) and forgets it;
        called in the step in which the gate closes. Known for torch's PowerSGD. Without one no conservation law is
        promised.
    name: for log and explanations; the hook's own name by default.
    start_step: steps that the hook runs ungated; by default 2, and PowerSGD's own ``start_powerSGD_iter``.
    log, say, timeout_s: as in GateState.
    """
    chosen = name or getattr(hook, "__name__", type(hook).__name__)
    made = HookGateState(ddp, state, hook, flush, chosen[:47], start_step, log, say, timeout_s)
    return made, gated_foreign_hook


def gated_fp16(ddp: torch.nn.parallel.DistributedDataParallel, **options) -> tuple[HookGateState, Hook]:
    """torch's fp16_compress_hook, gated. Collective; ``options`` are those of gated()."""
    check_module(ddp)
    return gated(ddp, ddp.process_group, default_hooks.fp16_compress_hook, **options)


def bf16_cast_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook under a name that DDP accepts on gloo too (it allows the original on CUDA only)."""
    return default_hooks.bf16_compress_hook(group, bucket)


def gated_bf16(ddp: torch.nn.parallel.DistributedDataParallel, **options) -> tuple[HookGateState, Hook]:
    """torch's bf16_compress_hook, gated. Collective; ``options`` are those of gated()."""
    check_module(ddp)
    return gated(ddp, ddp.process_group, bf16_cast_hook, **options)


def gated_power_sgd(
    ddp: torch.nn.parallel.DistributedDataParallel, matrix_approximation_rank: int = 1, **options
) -> tuple[HookGateState, Hook]:
    """torch's PowerSGD hook, gated; its error is flushed when the gate closes. Collective; ``options`` are those of
    gated(). For other settings of PowerSGD make its state yourself: gated(ddp, PowerSGDState(…), powerSGD_hook)."""
    check_module(ddp)
    # On a group of its own: its later collectives start from completion callbacks, beside whatever DDP sends.
    group = sibling_group(ddp.process_group, options.get("timeout_s") or timeout_of(ddp.process_group))
    inner = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=matrix_approximation_rank, start_powerSGD_iter=2
    )
    return gated(ddp, inner, powerSGD_hook.powerSGD_hook, **options)
