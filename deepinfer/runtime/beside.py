"""Beside: one other thread that works while the device does."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class Beside:
    """A thread that does one piece of work at a time. Less than an executor, because the time to
    hand work over and to learn of its end is time in which the device waits."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._busy = False
        self._thread = Thread(target=self._run, name="deepinfer-beside", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> None:
        """Have ``work`` done; ``end`` must follow."""
        if self._busy:  # the wait for the work before was cut short
            self.end()
        self._busy = True
        self._given.put(work)

    def end(self) -> None:
        """Wait for it, and raise what it raised."""
        error = self._ended.get()
        self._busy = False
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread; it may be called twice."""
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:
                error = raised
            self._ended.put(error)
            del work, error


__all__ = ["Beside"]
