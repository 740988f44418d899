"""gated(): a gate around any other communication hook. No postponed annotations in this file: DDP compares them with
the classes themselves."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from .. import _native
from .._native import Error
from .._session import HookGate
from ._group import Communicator, sibling_group
from ._issuer import Issuer
from ._support import LogTarget, close_issuer, log_function, print_line, result_of, timeout_of

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

    def __init__(self, ddp, inner, hook, flush, name, start_step, log, say, timeout_s):
        known_flush, first = _known(inner, hook)
        self.inner, self._hook = inner, hook
        self._flush = flush if flush is not None else known_flush
        self._warm_up = first if start_step is None else int(start_step)
        self._group = ddp.process_group
        self._size = dist.get_world_size(self._group)
        self._steps = 0
        self._action = HookGate.DENSE
        bytes_of = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
        timeout_s = timeout_s or timeout_of(self._group)
        backend = str(dist.get_backend(self._group))
        if "gloo" not in backend:
            raise Error(2, f"gradgate: gated() times host futures: gloo groups only, found {backend}")
        self._own_group = group = sibling_group(self._group, timeout_s)
        rank = dist.get_rank(group)
        self._issuer = Issuer(f"gradgate-hook-{rank}")
        try:
            self._core = self._issuer.call(
                _Core, group, name, bytes_of, timeout_s, log_function(log, rank), say
            )
        except BaseException:
            self._issuer.close()
            raise
        self._finalizer = weakref.finalize(self, close_issuer, self._issuer, self._core)

    def close(self) -> None:
        """Ends the thread. Later buckets raise."""
        self._finalizer()

    def stats(self) -> dict[str, int | float]:
        """Totals under slash names: steps, steps that ran the hook, seconds saved (verified), seconds per step."""
        stats = self._issuer.call(self._core.gate.stats)
        return {f"gradgate/{name}": value for name, value in stats.items()}

    def explain(self) -> str:
        """One line: what runs, and why."""
        return self._issuer.call(self._core.gate.explain)

    def phase(self) -> str:
        """startup, verify, hold, … (docs/gate.md)."""
        return self._issuer.call(self._core.gate.phase)

    def _begin_step(self) -> None:
        # Waits for the agreement that the last step may have asked for.
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
        if last:
            self._steps += 1
        counted = self._steps > self._warm_up
        run = self._dense if self._action != HookGate.HOOK else self._run_hook
        outcome: torch.futures.Future = torch.futures.Future()
        core = self._core

        def task() -> None:
            try:
                result = run(bucket).wait()
            except BaseException as error:
                result = error
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
    state,
    hook: Callable,
    flush: Callable[[object, dist.GradBucket], None] | None = None,
    name: str | None = None,
    start_step: int | None = None,
    log: LogTarget = None,
    say: Callable[[str], None] | None = print_line,
    timeout_s: float | None = None,
) -> tuple[HookGateState, Callable]:
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


def gated_fp16(ddp, **options) -> tuple[HookGateState, Callable]:
    """torch's fp16_compress_hook, gated."""
    return gated(ddp, ddp.process_group, default_hooks.fp16_compress_hook, **options)


def bf16_cast_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook under a name that DDP accepts on gloo too (it allows the original on CUDA only)."""
    return default_hooks.bf16_compress_hook(group, bucket)


def gated_bf16(ddp, **options) -> tuple[HookGateState, Callable]:
    """torch's bf16_compress_hook, gated."""
    return gated(ddp, ddp.process_group, bf16_cast_hook, **options)


def gated_power_sgd(ddp, matrix_approximation_rank: int = 1, **options) -> tuple[HookGateState, Callable]:
    """torch's PowerSGD hook, gated; its error is flushed when the gate closes."""
    # On a group of its own: its later collectives start from completion callbacks, beside whatever DDP sends.
    group = sibling_group(ddp.process_group, options.get("timeout_s") or timeout_of(ddp.process_group))
    inner = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=matrix_approximation_rank, start_powerSGD_iter=2
    )
    return gated(ddp, inner, powerSGD_hook.powerSGD_hook, **options)
