"""An answer as it grows."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

from deepinfer.api.chat import ChatPrompt
from deepinfer.api.chat_output import ChatDelta, ChatOutput
from deepinfer.api.completions import Stream
from deepinfer.errors import RequestError
from deepinfer.runtime.outputs import RequestOutput


class ChatStream:
    """The deltas of one answer: an iterator, and a context manager.

    Whoever stops early closes it, or drops it, which aborts the request.

    Args:
        prompt: what is answered. stream: of the raw output, with n = 1.

    Raises:
        RequestError: n > 1.
    """

    def __init__(self, prompt: ChatPrompt, stream: Stream) -> None:
        if stream.count > 1:
            stream.close()
            raise RequestError(f"n is {stream.count}, expected 1: one answer is streamed",
                               where="stream_chat", next="use chat, or one stream for each seed")
        self._stream, self._parser = stream, prompt.parser()
        self._raw: RequestOutput | None = None

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatDelta:
        delta = next(self._stream)
        before = self._raw
        self._raw = delta if before is None else replace(
            delta, text=before.text + delta.text, token_ids=before.token_ids + delta.token_ids,
            logprobs=None if delta.logprobs is None else [*(before.logprobs or ()),
                                                          *delta.logprobs])
        return self._parser.push(delta)

    @property
    def answer(self) -> ChatOutput | None:
        """The answer so far; None before the first delta."""
        return None if self._raw is None else self._parser.answer(self._raw)

    def stop(self) -> None:
        """End the iteration after the step that runs now; a signal handler may call it."""
        self._stream.stop()

    def close(self) -> None:
        """Abort the answer if it is not finished. Harmless a second time."""
        self._stream.close()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
