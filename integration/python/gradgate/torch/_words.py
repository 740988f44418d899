"""Last words: on failure every rank leaves a line in the rendezvous store, so that each message can name the others."""

import time

import torch.distributed as dist

WAIT_S = 1.0


class LastWords:
    def __init__(self, group_name: str):
        self._prefix = f"gradgate/{group_name}"
        try:
            self._store = dist.distributed_c10d._get_default_store()
        except (AttributeError, RuntimeError, ValueError):
            self._store = None

    def last_words(self, rank: int, size: int, where: str) -> str:
        """Leaves ``where`` for the others and gives what they left within a second. Never raises."""
        if self._store is None:
            return ""
        try:
            self._store.set(f"{self._prefix}/{rank}", where)
            found: dict[int, str] = {}
            deadline = time.monotonic() + WAIT_S
            while len(found) < size - 1 and time.monotonic() < deadline:
                for other in range(size):
                    key = f"{self._prefix}/{other}"
                    if other != rank and other not in found and self._store.check([key]):
                        found[other] = self._store.get(key).decode(errors="replace")
                time.sleep(0.05)
        except Exception:
            return " (the rendezvous store does not answer)"
        others = [other for other in range(size) if other != rank]
        words = [f"rank {other}: {found.get(other, 'has not reported')}" for other in others]
        return f" ({'; '.join(words)})" if words else ""
