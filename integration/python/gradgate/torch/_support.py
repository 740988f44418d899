"""What the states of this package share: where lines go, timeouts, and how a thread ends."""

import pathlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from ._issuer import Issuer

DEFAULT_TIMEOUT_S = 300.0

LogTarget = str | pathlib.Path | Callable[[str], None] | None


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


def log_function(target: LogTarget, rank: int) -> Callable[[str], None] | None:
    """A path is rank 0's file; with ``{rank}`` in it, every rank's."""
    if not isinstance(target, (str, pathlib.Path)):
        return target
    named = str(target).replace("{rank}", str(rank))
    return _LogFile(pathlib.Path(named)) if rank == 0 or named != str(target) else None


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
