"""Delivery: who may touch the engine, and who gets which request's outputs.

An engine is not thread-safe and hands all outputs to whoever calls ``step``. Here callers take
turns in the order they came, step by step; whoever steps hands every output to the caller that
waits for it. So requests of several callers share the batches, and nobody gets another's output.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from deepinfer.errors import DeepInferError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.outputs import RequestOutput, Usage
from deepinfer.runtime.params import SamplingParams

Receive = Callable[[int, RequestOutput], None]


class FairLock:
    """A lock that is handed over in the order of asking.

    With ``threading.Lock`` a thread that releases and takes again at once, as a loop of steps does,
    can keep all others out.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def try_acquire(self) -> bool:
        """Take it if it is free right now; safe in a finaliser, wherever that interrupts."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._held:
                return False
            self._held = True
            return True
        finally:
            self._mutex.release()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()  # released by whoever hands over
        except BaseException:  # an interrupt
            with self._mutex:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                    raise
            self.release()  # it was handed over just then
            raise

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()


@dataclass(slots=True)
class _Addressee:
    index: int
    receive: Receive
    last: RequestOutput | None = None


class Delivery:
    """Hands an engine's outputs to those who wait for them.

    Every method but ``drop`` is called inside ``with delivery.turn``.

    Args:
        engine: steps requests. Requests added to it by others are stepped along; their outputs go
            to nobody here.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turn = FairLock()
        self.closed = False
        self._addressees: dict[str, _Addressee] = {}
        self._dropped: deque[str] = deque()

    def submit(self, prompt: Sequence[int], params: SamplingParams, receive: Receive,
               request_id: str | None = None) -> tuple[str, ...]:
        """Queue a request, or n of them: child 0 uses the seed, child i > 0 one made of both.

        Args:
            prompt: token ids. receive: called as (child, what the child has so far) after each
                step that changed it; the last output has a finish_reason.
            request_id: of child 0; child i > 0 has ".i" after it.

        Returns:
            The children's ids.

        Raises:
            RequestError: the request cannot be served; none of the children is left.
        """
        self.require_open()
        ids: list[str] = []
        try:
            for index in range(params.n):
                child = params if params.n == 1 else params.child(index)
                name = f"{ids[0]}.{index}" if index else request_id
                ids.append(self.engine.add_request(prompt, child, name, index))
                self._addressees[ids[-1]] = _Addressee(index, receive)
        except BaseException:
            self.forget(ids)
            raise
        return tuple(ids)

    def step(self) -> None:
        """Run one step of the engine and deliver what it gave."""
        self.require_open()
        self._forget_dropped()
        for output in self.engine.step():
            if output.request_id in self._addressees:
                self._deliver(output)
        if self._addressees and not self.engine.has_unfinished():
            self._aborted(list(self._addressees))  # somebody did that behind our back

    def abort(self, request_ids: Iterable[str]) -> bool:
        """End requests; who waits for one gets a last output, ended by "abort". False: none ran."""
        running = [i for i in request_ids if i in self._addressees]
        for request_id in running:
            self.engine.abort(request_id)
        self._aborted(running)
        return bool(running)

    def forget(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody waits for any more."""
        for request_id in request_ids:
            if self._addressees.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def drop(self, request_ids: Iterable[str]) -> None:
        """``forget``, now or at the next step; waits for nothing, so a finaliser may call it."""
        self._dropped.extend(request_ids)
        if self.turn.try_acquire():
            try:
                self._forget_dropped()
            finally:
                self.turn.release()

    def close(self) -> None:
        """Abort what is left and close the engine. Harmless a second time."""
        if not self.closed:
            self._aborted(list(self._addressees))
            self.closed = True
            self.engine.close()

    def require_open(self) -> None:
        """Raises DeepInferError after ``close``."""
        if self.closed:
            raise DeepInferError("the engine is closed, expected an open one", where="LLM",
                                 next="make a new LLM")

    def _forget_dropped(self) -> None:
        while self._dropped:
            self.forget([self._dropped.popleft()])

    def _aborted(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            last = self._addressees[request_id].last
            if last is None:
                last = RequestOutput(request_id, [], "", [], None, None, None, Usage(0, 0), None,
                                     index=self._addressees[request_id].index)
            self._deliver(replace(last, finish_reason="abort"))

    def _deliver(self, output: RequestOutput) -> None:
        to = self._addressees[output.request_id]
        to.last = output
        if output.finished:
            del self._addressees[output.request_id]
        to.receive(to.index, output)
