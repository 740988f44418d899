"""The one thread that issues everything of a gate, in the order in which it was asked for."""

import queue
import threading


def _serve(tasks: queue.SimpleQueue) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        task = None  # a gradient must not be kept until the next one comes


class Issuer:
    """Starts its thread with the first task. The thread refers to the queue only, never to who owns it."""

    def __init__(self, name: str):
        self._name = name
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, task) -> None:
        """Runs ``task()`` after all earlier ones. It must not raise."""
        if self._closed:
            raise RuntimeError("gradgate: this GateState is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def call(self, function, *arguments):
        """Runs ``function`` after all earlier tasks and gives its result, or raises what it raised."""
        if threading.current_thread() is self._thread:
            return function(*arguments)
        outcome = []
        done = threading.Event()

        def task():
            try:
                outcome.append((function(*arguments), None))
            except BaseException as error:
                outcome.append((None, error))
            finally:
                done.set()

        self.submit(task)
        done.wait()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after what it was given; waits at most ``timeout_s`` for it."""
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)
