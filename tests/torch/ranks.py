"""Ranks as processes: a pool that runs one function on N ranks of a fresh gloo group. Every wait is bounded."""

import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from datetime import timedelta

GROUP_TIMEOUT_S = 30.0


def gradgate(*arguments, timeout_s: float = 60, **environment) -> subprocess.CompletedProcess:
    """Runs ``python -m gradgate …`` in a process of its own."""
    command = [sys.executable, "-m", "gradgate", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe, parent_end) -> None:
    parent_end.close()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        function, rank, size, port, timeout_s, together, arguments = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
            try:
                torch.manual_seed(0)
                outcome = (True, function(*arguments))
                if together:
                    dist.barrier()
            finally:
                dist.destroy_process_group()
        except BaseException:
            outcome = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(outcome)


class Pool:
    """Up to ``most`` processes, started when first needed and used again by the next call."""

    def __init__(self):
        self._context = multiprocessing.get_context("spawn")
        self._ranks = []

    def _grow(self, size: int) -> None:
        while len(self._ranks) < size:
            here, there = self._context.Pipe()
            os.environ["OMP_NUM_THREADS"] = "1"
            process = self._context.Process(target=_serve, args=(there, here), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _start(self, size, function, arguments, group_timeout_s, together) -> None:
        self._grow(size)
        port = free_port()
        for rank, (_, pipe) in enumerate(self._ranks[:size]):
            pipe.send((function, rank, size, port, group_timeout_s, together, arguments))

    def run(self, size: int, function, *arguments, timeout_s: float = 100.0, group_timeout_s: float = GROUP_TIMEOUT_S):
        """``function(*arguments)`` on every rank; the results by rank. Fails with the ranks' tracebacks."""
        self._start(size, function, arguments, group_timeout_s, True)
        results = []
        for rank, (_, pipe) in enumerate(self._ranks[:size]):
            if not pipe.poll(timeout_s):
                self.close()
                raise AssertionError(f"rank {rank} of {size} did not finish {function.__name__} in {timeout_s} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                self.close()
                raise AssertionError(f"rank {rank} of {size} died in {function.__name__}") from None
        failed = [text for good, text in results if not good]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [value for _, value in results]

    def outcomes(self, size: int, function, *arguments, timeout_s: float, group_timeout_s: float):
        """As run(), but a rank may fail: its traceback, or None for one that died or did not end, is its result."""
        self._start(size, function, arguments, group_timeout_s, False)
        results = []
        for process, pipe in self._ranks[:size]:
            try:
                results.append(pipe.recv()[1] if pipe.poll(timeout_s) else None)
            except (EOFError, ConnectionResetError):
                results.append(None)
        self.close()
        return results

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join(10)
        self._ranks = []
