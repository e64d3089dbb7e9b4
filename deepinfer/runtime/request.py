"""Requests: what a caller asks for, what he gets back, and what the engine keeps meanwhile."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from deepinfer.errors import RequestError

FinishReason = Literal["stop", "length", "error"]
MAX_LOGPROBS = 20
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Immutable; checked when made.

    The result depends on these, the prompt, the weights and the Program, and on nothing else.

    Args:
        max_tokens: tokens to generate at most, >= 1; the context's end may come first.
        temperature: 0 picks the likeliest token, 1 (the default) samples the model's distribution.
        top_k: sample among the k likeliest; 0 or -1 is off.
        top_p: sample among the likeliest whose probabilities reach top_p, in (0, 1]; 1 is off.
        min_p: drop tokens below min_p times the likeliest one's probability, in [0, 1]; 0 is off.
        seed: of the noise, 0 .. 2^64 - 1. The default is 0, not a random one.
        stop: a text or several; generation ends before the first that appears in the output.
        stop_token_ids: ids that end generation; the id is in token_ids, its text is not in text.
        ignore_eos: go on after the model's end-of-text ids.
        min_tokens: stop rules are not looked at before this many tokens.
        logprobs: report this many alternatives per token, 0..20 (0: the chosen token's only).

    Raises:
        RequestError: names the field, the value and what was expected; also for an unknown field.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __new__(cls, **given: Any) -> SamplingParams:
        # dataclass's own __init__ would answer an unknown field with a bare TypeError.
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise RequestError(f"unknown field '{name}', expected one of {', '.join(known)}",
                                   where="SamplingParams",
                                   next=f"did you mean '{near[0]}'?" if near else "remove it")
        return object.__new__(cls)

    @staticmethod
    def of(given: SamplingParams | Mapping[str, Any]) -> SamplingParams:
        """The params themselves, or those that a mapping (a line of JSON, say) describes."""
        if isinstance(given, SamplingParams):
            return given
        if isinstance(given, Mapping):
            return SamplingParams(**{str(name): value for name, value in given.items()})
        raise _wrong("params", given, "SamplingParams or a mapping of its fields")

    def __post_init__(self) -> None:
        self._int("max_tokens", 1)
        self._real("temperature", lambda t: 0 <= t <= _F32_MAX, "a finite number >= 0")
        self._int("top_k", -1)
        self._real("top_p", lambda p: 0 < p <= 1, "a number in (0, 1]")
        self._real("min_p", lambda p: 0 <= p <= 1, "a number in [0, 1]")
        self._int("seed", 0, 2**64 - 1)
        self._int("min_tokens", 0, self.max_tokens)
        if self.logprobs is not None:
            self._int("logprobs", 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", self.ignore_eos, "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list(stop) or not all(isinstance(s, str) and s for s in stop):
            raise _wrong("stop", self.stop, "a text or a list of texts, none of them empty")
        ids = self.stop_token_ids
        if not _is_list(ids) or not all(is_int(i) and i >= 0 for i in ids):
            raise _wrong("stop_token_ids", ids, "a list of token ids >= 0")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))

    def _int(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not is_int(value) or value < low or (high is not None and value > high):
            limits = f">= {low}" if high is None else f"in {low}..{high}"
            raise _wrong(name, value, f"an int {limits}")
        object.__setattr__(self, name, int(value))

    def _real(self, name: str, allowed: Any, expected: str) -> None:
        value = getattr(self, name)
        # Comparisons are false for NaN, and exact for an int too large to be a float.
        if not isinstance(value, Real) or isinstance(value, bool) or not allowed(value):
            raise _wrong(name, value, expected)
        object.__setattr__(self, name, float(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_int(value: Any) -> bool:
    """An int of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _wrong(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{name} is {_brief(value)}, expected {expected}", where="SamplingParams",
                        next=f"correct {name}")


def check_prompt(token_ids: Any, vocab_size: int, longest: int) -> list[int]:
    """The prompt as a list of ints.

    Args:
        token_ids: a sequence or 1-d array of ids. vocab_size: ids are below it.
        longest: tokens allowed.

    Raises:
        RequestError: not ids, none, an id outside the vocabulary, or too many.
    """
    is_ids = isinstance(token_ids, np.ndarray) and token_ids.ndim == 1 or _is_list(token_ids)
    if not is_ids or not all(map(is_int, token_ids)):
        raise RequestError(f"prompt is {_brief(token_ids)}, expected a text or a list of token ids",
                           where="prompt", next="pass str or list[int]")
    ids = [int(i) for i in token_ids]
    if not ids:
        raise RequestError("the prompt is empty, expected at least 1 token", where="prompt",
                           next="pass a text or token ids; the begin-of-text id will do")
    for at, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {_brief(token)} is outside the vocabulary, expected "
                               f"0..{vocab_size - 1}", where=f"prompt, token {at}",
                               next="encode the prompt with this model's tokenizer")
    if len(ids) > longest:
        raise RequestError(f"the prompt has {len(ids)} tokens, expected at most {longest}",
                           where="prompt", next="shorten it or raise max_model_len")
    return ids


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no int of thousands of digits
        text = f"an {type(value).__name__} too long to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities where one token was chosen.

    They are those of the model itself: before temperature, filters and masks.

    Args:
        chosen: of the token that was chosen.
        top: (token id, logprob) of the likeliest ones, best first, ties by the lower id.
    """

    chosen: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request has given so far, or in all once ``finish_reason`` is set.

    Args:
        request_id: as given or assigned. prompt_token_ids: the prompt as the model saw it.
        text: of the output; while unfinished, without what may still become part of a stop text or
            of a character. "" where the model has no tokenizer.json.
        token_ids: the output, with the token that ended it.
        finish_reason: "stop", "length" (max_tokens or the context's end), "error", or None while
            unfinished. stop_reason: the stop text or id that ended it.
        error: why the request failed, if finish_reason is "error".
        usage: tokens. logprobs: one entry per output token, if asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: RequestError | None
    usage: Usage
    logprobs: list[TokenLogprobs] | None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @staticmethod
    def failed(request_id: str, error: RequestError, prompt: Sequence[int] = ()) -> RequestOutput:
        """The output of a request that was refused."""
        return RequestOutput(request_id, list(prompt), "", [], "error", None, error,
                             Usage(len(prompt), 0), None)


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine.

    Args:
        request_id: unique among the unfinished. params: how to sample.
        tokens: the prompt, then every chosen token. prompt_len: how many are the prompt's.
        max_len: tokens at which it ends for length.
        computed: positions whose rows have run; their state is in the caches.
        slot: its ring row; pages: its page table. Both empty while it waits.
    """

    request_id: str
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    max_len: int
    computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None

    @property
    def output(self) -> list[int]:
        """The tokens chosen so far."""
        return self.tokens[self.prompt_len:]

    @property
    def positions(self) -> int:
        """Rows it needs at most: the last token it chooses has none."""
        return self.max_len - 1
