"""Chat: messages to a prompt in the V4.1 format, and the model's text back to an answer.

deepseek-recipe, DeepSeek's own renderer and parser, does both. It is an extra:
``pip install 'deepinfer-compiler[chat]'``. Source: spec §7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepinfer.api.chat_output import MODEL, ChatOutput, ChatParser
from deepinfer.errors import CheckpointError, RequestError, ToolchainError
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.text import Text

Messages = Sequence[Mapping[str, Any]]
_TEMPLATE = ("reasoning_effort", "response_format", "tool_choice")
_MARKS = ("ThinkingStart", "ThinkingEnd", "Dsml")
THINKING_END = "</think>"  # as spelled in the tokenizer
_TOKENS = ("Bos", "Eos", "User", "Assistant", "System", *_MARKS)


class ChatFormat:
    """The V4.1 prompt format with a model's tokenizer.

    Args:
        text: the tokenizer; it must hold the format's tokens.

    Raises:
        ToolchainError: deepseek-recipe is not installed.
        CheckpointError: the model has no tokenizer, or one without the format's tokens.
    """

    def __init__(self, text: Text | None) -> None:
        self._recipe = recipe = import_recipe()
        if text is None:
            raise CheckpointError("the model has no tokenizer.json, expected one with the tokens "
                                  "of the V4.1 prompt format", where="chat",
                                  next="use generate with token ids")
        added = text.tokenizer.get_added_tokens_decoder().values()
        special = {token.content: token.special for token in added}
        for kind in _TOKENS:
            token = getattr(recipe.SpecialToken, kind).default_str()
            if token not in special or (special[token] and kind in _MARKS):
                found = "is marked special there" if token in special else "is not in it"
                raise CheckpointError(
                    f"the token '{token}' {found}, expected an added token" + (
                        " whose text is part of the output" if kind in _MARKS else ""),
                    where="tokenizer.json", next="use a model of the V4.1 prompt format")
        tokenizer = recipe.Tokenizer.from_str(text.tokenizer.to_str())
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)

    def render(self, messages: Messages, *, thinking: bool | None = None,
               tools: Sequence[Mapping[str, Any]] | None = None,
               template: Mapping[str, Any] | None = None) -> ChatPrompt:
        """The prompt of a conversation.

        Args:
            messages: as in OpenAI's Chat Completions: {"role": "user", "content": "..."}.
            thinking: whether the model thinks before it answers; None: yes.
            tools: {"type": "function", "function": {"name", "description", "parameters"}}.
            template: reasoning_effort, response_format, tool_choice, as in Chat Completions.

        Raises:
            RequestError: names what is wrong with them.
        """
        body: dict[str, Any] = {"model": MODEL, "messages": _plain_messages(messages)}
        if thinking is not None:
            if not isinstance(thinking, bool):
                raise _wrong(f"thinking is {thinking!r}, expected True, False or None")
            body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        for name, value in (template or {}).items():
            if name not in _TEMPLATE:
                raise _wrong(f"chat_template_kwargs holds '{name}', expected some of "
                             f"{', '.join(_TEMPLATE)}")
            body[name] = value
        try:
            request = self._recipe.ChatCompletionRequest(body).convert(
                self._recipe.ConversionOptions())
            rendered = self._encoding.render_conversation(request.conversation)
            if rendered.image_sources:
                raise _wrong("a message holds an image, expected text: image input is not "
                             "supported")
            ids = list(self._encoding.encode(request.conversation))
        except (self._recipe.ConversionError, ValueError, TypeError) as error:
            raise _wrong(f"the conversation cannot be rendered: {error}") from None
        earlier = sum(len(m.get("tool_calls") or ()) for m in body["messages"])
        return ChatPrompt(self._recipe, request, ids, rendered.prompt, earlier)


class ChatPrompt:
    """A rendered conversation, ready to be answered.

    Attributes:
        token_ids: the prompt. text: the same as text. thinking: whether it opens the thinking.
    """

    def __init__(self, recipe: Any, request: Any, token_ids: list[int], text: str, earlier: int
                 ) -> None:
        self._recipe, self._request, self._earlier = recipe, request, earlier
        self.token_ids, self.text = token_ids, text
        self.thinking = bool(request.conversation.thinking_mode)

    def params(self, given: SamplingParams | Mapping[str, Any] | None, max_model_len: int
               ) -> SamplingParams:
        """The params of the answer: max_tokens where none is given, and the response format.

        Args:
            given: what the caller wants; a mapping may leave out max_tokens, and the answer may
                then be as long as the recipe's default and the context allow.

        Raises:
            RequestError: a response format that cannot be enforced, or echo.
        """
        if given is None or isinstance(given, Mapping):
            given = dict(given or {})
            room = max(1, max_model_len - len(self.token_ids))
            if len(self.token_ids) < max_model_len:
                room = self._request.resolve_max_tokens(len(self.token_ids), max_model_len)
            given.setdefault("max_tokens", room)
        params = SamplingParams.of(given)
        if params.echo:
            raise _wrong("echo is True, expected False: an answer does not hold its prompt")
        structured = self._structured()
        if structured is None or params.structured is not None:
            return params
        after = {"after": THINKING_END} if self.thinking else {}
        return replace(params, structured=structured | after)

    def _structured(self) -> dict[str, Any] | None:
        """What the response format demands of the output. Tool calls are asked for in the prompt,
        not enforced."""
        constraint = self._request.inference_options.output_constraint
        if constraint is None or constraint.kind not in ("json", "regex"):
            return None
        return {constraint.kind: constraint.schema or '{"type": "object"}'}

    def parser(self) -> ChatParser:
        """A parser of one answer to this prompt."""
        return ChatParser(self._recipe, self._request, self._earlier)

    def parse(self, output: RequestOutput) -> ChatOutput:
        """The answer that a finished output holds; with n > 1, all of them."""
        if output.outputs:
            choices = [self.parse(child) for child in output.outputs]
            return replace(choices[0], raw=output, choices=choices)
        parser = self.parser()
        parser.push(output)
        return parser.answer(output)


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not all(
            isinstance(message, Mapping) for message in messages):
        raise _wrong(f"messages is a {type(messages).__name__}, expected a list of mappings like "
                     '{"role": "user", "content": "..."}')
    return [dict(message) for message in messages]


def _wrong(what: str) -> RequestError:
    return RequestError(what, where="chat", next="correct the arguments of the call")


def import_recipe() -> Any:
    """The deepseek_recipe module.

    Raises:
        ToolchainError: it is not installed.
    """
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ToolchainError(f"chat needs deepseek-recipe 0.2, which cannot be imported: {error}",
                             where="the extra 'chat' of deepinfer-compiler",
                             next="pip install 'deepinfer-compiler[chat]'") from None
    return deepseek_recipe
