"""What runs on the issuer's thread: buckets in, averages out. Knows no DDP module and no GateState.

A step is a sequence of buckets that ends with the one marked last. DDP announces its layout only bucket by bucket, so a
step is *planned* while its buckets equal those of the layout that the session has; from the first that differs on, the
step goes dense, and its layout is the session's from the next step on. After a checkpoint was loaded, DDP first shows
the buckets of a fresh process: such steps are *regrouped* into the saved layout, so that a resumed run goes on exactly.
"""

import dataclasses

import torch
import torch.distributed as dist

from .._native import Error
from .._session import Session
from ._group import Communicator

# Steps after load_state() in which DDP may still show another layout (2 with static_graph).
REGROUPED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class BucketKey:
    """What makes two buckets the same: dtype code (None: not for the session), parameters, and whether it is last."""

    dtype: int | None
    params: tuple[tuple[int, int], ...]
    last: bool


@dataclasses.dataclass(eq=False)
class Arrival:
    """One bucket as the hook got it. ``scale``: loss scale or None; ``ready_s``: on the clock of gradgate now()."""

    key: BucketKey
    buffer: torch.Tensor
    index: int
    ready_s: float
    scale: float | None
    divide: bool
    finish: object  # called with the averaged buffer, or an exception
    stream: int = 0  # cudaStream_t on which the gradient is made; device memory only


def average_plainly(buffer: torch.Tensor, group: dist.ProcessGroup, size: int, divide: bool) -> torch.Tensor:
    """What DDP does to a bucket without a hook, for any dtype and layout."""
    if divide or buffer.is_sparse:
        buffer.div_(size)
    else:
        buffer.mul_(1.0 / size)
    dist.all_reduce(buffer, group=group)
    return buffer


class Core:
    """``later(task)`` runs a task on this thread after those that wait; None where no bucket stays on the wire."""

    def __init__(self, group: dist.ProcessGroup, options: dict, start_step: int, log, say, store, later=None):
        self.communicator = self._connect(group, options["timeout_s"])
        self.start_step = start_step
        self.steps = 0
        self.failure: Error | None = None
        self._store, self._later = store, later
        self._where = "construction"
        self._layout: list[BucketKey] = []
        self._has_layout = False
        self._step: list[BucketKey] = []
        self._planned = False
        self._regroup_left = 0
        self._held: list[Arrival] = []
        self._on_wire: Arrival | None = None  # reduced, but for what the session left to the next bucket's call
        self._skip = False
        try:
            self.communicator.choose_all_to_all()
            self.session = Session(self.communicator.handle, log=log, say=say, **options)
        except Exception as error:
            self.communicator.close()
            cause = self.communicator.failure or (None if isinstance(error, Error) else error)
            raise self._enrich(error) from cause

    def _connect(self, group: dist.ProcessGroup, timeout_s: float):
        return Communicator(group)

    def close(self) -> None:
        if self.session is not None:
            self.communicator.drop_started()
            self.session.close()
            self.communicator.close()
            self.session = None

    # --- one bucket

    def arrive(self, arrival: Arrival) -> None:
        """Averages one bucket (or holds it until its step can be regrouped), and finishes those whose average is
        there."""
        waiting = [*self._held, *([self._on_wire] if self._on_wire is not None else []), arrival]
        try:
            if self.failure is not None:
                raise self.failure
            if arrival.index == 0:
                self._begin_step(arrival)
            self._step.append(arrival.key)
            if self._regroup_left > 0:
                self._held.append(arrival)
                if arrival.key.last:
                    self._regroup()
            else:
                self._where = f"step {self.steps} bucket {arrival.index}"
                self._average(arrival)
                if arrival.key.last:
                    self._end_step()
        except BaseException as error:
            self._fail(error, waiting)
            return
        if arrival.key.last:
            self._held = []
        for each in waiting:
            if each is not self._on_wire and each not in self._held:
                each.finish(each.buffer)

    def _leave(self, arrival: Arrival) -> None:
        """Its payloads are on the wire. The next bucket's call ends it; if none is waiting, this does."""
        self._on_wire = arrival
        self._later(lambda: self._end(arrival))

    def _end(self, arrival: Arrival) -> None:
        if self._on_wire is not arrival:
            return
        try:
            self.session.finish()
        except BaseException as error:
            return self._fail(error, [arrival])
        self._on_wire = None
        arrival.finish(arrival.buffer)

    def _begin_step(self, arrival: Arrival) -> None:
        self._step = []
        self._skip = False
        self._planned = self._has_layout and self.steps >= self.start_step
        self.session.set_dense_division(arrival.divide)
        if arrival.scale is not None:
            self.session.set_gradient_scale(arrival.scale)

    def _average(self, arrival: Arrival) -> None:
        key, buffer, position = arrival.key, arrival.buffer, len(self._step) - 1
        self._planned = self._planned and position < len(self._layout) and self._layout[position] == key
        if key.dtype is None or self.steps < self.start_step:
            average_plainly(buffer, self.communicator.group, self.communicator.size, arrival.divide)
            if arrival.scale is not None and not self._skip and not torch.isfinite(buffer).all():
                self._skip = True
                self.session.skip_step()
        elif self._planned:
            index = sum(earlier.dtype is not None for earlier in self._step[:position])
            self._reduce(index, buffer, key.dtype, arrival)
        else:
            self._reduce_dense(buffer, key.dtype, arrival)

    def _reduce(self, index: int, buffer: torch.Tensor, dtype: int, arrival: Arrival) -> None:
        bucket = (index, buffer.data_ptr(), buffer.numel(), dtype, arrival.ready_s)
        if self._held:  # a regrouped bucket is taken apart as soon as this returns
            return self.session.all_reduce(*bucket)
        on_wire = self.session.all_reduce_overlapped(*bucket)
        self._on_wire = None
        if on_wire:
            self._leave(arrival)

    def _reduce_dense(self, buffer: torch.Tensor, dtype: int, arrival: Arrival) -> None:
        self._on_wire = None
        self.session.all_reduce_dense(buffer.data_ptr(), buffer.numel(), dtype)

    def _end_step(self) -> None:
        if not self._planned and self.steps >= self.start_step:
            self._adopt(self._step)
        self.steps += 1

    def _adopt(self, keys: list[BucketKey]) -> None:
        self.session.set_layout([(key.dtype, key.params) for key in keys if key.dtype is not None])
        self._layout, self._has_layout = list(keys), True

    # --- the first steps after load_state()

    def _regroup(self) -> None:
        """The buckets of a whole step, reduced in the saved layout where they have the same parameters."""
        held = self._held
        if [arrival.key for arrival in held] == self._layout:
            self._regroup_left = 0
        else:
            self._regroup_left -= 1
        pieces = {}
        for arrival in held:
            offset = 0
            for identity, count in arrival.key.params:
                pieces[(arrival.key.dtype, identity, count)] = arrival.buffer[offset : offset + count]
                offset += count
        wanted = [(key.dtype, identity, count) for key in self._layout for identity, count in key.params]
        same = len(wanted) == len(pieces) and all(name in pieces for name in wanted)
        if not same or self._regroup_left == 0 and [arrival.key for arrival in held] != self._layout:
            # Not the parameters of the saved layout, or DDP keeps another one: take its layout from here on.
            self._regroup_left = 0
            self._step = []
            for arrival in held:
                self._step.append(arrival.key)
                self._where = f"step {self.steps} bucket {arrival.index}"
                self._average(arrival)
            return self._end_step()
        self._step = []
        for index, key in enumerate(self._layout):
            parts = [pieces[(key.dtype, identity, count)] for identity, count in key.params]
            bucket = torch.cat(parts) if parts else torch.empty(0)
            self._step.append(key)
            self._where = f"step {self.steps} bucket {index}"
            self._average(dataclasses.replace(held[0], key=key, buffer=bucket, index=index))
            for part, result in zip(parts, bucket.split([part.numel() for part in parts]) if parts else ()):
                part.copy_(result)
        self._end_step()

    # --- between steps

    def save(self) -> dict:
        """This rank's state as plain values and one uint8 tensor."""
        self._check()
        session = None
        if self._has_layout:
            session = torch.frombuffer(self.session.save_state(), dtype=torch.uint8).clone()
        return {
            "steps": self.steps,
            "rank": self.communicator.rank,
            "world_size": self.communicator.size,
            "layout": [dataclasses.astuple(key) for key in self._layout] if self._has_layout else None,
            "session": session,
        }

    def load(self, state: dict, refusal: str) -> None:
        """Collective. Takes over what save() gave, or raises Error on every rank when one has a refusal; then nothing
        has changed but the bucket layout."""
        self._check()
        refusals = [""] * self.communicator.size
        dist.all_gather_object(refusals, refusal, group=self.communicator.group)
        for rank, text in enumerate(refusals):
            if text:
                raise Error(6, refusal or f"gradgate: rank {rank} cannot load its state: {text}")
        if state["layout"] is not None:
            layout = [
                BucketKey(dtype, tuple((identity, count) for identity, count in params), last)
                for dtype, params, last in state["layout"]
            ]
            if not self._has_layout or layout != self._layout:
                self._adopt(layout)
                self._regroup_left = REGROUPED_STEPS
            self.session.load_state(bytes(state["session"].numpy()))
        self.steps = state["steps"]

    def flush(self) -> None:
        self._check()
        self.session.flush()

    def stats(self) -> dict[str, int | float]:
        stats = self.session.stats()
        stats["steps"] = self.steps
        return stats

    def explain(self) -> list[str]:
        return [self.session.explain(index) for index in range(sum(key.dtype is not None for key in self._layout))]

    def residuals(self) -> dict[int, torch.Tensor]:
        """A copy of every residual of this rank by parameter id, f32, sum units."""
        found = {}
        kept = [key for key in self._layout if key.dtype is not None]
        for index, key in enumerate(kept):
            values = self.session.residual(index, sum(count for _, count in key.params))
            if values is not None:
                parts = torch.tensor(values).split([count for _, count in key.params])
                found.update({identity: part for (identity, _), part in zip(key.params, parts)})
        return found

    # --- failure

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _enrich(self, error: BaseException) -> Error:
        """The same error with what the other ranks were last doing, as far as the rendezvous store knows."""
        code = error.code if isinstance(error, Error) else 13
        text = f"gradgate: rank {self.communicator.rank}, {self._where}: "
        text += error._text if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        if self._store is not None:
            text += self._store.last_words(self.communicator.rank, self.communicator.size, self._where)
        return Error(code, text)

    def _fail(self, error: BaseException, arrivals: list[Arrival]) -> None:
        if self.failure is None:
            self.failure = self._enrich(error)
            self.failure.__cause__ = self.communicator.failure or (None if isinstance(error, Error) else error)
        self._held, self._on_wire = [], None
        for arrival in arrivals:
            arrival.finish(self.failure)
