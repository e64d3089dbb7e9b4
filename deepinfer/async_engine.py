"""AsyncEngine: requests as async iterators, while a thread steps the engine."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepinfer.api.engine_thread import EngineThread
from deepinfer.api.mailbox import Answer, Mailbox
from deepinfer.api.prompts import Params, Prompt
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.runtime.stats import EngineStats


class AsyncEngine:
    """Serves requests of any number of tasks, in any number of event loops.

    ::

        async with AsyncEngine("path/to/model") as engine:
            async for output in engine.add_request("Once upon a time", {"max_tokens": 32}):
                print(output.text)

    Args:
        source: a checkpoint directory; or an LLM or an Engine, which stay the caller's to close.
        settings: of LLM, for a checkpoint directory.

    Raises:
        RequestError: settings for what is made already. Otherwise as LLM.
    """

    def __init__(self, source: LLM | Engine | str | Path, **settings: Any) -> None:
        if settings and not isinstance(source, str | Path):
            raise RequestError(f"there are settings {sorted(settings)} for an engine that is made, "
                               "expected none", where="AsyncEngine", next="give them to the LLM")
        own = isinstance(source, str | Path)
        self.llm = (LLM(source, **settings) if isinstance(source, str | Path) else
                    source if isinstance(source, LLM) else LLM.of(source))
        self._thread = EngineThread(self.llm.delivery, *((self.llm.close,) if own else ()))
        self._numbers = itertools.count()

    def add_request(self, prompt: Prompt, params: Params | None = None,
                    request_id: str | None = None) -> AsyncStream:
        """Queue a request; call it in the event loop that consumes the outputs.

        Args:
            prompt: a text or token ids. params: SamplingParams or a mapping of its fields.
            request_id: unique among the unfinished; default: one is made.

        Returns:
            An async iterator of what the request has so far: each output holds all of it, so a
            consumer that is late gets fewer outputs and misses nothing. With n > 1 the outputs of
            the children alternate; ``index`` tells them apart. A consumer that is cancelled, stops
            early or drops the iterator aborts the request. What is wrong with the request is
            raised by the iterator.

        Raises:
            RequestError: params that cannot be. DeepInferError: the engine has ended.
        """
        wanted = SamplingParams() if params is None else SamplingParams.of(params)
        if self._thread.ended is not None:
            why = str(self._thread.ended).partition("\n")[0]
            raise DeepInferError(f"the engine has ended: {why}", where="AsyncEngine",
                                 next="make a new AsyncEngine") from self._thread.ended
        name = f"async-{next(self._numbers)}" if request_id is None else request_id
        thread = self._thread  # the mailbox must not keep this engine from being dropped
        mailbox = Mailbox(asyncio.get_running_loop(), wanted.n, lambda: thread.forget(name))
        thread.submit(name, prompt, wanted, mailbox)
        return AsyncStream(name, mailbox, self)

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator gets a last output with finish_reason "abort".

        Returns:
            Whether it was running.
        """
        answer = Answer()
        self._thread.abort(request_id, answer.set)
        return bool(await answer)

    async def stats(self) -> EngineStats:
        """Counts of the engine since it was made.

        Raises:
            DeepInferError: the engine has ended.
        """
        answer = Answer()
        self._thread.stats(answer.set, answer.fail)
        found: EngineStats = await answer
        return found

    def stop(self, *, drain: bool = False) -> None:
        """Take no more requests, and wait for the thread's end. Not for an event loop that is to
        go on meanwhile: see ``aclose``. Harmless a second time.

        Args:
            drain: finish the running requests instead of aborting them.
        """
        self._thread.stop(drain)
        self._thread.join()

    async def aclose(self, *, drain: bool = False) -> None:
        """``stop`` for an event loop."""
        self._thread.stop(drain)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):  # not where __init__ raised
            self._thread.stop(drain=False)


class AsyncStream:
    """The outputs of one request: an async iterator for one consumer.

    Args:
        request_id: as ``abort`` takes it. mailbox: where they come from.
        engine: kept alive as long as this.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, engine: AsyncEngine) -> None:
        self.request_id = request_id
        self._mailbox, self._engine = mailbox, engine

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> RequestOutput:
        return await self._mailbox.next()

    async def aclose(self) -> None:
        """Abort the request if it is not finished."""
        self._mailbox.drop()

    def __del__(self) -> None:
        self._mailbox.drop()
