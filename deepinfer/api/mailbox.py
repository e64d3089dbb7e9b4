"""From the engine's thread into an event loop: outputs of one request, and single answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.runtime.outputs import RequestOutput


class Mailbox:
    """The newest output of each child: the engine's thread puts, one consumer takes.

    Apart from AsyncStream, so that the engine's side keeps no dropped stream alive.

    Args:
        loop: of the consumer. count: n. forget: ends the request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, forget: Callable[[], None]
                 ) -> None:
        self._loop, self._running, self._forget = loop, count, forget
        self._lock = threading.RLock()  # a finaliser may come while it is held
        self._newest: dict[int, RequestOutput] = {}
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def receive(self, index: int, output: RequestOutput) -> None:
        """The newest output of a child; it takes the place of one that was not taken."""
        with self._lock:
            self._newest[index] = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        """After what is still to be taken, raise this."""
        with self._lock:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._woken)
        except RuntimeError:  # the loop is closed: nobody will take anything
            self._forget()

    def _woken(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """The newest output; waits for one."""
        if self._waiter is not None:
            raise RequestError("two consumers wait for one request's outputs, expected one",
                               where="AsyncStream", next="add a request for each")
        while (output := self._take()) is None:
            self._waiter = self._loop.create_future()
            try:
                if not self._has_news():
                    await self._waiter
            except asyncio.CancelledError:
                self.drop()
                raise
            finally:
                self._waiter = None
        return output

    def _has_news(self) -> bool:
        with self._lock:
            return bool(self._newest) or self._error is not None

    def _take(self) -> RequestOutput | None:
        with self._lock:
            if self._newest:
                output = self._newest.pop(next(iter(self._newest)))  # the oldest news
                self._running -= output.finished
                return output
            error, self._error = self._error, None
            if error is not None:
                self._running = 0
                raise error
            if not self._running:
                raise StopAsyncIteration
            return None

    def drop(self) -> None:
        """Nobody takes any more."""
        running, self._running = self._running, 0
        if running:
            self._forget()


class Answer:
    """One value from the engine's thread, awaited in the loop that asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self._loop.create_future()

    def set(self, value: Any) -> None:
        self._schedule(self._future.set_result, value)

    def fail(self, error: BaseException) -> None:
        self._schedule(self._future.set_exception, error)

    def _schedule(self, action: Callable[[Any], None], value: Any) -> None:
        def act() -> None:
            if not self._future.done():  # who asked was cancelled
                action(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed, and who asked with it
            self._loop.call_soon_threadsafe(act)

    def __await__(self) -> Any:
        return self._future.__await__()
