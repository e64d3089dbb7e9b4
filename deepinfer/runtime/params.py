"""SamplingParams: what a caller asks for, checked when it is made."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.numerics.noise import stream
from deepinfer.runtime.grammar_spec import KINDS
from deepinfer.runtime.values import Frozen, brief, is_int, is_list, is_real, is_text, plain

CacheClass = Literal["chat", "agent"]

MAX_LOGPROBS = 20
MAX_N = 1024
_F32_MAX = float(np.finfo(np.float32).max)
_CHILD = 0x6E  # the purpose that keeps child seeds apart from the noise of tokens


def child_seed(seed: int, index: int) -> int:
    """The seed of completion ``index`` of a request with n > 1.

    Child 0 keeps the request's seed, so it equals the run with n = 1. For the others it is
    mix(mix(seed + 0x9E3779B97F4A7C15) ^ (110 << 32 | index)) modulo 2^64 with the ``mix`` of
    ``numerics.noise``: a pure function, so a child depends neither on n nor on its siblings.

    Args:
        seed: 0 .. 2^64 - 1. index: 0 .. n - 1.
    """
    return seed if index == 0 else int(stream(seed, index, _CHILD)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Immutable; checked when made.

    The result depends on these, the prompt, the weights and the Program, and on nothing else.
    Transforms of the logits come in this order: repetition, frequency and presence penalty,
    logit_bias, allowed ids and grammar, temperature, top_k, top_p, min_p. All are valid together
    and with drafts.

    Args:
        max_tokens: tokens to generate at most, >= 1; the context's end may come first.
        min_tokens: until so many are generated, end-of-text and stop ids cannot be chosen and a
            stop text does not count.
        temperature: 0 picks the likeliest token, 1 (the default) samples the model's distribution.
        top_k: sample among the k likeliest; 0 or -1 is off, as is k >= the vocabulary.
        top_p: sample among the likeliest whose probabilities reach top_p, in (0, 1]; 1 is off.
        min_p: drop tokens below min_p times the likeliest one's probability, in [0, 1]; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
            or output, in [0.01, 100]; 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: the same times how often they occur there, in [-2, 2].
        logit_bias: id -> number in [-100, 100] added to its logit. JSON's text keys are read as
            ids.
        allowed_token_ids: nothing else can be chosen, end-of-text included; None: all.
        seed: of the noise, 0 .. 2^64 - 1. The default is 0, not a random one.
        n: completions, 1 .. 1024; number i samples with ``child_seed(seed, i)``.
        stop: a text or several; generation ends before the first that appears in the output. One
            that spells a special token ends generation at that token.
        stop_token_ids: ids that end generation; the id is in token_ids, its text is not in text.
        ignore_eos: go on after the model's end-of-text ids.
        logprobs: report this many alternatives per token, 0..20 (0: the chosen token's only).
        prompt_logprobs: the same for the prompt's tokens; every row of the prompt is computed then.
        echo: text begins with the prompt's text.
        structured: what the output must match, one of {"json": schema or its text},
            {"regex": ...}, {"grammar": EBNF or Lark text}, {"choice": [texts]}. With "after": text
            besides, free text comes first and what follows that text, or special token, matches.
        draft_width: drafts to verify per step at most; None: the engine's. No output depends on it.
        cache_salt: prefixes are shared only between requests of equal salt.
        cache_class: how long a stored prefix is kept, "chat" or "agent".

    Raises:
        RequestError: names the field, the value and what was expected; also for an unknown field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    seed: int = 0
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    structured: Mapping[str, Any] | None = None
    draft_width: int | None = None
    cache_salt: str = ""
    cache_class: CacheClass = "chat"

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

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON holds them; ``of`` makes equal params of it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: plain(value) for name, value in values.items()}

    def child(self, index: int) -> SamplingParams:
        """The params of one of the n completions."""
        return replace(self, n=1, seed=child_seed(self.seed, index))

    def check_vocab(self, vocab_size: int) -> None:
        """Every id is below ``vocab_size``.

        Raises:
            RequestError: names the field and the id.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise RequestError(f"{name} holds id {brief(token)}, expected ids of "
                                       f"0..{vocab_size - 1}", where="SamplingParams",
                                       next="use ids of this model's vocabulary")

    def __post_init__(self) -> None:
        self._int("max_tokens", 1)
        self._int("min_tokens", 0, self.max_tokens)
        self._real("temperature", lambda t: 0 <= t <= _F32_MAX, "a finite number >= 0")
        self._int("top_k", -1)
        self._real("top_p", lambda p: 0 < p <= 1, "a number in (0, 1]")
        self._real("min_p", lambda p: 0 <= p <= 1, "a number in [0, 1]")
        # Bounds that keep every transformed logit finite: no penalty or bias can make a NaN.
        self._real("repetition_penalty", lambda r: 0.01 <= r <= 100, "a number in [0.01, 100]")
        self._real("presence_penalty", lambda r: -2 <= r <= 2, "a number in [-2, 2]")
        self._real("frequency_penalty", lambda r: -2 <= r <= 2, "a number in [-2, 2]")
        self._int("seed", 0, 2**64 - 1)
        self._int("n", 1, MAX_N)
        for name, high in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS),
                           ("draft_width", None)):
            if getattr(self, name) is not None:
                self._int(name, 0, high)
        for name in ("ignore_eos", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        self._ids("stop_token_ids")
        if self.allowed_token_ids is not None:
            self._ids("allowed_token_ids")
            self._set("allowed_token_ids", tuple(sorted(set(self.allowed_token_ids))))
            if not self.allowed_token_ids:
                raise _wrong("allowed_token_ids", [], "at least 1 id, or None for all")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not is_list(stop) or not all(map(is_text, stop)):
            raise _wrong("stop", self.stop, "a text or a list of texts, none of them empty")
        self._set("stop", tuple(stop))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.structured is not None:
            self._set("structured", _structured(self.structured))
        if self.cache_salt != "" and not is_text(self.cache_salt):
            raise _wrong("cache_salt", self.cache_salt, "a text")
        if self.cache_class not in ("chat", "agent"):
            raise _wrong("cache_class", self.cache_class, "'chat' or 'agent'")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _int(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not is_int(value) or value < low or (high is not None and value > high):
            limits = f">= {low}" if high is None else f"in {low}..{high}"
            raise _wrong(name, value, f"an int {limits}")
        self._set(name, int(value))

    def _real(self, name: str, allowed: Any, expected: str) -> None:
        value = getattr(self, name)
        # Comparisons are false for NaN, and exact for an int too large to be a float.
        if not is_real(value) or not allowed(value):
            raise _wrong(name, value, expected)
        self._set(name, float(value))

    def _ids(self, name: str) -> None:
        ids = getattr(self, name)
        if not is_list(ids) or not all(is_int(i) and i >= 0 for i in ids):
            raise _wrong(name, ids, "a list of token ids >= 0")
        self._set(name, tuple(int(i) for i in ids))


def _bias(given: Any) -> Frozen[int, float]:
    """Biases by ascending id."""
    expected = "a mapping of token ids >= 0 to numbers in [-100, 100]"
    if not isinstance(given, Mapping):
        raise _wrong("logit_bias", given, expected)
    made: dict[int, float] = {}
    for key, value in given.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        token = int(key) if digits else key
        if not is_int(token) or token < 0 or not is_real(value) or not -100 <= value <= 100:
            raise _wrong("logit_bias", {key: value}, expected)
        if int(token) in made:
            raise _wrong("logit_bias", given, f"id {token} once")
        made[int(token)] = float(value)
    return Frozen(dict(sorted(made.items())))


def _structured(given: Any) -> Frozen[str, Any]:
    """One kind and its source: a text, or for "choice" a tuple of them; a schema becomes text."""
    kinds = [k for k in given if k != "after"] if isinstance(given, Mapping) else []
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise _wrong("structured", given, f"a mapping with exactly one of {', '.join(KINDS)}, and "
                                          "perhaps 'after'")
    kind, source = kinds[0], given[kinds[0]]
    if kind == "choice":
        if not is_list(source) or not source or not all(map(is_text, source)):
            raise _wrong("structured.choice", source, "a list of texts, none of them empty")
        source = tuple(source)
    elif kind == "json":
        try:
            if isinstance(source, str):
                json.loads(source)
            else:
                source = json.dumps(plain(source), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("structured.json", source, f"a JSON schema or its text ({error})"
                         ) from None
    made = {name: given["after"] for name in given if name == "after"} | {kind: source}
    for name, text in made.items():
        if name != "choice" and not is_text(text):
            raise _wrong(f"structured.{name}", text, "a text that is not empty")
    return Frozen(made)


def _wrong(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{name} is {brief(value)}, expected {expected}", where="SamplingParams",
                        next=f"correct {name}")
