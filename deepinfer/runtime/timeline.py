"""A timeline of host and device work: how much of the one the other hides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_NOTHING = nullcontext()


class Timeline:
    """When the host and the device worked: to count how much host work is hidden.

    Attributes:
        spans: (kind, begin, end) in seconds of a monotonic clock. Kinds: "device"; "host" work
            on the thread that calls the device; "beside", host work on another one.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((kind, begin, time.perf_counter()))

    @staticmethod
    def host(timeline: Timeline | None) -> AbstractContextManager[None]:
        return _NOTHING if timeline is None else timeline._span("host")

    def timed(self, kind: str, work: Callable[[], None]) -> Callable[[], None]:
        """The same work, recorded."""
        def recorded() -> None:
            with self._span(kind):
                work()

        return recorded

    @staticmethod
    def device(timeline: Timeline | None) -> AbstractContextManager[None]:
        return _NOTHING if timeline is None else timeline._span("device")

    def hidden(self) -> float:
        """The share of host time during which the device worked."""
        device = [(b, e) for kind, b, e in self.spans if kind == "device"]
        total = over = 0.0
        for kind, begin, end in self.spans:
            if kind != "device":
                total += end - begin
                over += sum(max(0.0, min(end, e) - max(begin, b)) for b, e in device)
        return over / total if total else 0.0
