"""Requests: what the engine keeps of each while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.masks import Array
from deepinfer.runtime.outputs import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    Usage,
)
from deepinfer.runtime.params import SamplingParams, child_seed
from deepinfer.runtime.sampler import Sampling
from deepinfer.runtime.text import OutputText, Text
from deepinfer.runtime.values import brief, is_int, is_list

__all__ = ["FinishReason", "Request", "RequestMetrics", "RequestOutput", "SamplingParams",
           "TokenLogprobs", "TokenMatcher", "Usage", "check_prompt", "child_seed", "is_int"]


class TokenMatcher(Protocol):
    """What a request needs of a grammar's state to commit a token."""

    def accept(self, token: int) -> Any:
        """Advance by a token; False or a RequestError: the grammar does not allow it."""

    @property
    def finished(self) -> bool:
        """Whether nothing can follow any more."""


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine.

    Args:
        request_id: unique among the unfinished. params: how to sample.
        tokens: the prompt, then every chosen token. prompt_len: how many are the prompt's.
        max_len: tokens at which it ends for length.
        computed: positions whose rows have run; their state is in the caches.
        slot: its ring row; pages: its page table. Both empty while it waits.
        vocab_size: ids there are; 0 where masks do not matter. eos: the model's end-of-text ids.
        index: which of n completions. arrival: its place in the queue.
        text: its growing text; None without a tokenizer. matcher: its grammar's state.
        drafts: tokens proposed after the last one, not committed. width: how many to verify.
        most_drafts: how many it may verify at most.
        window_floor: window attention before the replay cut sees nothing below this position.
        replay_floor: the same after the cut. keep_from: rows below it end at the cut.
        write_from: entries of positions below it are cached already.
        logprobs: of the output; prompt_logprobs: of the prompt's tokens so far, the first None.
        sampling: what the sampler reads of it. enders: ids that end it.
    """

    request_id: str
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    max_len: int
    computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    vocab_size: int = 0
    eos: frozenset[int] = frozenset()
    index: int = 0
    arrival: int = 0
    text: OutputText | None = None
    matcher: TokenMatcher | None = None
    drafts: list[int] = field(default_factory=list)
    width: int = 0
    most_drafts: int = 0
    window_floor: int = 0
    replay_floor: int = 0
    keep_from: int = 0
    write_from: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: DeepInferError | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    sampling: Sampling = field(init=False)
    enders: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        eos = frozenset() if self.params.ignore_eos else self.eos
        self.enders = eos.union(self.params.stop_token_ids)
        self.sampling = Sampling.of(self.params, self.tokens[:self.prompt_len], self.vocab_size,
                                    self.enders)
        self.sampling.add(self.output)

    @staticmethod
    def make(request_id: str, prompt_token_ids: Any, params: SamplingParams, *, vocab_size: int,
             eos: frozenset[int], max_model_len: int, text: Text | None = None,
             now: float = 0.0) -> Request:
        """A request of a prompt, checked.

        Args:
            prompt_token_ids: the prompt. vocab_size, eos, max_model_len: facts of the model.
            text: its tokenizer. now: seconds of the engine's clock.

        Raises:
            RequestError: it cannot be served; says why.
        """
        prompt = check_prompt(prompt_token_ids, vocab_size, max_model_len - 1)
        params.check_vocab(vocab_size)
        if text is None and (params.stop or params.echo):
            name, value = ("stop", params.stop) if params.stop else ("echo", params.echo)
            raise RequestError(f"{name} is {value!r}, expected none: the model has no "
                               "tokenizer.json", where="SamplingParams",
                               next="use stop_token_ids" if params.stop else "leave it out")
        shown = None if text is None else OutputText(text, params.stop,
                                                     prompt if params.echo else ())
        made = Request(request_id, params, prompt, len(prompt),
                       min(len(prompt) + params.max_tokens, max_model_len), vocab_size=vocab_size,
                       eos=eos, text=shown, metrics=RequestMetrics(arrival=now))
        made.sampling.masks.rows(0, 1, where=f"request {request_id}")
        return made

    @property
    def output(self) -> list[int]:
        """The tokens chosen so far."""
        return self.tokens[self.prompt_len:]

    @property
    def made(self) -> int:
        """How many tokens were chosen so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def positions(self) -> int:
        """Rows it needs at most: the last token it chooses has none."""
        return self.max_len - 1

    @property
    def decoding(self) -> bool:
        """Whether all that waits is the row of its last chosen token."""
        return self.made > 0 and self.computed == len(self.tokens) - 1

    @property
    def plain(self) -> bool:
        """Whether its tokens change nothing but its ids: no penalties, logprobs, stop texts or
        grammar."""
        return (self.sampling.counts is None and self.params.logprobs is None
                and self.matcher is None and (self.text is None or not self.text.watches))

    def restart(self) -> None:
        """Forget what its caches held: it was preempted. Tokens, logprobs and counts stay."""
        self.computed, self.drafts = 0, []
        self.metrics.preemptions += 1

    def mask_at(self, position: int, grammar: Array | None, step: int) -> Array | None:
        """The ids that may be chosen: those of its params and of its grammar.

        Args:
            position: absolute index of the token to be chosen. grammar: i32[words], the grammar's
                mask there. step: for the error.

        Returns:
            i32[words]; None: all.

        Raises:
            RequestError: none is left; it ends this request.
        """
        masks = self.sampling.masks.rows(position - self.prompt_len, 1, (grammar,),
                                         where=f"request {self.request_id}, step {step}")
        return masks[0] if masks else None

    def end(self, reason: FinishReason, stop_reason: str | int | None = None,
            error: DeepInferError | None = None) -> None:
        """Finish it."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def result(self) -> RequestOutput:
        """What it has given so far."""
        asked = self.params
        return RequestOutput(
            self.request_id, self.tokens[:self.prompt_len],
            "" if self.text is None else self.text.shown(self.finished),
            self.output, self.finish_reason, self.stop_reason, self.error,
            Usage(self.prompt_len, self.made, self.metrics.cached_tokens),
            None if asked.logprobs is None else list(self.logprobs),
            None if asked.prompt_logprobs is None else list(self.prompt_logprobs),
            index=self.index, metrics=self.metrics.copy())


def check_prompt(token_ids: Any, vocab_size: int, longest: int) -> list[int]:
    """The prompt as a list of ints.

    Args:
        token_ids: a sequence or 1-d array of ids. vocab_size: ids are below it.
        longest: tokens allowed.

    Raises:
        RequestError: not ids, none, an id outside the vocabulary, or too many.
    """
    is_ids = isinstance(token_ids, np.ndarray) and token_ids.ndim == 1 or is_list(token_ids)
    if not is_ids or not all(map(is_int, token_ids)):
        raise RequestError(f"prompt is {brief(token_ids)}, expected a text or a list of token ids",
                           where="prompt", next="pass str or list[int]")
    ids = [int(i) for i in token_ids]
    if not ids:
        raise RequestError("the prompt is empty, expected at least 1 token", where="prompt",
                           next="pass a text or token ids; the begin-of-text id will do")
    for at, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {brief(token)} is outside the vocabulary, expected "
                               f"0..{vocab_size - 1}", where=f"prompt, token {at}",
                               next="encode the prompt with this model's tokenizer")
    if len(ids) > longest:
        raise RequestError(f"the prompt has {len(ids)} tokens, expected at most {longest}",
                           where="prompt", next="shorten it or raise max_model_len")
    return ids
