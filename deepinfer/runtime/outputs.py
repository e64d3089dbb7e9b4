"""What a caller gets back: outputs, logprobs, usage and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepinfer.errors import DeepInferError
from deepinfer.runtime.draft import AcceptStats

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Args:
        prompt_tokens: of the prompt. completion_tokens: generated, with the one that ended it.
        cached_tokens: of the prompt's, taken from the prefix cache instead of computed. Not
            compared: it says how a result came about, not what it is.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(default=0, compare=False)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.total_tokens, "cached_tokens": self.cached_tokens}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities where one token was chosen.

    They are those of the model itself: before temperature, filters, penalties and masks. So they
    are finite also for tokens that a mask forbids, unless the model's own logit is infinite.

    Args:
        chosen: of the token that was chosen, or that stands in the prompt.
        top: (token id, logprob) of the likeliest ones, best first, ties by the lower id.
    """

    chosen: float
    top: list[tuple[int, float]]

    def to_json(self, token: int) -> dict[str, Any]:
        """JSON has no infinities and no NaN: such a logprob is null."""
        return {"token_id": token, "logprob": _finite(self.chosen),
                "top": [[i, _finite(x)] for i, x in self.top]}


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, and what speculation brought it. Bits depend on none.

    Args:
        arrival: seconds of the engine's monotonic clock when it was added.
        admitted: when it first ran; first_token, last_token: when those were committed.
        tokens: committed so far. steps: steps it had rows in.
        drafts: verified and accepted, by position in the draft block.
        cached_tokens: prompt tokens taken from the prefix cache. preemptions: how often it lost its
            state and was computed again.
    """

    arrival: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    steps: int = 0
    drafts: AcceptStats = field(default_factory=AcceptStats)
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first step."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def inter_token_seconds(self) -> float | None:
        """Mean time between tokens after the first; None before there are two."""
        if self.first_token is None or self.last_token is None or self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    def add_tokens(self, count: int, now: float) -> None:
        """Count tokens that a step committed."""
        if count:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
            self.tokens += count

    def copy(self) -> RequestMetrics:
        """As it is now."""
        return replace(self, drafts=self.drafts.copy())

    def to_json(self) -> dict[str, Any]:
        return {"queue_seconds": self.queue_seconds,
                "first_token_seconds": self.first_token_seconds,
                "inter_token_seconds": self.inter_token_seconds, "steps": self.steps,
                "drafted": list(self.drafts.drafted), "accepted": list(self.drafts.accepted),
                "cached_tokens": self.cached_tokens, "preemptions": self.preemptions}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request has given so far, or in all once ``finish_reason`` is set.

    Args:
        request_id: as given or assigned. prompt_token_ids: the prompt as the model saw it.
        text: of the output, after the prompt's if ``echo``; while unfinished, without what may
            still become part of a stop text or of a character, so it only ever grows. "" where the
            model has no tokenizer.json.
        token_ids: the output, with the token that ended it.
        finish_reason: "stop", "length" (max_tokens or the context's end), "abort", "error", or
            None while unfinished. stop_reason: the stop text or id that ended it.
        error: why the request failed, if finish_reason is "error".
        usage: tokens. logprobs: one entry per output token, if asked for.
        prompt_logprobs: one entry per prompt token computed so far, if asked for; the first is None
            because nothing comes before it.
        index: which of the n completions. outputs: for n > 1, on the output of the whole request:
            all completions by index; the other fields are then those of the first.
        metrics: times and counts; not compared.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: DeepInferError | None
    usage: Usage
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    index: int = 0
    outputs: tuple[RequestOutput, ...] = ()
    metrics: RequestMetrics = field(default_factory=RequestMetrics, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None and all(o.finished for o in self.outputs)

    @staticmethod
    def failed(request_id: str, error: DeepInferError, prompt: Sequence[int] = (), index: int = 0
               ) -> RequestOutput:
        """The output of a request that was refused."""
        return RequestOutput(request_id, list(prompt), "", [], "error", None, error,
                             Usage(len(prompt), 0), None, index=index)

    @staticmethod
    def group(request_id: str, children: Sequence[RequestOutput]) -> RequestOutput:
        """The output of a request with n > 1.

        Usage counts the prompt once and all completions; it is finished when they all are.

        Args:
            children: the outputs of its completions, in any order.
        """
        ordered = tuple(sorted(children, key=lambda o: o.index))
        first = ordered[0]
        made = sum(o.usage.completion_tokens for o in ordered)
        return replace(first, request_id=request_id, outputs=ordered,
                       usage=replace(first.usage, completion_tokens=made))

    def to_json(self) -> dict[str, Any]:
        """The output as valid JSON: logprobs that are not finite are null, errors are texts."""
        made: dict[str, Any] = {
            "request_id": self.request_id, "index": self.index,
            "prompt_token_ids": list(self.prompt_token_ids), "text": self.text,
            "token_ids": list(self.token_ids), "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": None if self.error is None else {
                "what": self.error.what, "where": self.error.where, "next": self.error.next},
            "usage": self.usage.to_json(), "metrics": self.metrics.to_json()}
        if self.logprobs is not None:
            made["logprobs"] = _logprobs(self.token_ids, self.logprobs)
        if self.prompt_logprobs is not None:
            made["prompt_logprobs"] = _logprobs(self.prompt_token_ids, self.prompt_logprobs)
        if self.outputs:
            made["outputs"] = [o.to_json() for o in self.outputs]
        return made


def _logprobs(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
              ) -> list[dict[str, Any] | None]:
    # zip stops at the shorter: a running request has not seen all of its prompt yet.
    return [None if p is None else p.to_json(t) for t, p in zip(tokens, logprobs, strict=False)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
