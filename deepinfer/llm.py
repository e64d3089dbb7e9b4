"""LLM: the front door. Load a model, then generate, stream, chat or score."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.api.chat import ChatFormat, Messages
from deepinfer.api.chat_output import ChatOutput
from deepinfer.api.chat_stream import ChatStream
from deepinfer.api.completions import Completions, Stream
from deepinfer.api.delivery import Delivery
from deepinfer.api.load import load_engine
from deepinfer.api.progress import progress_bar
from deepinfer.api.prompts import Params, Prompt, encode_prompt, is_prompt, params_for_each
from deepinfer.api.settings import (
    DraftMode,
    EngineSettings,
    PrefixCacheMode,
    ReplayMode,
    Verification,
    check_count,
)
from deepinfer.errors import RequestError
from deepinfer.program import Program
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.outputs import RequestOutput
from deepinfer.runtime.params import SamplingParams
from deepinfer.settings import warn_unknown

if TYPE_CHECKING:
    from deepinfer.runtime.stats import EngineStats


class LLM:
    """A model ready to generate.

    Calls from several threads take turns, step by step: their requests share the batches, and no
    bit of a result depends on that.

    Args:
        model: the checkpoint directory.
        program: a Program or its directory; None: compile one, or take it from the cache.
        target: what to compile for and run on.
        num_threads: of the device; default: all cores. No result depends on it.
        max_model_len: tokens of a request, prompt and output; default: the model's context, or the
            given Program's.
        max_num_seqs: requests that run at once. max_num_batched_tokens: rows of one step. Both are
            at most what a given Program was compiled for.
        page_size: tokens per page of the compressed caches, even; default: 128, or the given
            Program's.
        cache_bytes: bound on the paged caches; default: all requests at full length.
        cache_weights: keep the weights on disk as the kernels read them; else they are packed anew,
            in memory, by every process.
        prefill_chunk, prefix_cache, cache_dir, cache_dir_bytes, snapshot_interval, replay,
            keep_tokens, draft, draft_width, verification, overlap: see ``EngineSettings``.
        progress: show bars on stderr; default: if it is a terminal.

    Raises:
        CheckpointError, ProgramError, RequestError, TargetError, ToolchainError: say what is wrong.
    """

    def __init__(self, model: str | Path, *, program: Program | str | Path | None = None,
                 target: str = "cpu", num_threads: int | None = None,
                 max_model_len: int | None = None, max_num_seqs: int = 64,
                 max_num_batched_tokens: int = 2048, page_size: int | None = None,
                 cache_bytes: int | None = None, cache_weights: bool = True,
                 prefill_chunk: int | None = None,
                 prefix_cache: PrefixCacheMode = "exact", cache_dir: str | Path | None = None,
                 cache_dir_bytes: int | None = None, snapshot_interval: int = 8,
                 replay: ReplayMode = "off",
                 keep_tokens: int | None = None, draft: DraftMode = "fixed",
                 draft_width: int | None = None, verification: Verification = "exact",
                 overlap: bool = True, progress: bool | None = None) -> None:
        warn_unknown()
        settings = EngineSettings(
            prefill_chunk=prefill_chunk, prefix_cache=prefix_cache, cache_dir=cache_dir,
            cache_dir_bytes=cache_dir_bytes, snapshot_interval=snapshot_interval, replay=replay,
            keep_tokens=keep_tokens, draft=draft, draft_width=draft_width,
            verification=verification, overlap=overlap)
        for name, value in (("num_threads", num_threads), ("cache_bytes", cache_bytes)):
            check_count(name, value, optional=True)
        sizes = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
                 "max_num_batched_tokens": max_num_batched_tokens, "page_size": page_size}
        show = sys.stderr.isatty() if progress is None else progress
        engine = load_engine(
            Path(model), settings,
            {name: value for name, value in sizes.items() if value is not None}, program=program,
            target=target, num_threads=num_threads, cache_bytes=cache_bytes,
            cache_weights=cache_weights, progress=show)
        self._attach(engine, Path(model), show)

    @staticmethod
    def of(engine: Engine, model: str | Path = "", *, progress: bool = False) -> LLM:
        """An LLM around an engine made by hand; closing it closes the engine.

        Args:
            model: the checkpoint directory, where there is one.
        """
        llm = object.__new__(LLM)
        llm._attach(engine, Path(model), progress)
        return llm

    def _attach(self, engine: Engine, model: Path, progress: bool) -> None:
        self.engine, self.model, self.progress = engine, model, progress
        self.delivery = Delivery(engine)
        self._chat: ChatFormat | None = None

    @property
    def program(self) -> Program:
        return self.engine.program

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. A text gets the begin-of-text id unless it is spelled out in it.

        Raises:
            RequestError: an empty text, one that is not Unicode, or a text for a model without
                tokenizer.json.
        """
        return encode_prompt(self.engine.text, prompt)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: Params | Sequence[Params] | None = None) -> list[RequestOutput]:
        """Generate for one prompt or for several at once.

        A prompt is a text or a list of token ids. One bad prompt given by itself raises; in a list
        of prompts it ends alone, as an output with finish_reason "error" and the RequestError.

        Args:
            prompts: a prompt, or a list of prompts.
            params: for all, or one for each; SamplingParams or a mapping of its fields. Equal
                params mean equal seeds: equal prompts then give equal outputs.

        Returns:
            An output for each prompt, in order. With n > 1 it is that of completion 0 and holds
            all of them in ``outputs``.

        Raises:
            RequestError: one prompt that cannot be served, no prompt, or not one params for each.
        """
        alone = is_prompt(prompts)
        several: list[Any] = [prompts] if alone else list(prompts)
        each = params_for_each(params, len(several))
        asked: list[Completions] = []
        ids: list[str] = []
        try:
            with self.delivery.turn:
                for prompt, wanted in zip(several, each, strict=True):
                    try:
                        asked.append(self._submit(prompt, SamplingParams.of(wanted), ids))
                    except RequestError as error:
                        if alone:
                            raise
                        asked.append(Completions.failed(self.engine.new_id(), error))
            self._run(asked)
        finally:  # only after an exception is anything left
            with self.delivery.turn:
                self.delivery.forget(ids)
        return [completions.result() for completions in asked]

    def _submit(self, prompt: Prompt, params: SamplingParams, ids: list[str]) -> Completions:
        completions = Completions(params.n)
        ids += self.delivery.submit(self.encode(prompt), params, completions.receive)
        return completions

    def _run(self, asked: Sequence[Completions]) -> None:
        """Step until all is finished, together with whoever else steps."""
        with progress_bar(self.progress and len(asked) > 1) as report:
            while True:
                with self.delivery.turn:
                    waiting = [x for x in asked if not x.finished]
                    if not waiting:
                        return
                    self.delivery.step()
                if report is not None:
                    report(f"requests, {sum(x.num_tokens for x in asked)} tokens",
                           len(asked) - len(waiting), len(asked))

    def stream(self, prompt: Prompt, params: Params | None = None) -> Stream:
        """Generate for one prompt, handing out what is new step by step.

        Returns:
            An iterator of RequestOutputs whose texts, joined, are the text that ``generate`` gives.
            Closing or dropping it early aborts the request.

        Raises:
            RequestError: the prompt cannot be served.
        """
        wanted = SamplingParams() if params is None else SamplingParams.of(params)
        return Stream(self.delivery, self.encode(prompt), wanted)

    def chat(self, messages: Messages, params: Params | None = None, *,
             thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None) -> ChatOutput:
        """Answer a conversation, rendered and parsed in the V4.1 format by deepseek-recipe.

        Args:
            messages: [{"role": "user", "content": "..."}, ...] as in OpenAI's Chat Completions;
                ``answer.message`` is what to append before the next user message.
            params: as for ``generate``; where they name no max_tokens, the answer may be as long
                as the recipe's default and the context allow.
            thinking: whether the model thinks before it answers; None: yes.
            tools: {"type": "function", "function": {"name", "description", "parameters"}}, ...
            chat_template_kwargs: reasoning_effort, response_format, tool_choice, as there. A
                response format is enforced, and needs thinking=False.

        Raises:
            RequestError: the conversation cannot be rendered or served.
            ToolchainError: deepseek-recipe is not installed.
            CheckpointError: the model's tokenizer lacks the format's tokens.
        """
        prompt = self.chat_format.render(messages, thinking=thinking, tools=tools,
                                         template=chat_template_kwargs)
        wanted = prompt.params(params, self.engine.max_model_len)
        return prompt.parse(self.generate(prompt.token_ids, wanted)[0])

    def stream_chat(self, messages: Messages, params: Params | None = None, *,
                    thinking: bool | None = None,
                    tools: Sequence[Mapping[str, Any]] | None = None,
                    chat_template_kwargs: Mapping[str, Any] | None = None) -> ChatStream:
        """``chat`` as an iterator of ChatDeltas; its ``answer`` is the ChatOutput so far."""
        prompt = self.chat_format.render(messages, thinking=thinking, tools=tools,
                                         template=chat_template_kwargs)
        wanted = prompt.params(params, self.engine.max_model_len)
        return ChatStream(prompt, self.stream(prompt.token_ids, wanted))

    @property
    def chat_format(self) -> ChatFormat:
        """The V4.1 prompt format with this model's tokenizer."""
        if self._chat is None:
            self._chat = ChatFormat(self.engine.text)
        return self._chat

    def score(self, prompt: Prompt, chunk: int | None = None) -> np.ndarray[Any, Any]:
        """The logits after every position of a text.

        Args:
            prompt: a text or token ids, up to max_model_len. chunk: rows of one step; no bit
                depends on it.

        Returns:
            f32[n, vocab_size]; row i is about the token after token i.

        Raises:
            RequestError: as ``generate`` for one prompt.
        """
        with self.delivery.turn:
            self.delivery.require_open()
            return self.engine.score(self.encode(prompt), chunk)

    def stats(self) -> EngineStats:
        """Counts of the engine since it was made."""
        with self.delivery.turn:
            self.delivery.require_open()
            return self.engine.stats()

    def close(self) -> None:
        """Abort what runs, in other threads too, and free the device. The LLM cannot be used
        afterwards; a second call does nothing."""
        with self.delivery.turn:
            self.delivery.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
