"""A state's totals as TensorBoard scalars."""


def log_to_tensorboard(writer, state, step: int | None = None) -> None:
    """Writes ``state.stats()`` (a GateState or HookGateState) to a ``SummaryWriter``. ``step``: by default the state's
    own count of synchronised steps. Numbers that are not known yet are left out."""
    stats = state.stats()
    at = int(stats["gradgate/steps"]) if step is None else step
    for name, value in stats.items():
        if value == value:  # NaN: not measured yet
            writer.add_scalar(name, value, at)
