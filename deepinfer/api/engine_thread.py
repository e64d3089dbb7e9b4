"""The thread that owns an engine for callers who must not block: it steps while there is work.

Commands come through a ``SimpleQueue``, whose ``put`` may be called anywhere, also by a finaliser;
an idle thread sleeps in its ``get``. Nothing polls.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer.api.delivery import Delivery
from deepinfer.api.mailbox import Mailbox
from deepinfer.api.prompts import Prompt, encode_prompt
from deepinfer.errors import DeepInferError
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Command:
    """Args: run: what to do. refuse: called instead when the thread has ended, with the reason."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], None]


@dataclass(slots=True)
class _Asked:
    ids: tuple[str, ...]
    running: int
    mailbox: Mailbox


class EngineThread:
    """Runs requests on a thread of its own.

    Every method may be called from any thread and returns at once, but ``join``.

    Args:
        delivery: of the engine; others may step it too, in turn.
        at_end: called last, on the thread.
    """

    def __init__(self, delivery: Delivery, at_end: Callable[[], None] = lambda: None) -> None:
        self._delivery, self._at_end = delivery, at_end
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._asked: dict[str, _Asked] = {}  # touched inside the delivery's turn
        self._stopping = False
        self.ended: BaseException | None = None  # why no more requests are taken
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()
        _THREADS.add(self)

    def submit(self, request_id: str, prompt: Prompt, params: SamplingParams, mailbox: Mailbox
               ) -> None:
        """Queue a request; what is wrong with it goes to the mailbox."""
        def run() -> None:
            if self._stopping:
                raise _stopped()
            ids = self._delivery.submit(encode_prompt(self._delivery.engine.text, prompt), params,
                                        receive, request_id)
            self._asked[request_id] = _Asked(ids, params.n, mailbox)

        def receive(index: int, output: RequestOutput) -> None:
            asked = self._asked[request_id]
            asked.running -= output.finished
            if not asked.running:
                del self._asked[request_id]
            mailbox.receive(index, output)

        def guarded() -> None:
            try:
                run()
            except Exception as error:  # a request's error ends that request only
                mailbox.fail(error)

        self._post(guarded, mailbox.fail)

    def forget(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""
        def run() -> None:
            asked = self._asked.pop(request_id, None)
            if asked is not None:
                self._delivery.forget(asked.ids)

        self._post(run, lambda reason: None)

    def abort(self, request_id: str, answer: Callable[[bool], None]) -> None:
        """End a request; its mailbox gets last outputs, ended by "abort". Answers: did it run?"""
        def run() -> None:
            asked = self._asked.get(request_id)
            answer(asked is not None and self._delivery.abort(asked.ids))

        self._post(run, lambda reason: answer(False))

    def stats(self, answer: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
        """Answers with the engine's stats."""
        self._post(lambda: answer(self._delivery.engine.stats()), fail)

    def stop(self, drain: bool) -> None:
        """Take no more requests; finish those there are, or abort them."""
        def run() -> None:
            self._stopping = True
            if not drain:
                for asked in list(self._asked.values()):
                    self._delivery.abort(asked.ids)

        self._post(run, lambda reason: None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, run: Callable[[], None], refuse: Callable[[BaseException], None]) -> None:
        self._inbox.put(_Command(run, refuse))
        # Put first, then look: either the thread, which sets this before it empties the queue,
        # finds the command, or it is found here.
        if self.ended is not None:
            self._refuse_all(self.ended)

    def _refuse_all(self, reason: BaseException) -> None:
        for command in self._waiting_commands():
            command.refuse(reason)

    def _waiting_commands(self) -> Sequence[_Command]:
        found: list[_Command] = []
        while True:
            try:
                found.append(self._inbox.get_nowait())
            except queue.Empty:
                return found

    def _run(self) -> None:
        reason: BaseException = _stopped()
        try:
            while self._asked or not self._stopping:
                first = [] if self._asked else [self._inbox.get()]
                with self._delivery.turn:
                    for command in (*first, *self._waiting_commands()):
                        command.run()
                    if self._asked:
                        self._delivery.step()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            reason = error
        self.ended = reason
        with self._delivery.turn:
            left = list(self._asked.values())
            self._asked.clear()
            for asked in left:
                asked.mailbox.fail(reason)
            # The reason is told; a second fault of a broken engine adds nothing.
            with contextlib.suppress(Exception):
                for asked in left:
                    self._delivery.forget(asked.ids)
        self._refuse_all(reason)
        self._at_end()


def _stopped() -> DeepInferError:
    return DeepInferError("the engine was stopped, expected a running one", where="AsyncEngine",
                          next="make a new AsyncEngine")


_THREADS: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A daemon thread that runs native code while the interpreter ends would crash it."""
    for thread in list(_THREADS):
        thread.stop(drain=False)
    for thread in list(_THREADS):
        thread.join()
