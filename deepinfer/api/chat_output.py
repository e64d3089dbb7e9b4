"""Answers: the model's text split into thinking, content and tool calls, by deepseek-recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer.runtime.outputs import RequestOutput

MODEL = "DeepSeek-V4.1-Flash"  # the name by which the recipe knows the format


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model wants made.

    Args:
        id: "call_N", N counting the calls of the conversation: the same in every run.
        name: of the tool. arguments: JSON text of an object, as the model wrote it; cut short
            where the model was.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What an answer has got since the delta before.

    Args:
        reasoning, content: new text of the thinking and of the answer.
        output: the delta of the raw output that brought it; its finish_reason is set on the last.
    """

    reasoning: str
    content: str
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """An answer.

    Args:
        reasoning: what the model thought, without its marks; None with thinking off.
        content: the answer's text. tool_calls: the tools it wants called.
        raw: the output with tokens, usage, finish_reason and metrics.
        choices: for n > 1 all answers, this one first.
    """

    reasoning: str | None
    content: str
    tool_calls: list[ToolCall]
    raw: RequestOutput
    choices: list[ChatOutput] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to go on with: ``messages + [output.message]``."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls]
        return made


class ChatParser:
    """Splits an answer into thinking, content and tool calls while it grows.

    Args:
        recipe: the deepseek_recipe module. request: the conversation as it converted it.
        earlier: tool calls of the conversation so far.
    """

    def __init__(self, recipe: Any, request: Any, earlier: int) -> None:
        self._recipe, self._earlier = recipe, earlier
        self._thinking = bool(request.conversation.thinking_mode)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", MODEL)
        self._stream = recipe.StreamProcessor(generator, request.parsing_options)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[list[str]] = []  # name and arguments

    def push(self, delta: RequestOutput) -> ChatDelta:
        """Take the next delta of the output; a last one ends the parsing."""
        chunk, reasons = self._recipe.InferenceChunk, self._recipe.InferenceFinishReason
        events = []
        if delta.text:
            events += self._stream.push(chunk.text(delta.text, len(delta.token_ids)))
        if delta.finished:
            reason = reasons.Length if delta.finish_reason == "length" else reasons.Stop
            events += self._stream.push(chunk.finish(reason))
        reasoning, content = "", ""
        for event in events:
            for choice in json.loads(event.to_json())["choices"]:
                found = choice["delta"]
                reasoning += found.get("reasoning_content") or ""
                content += found.get("content") or ""
                for call in found.get("tool_calls") or ():
                    self._add_call(call)
        self._reasoning.append(reasoning)
        self._content.append(content)
        return ChatDelta(reasoning, content, delta)

    def _add_call(self, call: Mapping[str, Any]) -> None:
        while len(self._calls) <= call["index"]:
            self._calls.append(["", ""])
        function = call["function"]
        self._calls[call["index"]][0] += function.get("name") or ""
        self._calls[call["index"]][1] += function.get("arguments") or ""

    def answer(self, raw: RequestOutput) -> ChatOutput:
        """The answer so far.

        Args:
            raw: the whole output.
        """
        # The recipe's own ids are random.
        calls = [ToolCall(f"call_{self._earlier + i}", name, arguments)
                 for i, (name, arguments) in enumerate(self._calls)]
        return ChatOutput("".join(self._reasoning) if self._thinking else None,
                          "".join(self._content), calls, raw)
