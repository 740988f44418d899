"""A state's totals as TensorBoard scalars."""

from typing import Protocol


class Writer(Protocol):
    """What is asked of a ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Keeps one number of one step."""


class Counting(Protocol):
    """A GateState or HookGateState."""

    def stats(self) -> dict[str, int | float]:
        """Totals under slash names."""


def log_to_tensorboard(writer: Writer, state: Counting, step: int | None = None) -> None:
    """Writes ``state.stats()`` (a GateState or HookGateState) to a ``SummaryWriter``. ``step``: by default the state's
    own count of synchronised steps. Numbers that are not known yet are left out."""
    stats = state.stats()
    at = int(stats["gradgate/steps"]) if step is None else step
    for name, value in stats.items():
        if value == value:  # NaN: not measured yet
            writer.add_scalar(name, value, at)
