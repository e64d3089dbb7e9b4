"""How a chat is shown: on a terminal, as plain text, or as lines of JSON."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from deepinfer.api.chat_output import ChatDelta, ChatOutput
from deepinfer.commands.output import emit, emit_json, say, table
from deepinfer.commands.run import printable
from deepinfer.errors import DeepInferError


class View(Protocol):
    """Where a chat is shown."""

    def delta(self, delta: ChatDelta) -> None:
        """The answer grows."""

    def answered(self, prompt: str, answer: ChatOutput, seconds: float, stopped: bool) -> None:
        """The answer is done, or was stopped."""

    def failed(self, prompt: str, error: DeepInferError) -> None:
        """There is no answer."""

    def stats(self, stats: dict[str, Any]) -> None:
        """The engine's counts."""


class JsonView:
    """One JSON object a line for each prompt, when its answer is whole."""

    def delta(self, delta: ChatDelta) -> None:
        pass

    def answered(self, prompt: str, answer: ChatOutput, seconds: float, stopped: bool) -> None:
        raw = answer.raw
        self._emit({
            "prompt": prompt, "reasoning": answer.reasoning, "content": answer.content,
            "tool_calls": [{"id": c.id, "name": c.name, "arguments": c.arguments}
                           for c in answer.tool_calls],
            "finish_reason": raw.finish_reason, "stop_reason": raw.stop_reason,
            "usage": raw.usage.to_json(), "metrics": raw.metrics.to_json()})

    def failed(self, prompt: str, error: DeepInferError) -> None:
        self._emit({"prompt": prompt, "error": {"what": error.what, "where": error.where,
                                                "next": error.next}})

    def stats(self, stats: dict[str, Any]) -> None:
        self._emit({"stats": stats})

    def _emit(self, value: dict[str, Any]) -> None:
        emit_json(value)
        sys.stdout.flush()  # who wrote the prompt may be waiting for it


class TextView:
    """Answers on stdout as they grow. What the model thinks goes to stderr, so that stdout holds
    answers only; on a terminal it is dim and above the answer."""

    def __init__(self) -> None:
        self._thinking = False
        self._ends_line = True

    def delta(self, delta: ChatDelta) -> None:
        if delta.reasoning:
            self._thinking = True
            self._think(delta.reasoning)
        if delta.content:
            self._end_thinking()
            self._ends_line = delta.content.endswith("\n")
            self._write(delta.content)

    def answered(self, prompt: str, answer: ChatOutput, seconds: float, stopped: bool) -> None:
        self._end_thinking()
        if not self._ends_line or not answer.content:
            self._write("\n")
        self._ends_line = True
        for call in answer.tool_calls:
            self._write(f"{call.name}({call.arguments})\n")
        usage = answer.raw.usage
        say(f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
            f"{usage.completion_tokens} generated in {seconds:.2f} s, "
            + ("stopped" if stopped else f"ended by {answer.raw.finish_reason}"))

    def failed(self, prompt: str, error: DeepInferError) -> None:
        self._end_thinking()
        if not self._ends_line:
            self._write("\n")
        self._ends_line = True
        say(f"deepinfer: {error}")

    def stats(self, stats: dict[str, Any]) -> None:
        emit(table(list(stats.items())))
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _think(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            self._think("\n")


class TerminalView(TextView):
    """On a terminal: no generated control character steers it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console()

    def _write(self, text: str) -> None:
        super()._write(printable(text))

    def _think(self, text: str) -> None:
        # rich knows what the terminal can do, and NO_COLOR.
        self._console.out(printable(text), style="dim", end="", highlight=False)

    def _end_thinking(self) -> None:
        if self._thinking:
            self._think("\n")  # an empty line between the two
        super()._end_thinking()
