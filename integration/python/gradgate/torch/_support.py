"""What the states of this package share: where lines go, timeouts, and how a thread ends."""

import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from .._native import Error
from ._group import status_of
from ._issuer import Issuer

DEFAULT_TIMEOUT_S = 300.0

LogTarget = str | pathlib.Path | Callable[[str], None] | None


class Scaler(Protocol):
    """What is asked of a loss scaler: torch's ``GradScaler``, or another."""

    def get_scale(self) -> float:
        """By what the loss of the step that comes is multiplied."""


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which the collectives of ``group`` give up."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT_S


class _LogFile:
    """Lines into a file, each written whole."""

    def __init__(self, path: pathlib.Path):
        self._file = open(path, "a", encoding="utf-8")

    def __call__(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def check_module(ddp: object) -> None:
    """Error(invalid_argument) for what is no DistributedDataParallel module."""
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        raise Error(1, f"gradgate: ddp is a {type(ddp).__name__}, accepted: a DistributedDataParallel module")


def log_function(target: LogTarget, rank: int) -> Callable[[str], None] | None:
    """A path is rank 0's file; with ``{rank}`` in it, every rank's. Error(io_error) where it cannot be opened."""
    if not isinstance(target, (str, pathlib.Path)):
        return target
    named = str(target).replace("{rank}", str(rank))
    if rank != 0 and named == str(target):
        return None
    try:
        return _LogFile(pathlib.Path(named))
    except OSError as error:
        raise Error(12, f"gradgate: cannot write log {named}: {error.strerror or error}") from None


def agree(group: dist.ProcessGroup, arguments: Mapping[str, object], refusal: Error | None = None) -> None:
    """Collective. Raises Error on every rank when one has a refusal, or when an argument is not what it is on rank 0."""
    everyone = [({}, None)] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, ({name: str(value) for name, value in arguments.items()}, refusal), group=group)
    except RuntimeError as error:
        raise Error(status_of(error), f"gradgate: comparing the ranks' arguments: {error}") from error
    for rank, (_, other) in enumerate(everyone):
        if other is not None:
            raise refusal or Error(other.code, f"{other._text} (on rank {rank})")
    first = everyone[0][0]
    for rank, (theirs, _) in enumerate(everyone):
        for name, value in theirs.items():
            if value != first[name]:
                text = f"{name} is '{first[name]}' on rank 0 and '{value}' on rank {rank}"
                raise Error(6, f"gradgate: ranks disagree: {text}")


def close_issuer(issuer: Issuer, core) -> None:
    """Ends a state's thread and what it used. Holds no reference to the state."""
    try:
        issuer.submit(core.close)
    except RuntimeError:
        return
    issuer.close()


def result_of(future: torch.futures.Future) -> torch.Tensor:
    """The tensor that a thread of this package put into ``future``, or the exception, raised."""
    outcome = future.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
