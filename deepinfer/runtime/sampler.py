"""Sampling from the runtime's side: fill the inputs of the compiled sampler, read its outputs.

The choice itself (penalties, masks, temperature, filters, noise, argmax, logprobs) is compiled into
the Program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from deepinfer.runtime.counts import TokenCounts, split_table
from deepinfer.runtime.masks import TokenMasks, mask_words
from deepinfer.runtime.outputs import TokenLogprobs
from deepinfer.runtime.params import SamplingParams

Array = np.ndarray[Any, Any]
_I32_MAX = 2**31 - 1
_NO_ENTRIES = np.zeros((4, 0), np.int32)
_SHARED = ("adjust_ids", "adjust_counts", "adjust_seen", "adjust_bias")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """What the sampler reads of one request at every step, made once.

    Args:
        floats: the values named in ``_FLOATS``. top_k: 0 is off. seed: of the noise.
        counts: entries of penalties and biases; None: there are none.
        masks: ids that its params allow.
        penalises: whether an output token changes the logits of later ones.
    """

    floats: tuple[float, ...]
    top_k: int
    seed: int
    counts: TokenCounts | None
    masks: TokenMasks
    penalises: bool

    @staticmethod
    def of(params: SamplingParams, prompt: Sequence[int] = (), vocab_size: int = 0,
           enders: Collection[int] = ()) -> Sampling:
        """Of a request.

        Args:
            params: its parameters. prompt: its token ids. vocab_size: ids there are.
            enders: ids that end it.
        """
        repetition = params.repetition_penalty != 1
        output = params.presence_penalty != 0 or params.frequency_penalty != 0
        counts = None
        if repetition or output or params.logit_bias:
            counts = TokenCounts(prompt, params.logit_bias, repetition=repetition, output=output)
        return Sampling(
            (params.temperature, params.top_p, params.min_p, params.repetition_penalty,
             params.presence_penalty, params.frequency_penalty),
            min(max(params.top_k, 0), _I32_MAX), params.seed, counts,
            TokenMasks(vocab_size, params.allowed_token_ids, enders, params.min_tokens),
            repetition or output)

    def add(self, tokens: Iterable[int]) -> None:
        """Count committed output tokens."""
        if self.counts is not None:
            self.counts.add(tokens)


# A row whose token is forced needs no choice: this is the cheapest one.
_FORCED = Sampling.of(SamplingParams(temperature=0))


class SampledRequest(Protocol):
    """What the sampler needs of a request."""

    sampling: Sampling
    prompt_len: int
    tokens: list[int]


@dataclass(slots=True)
class SampleRow:
    """A row after which a token is chosen.

    Args:
        request: whose; only its committed tokens are in its counts.
        position: absolute index of the token that is chosen.
        recent: drafts before it in its block; penalties count them as output.
        mask: allowed ids, everything included (``Request.mask_at``); None: what the request's own
            allowed_token_ids and min_tokens leave.
        forced: >= 0: this token is taken, whatever the rest says.
    """

    request: SampledRequest
    position: int
    recent: Sequence[int] = ()
    mask: Array | None = None
    forced: int = -1


def sampling_inputs(rows: Sequence[SampleRow], vocab_size: int, width: int) -> dict[str, Array]:
    """The sampler's inputs of a target phase.

    Noise is keyed by (seed, position), so a row's depends on nothing else in the step.

    Args:
        rows: in the order of the sampled rows. vocab_size: ids there are.
        width: drafts of a request at most; ``recent`` is this wide, at least 1.

    Returns:
        By sampled row: temperature, top_p, min_p, repetition, presence, frequency f32[Q]; top_k
        i32[Q] (0 is off), seed u64[Q], sample_position i32[Q], adjust_spans i32[Q,2], recent
        i32[Q,width] (then -1), mask_row i32[Q] (-1: all are allowed), forced i32[Q] (-1: none).
        Shared by rows: adjust_ids, adjust_counts i32[E], adjust_seen u8[E], adjust_bias f32[E];
        masks i32[M, ceil(V/32)].
    """
    known: dict[int, int] = {}
    samplings: list[Sampling] = []
    index: list[int] = []
    recent = np.full((len(rows), max(1, width)), -1, np.int32)
    stack = _Stack()
    # This loop runs for every row of every step: no call that a plain row does not need.
    for row in rows:
        sampling = row.request.sampling if row.forced < 0 else _FORCED
        at = known.get(id(sampling))
        if at is None:
            at = known[id(sampling)] = len(samplings)
            samplings.append(sampling)
        index.append(at)
        if row.recent and sampling.penalises:
            recent[len(index) - 1, :len(row.recent)] = row.recent
        mask = row.mask if row.forced < 0 else None
        if mask is None and sampling.masks.any:
            mask = sampling.masks.at(row.position - row.request.prompt_len)
        stack.add(mask)
    made = _by_request(tuple(samplings))
    spread = np.array(index, np.int64)
    made = {name: values if name in _SHARED else values[spread] for name, values in made.items()}
    return {
        **made,
        "sample_position": np.array([row.position for row in rows], np.int32),
        "recent": recent,
        "forced": np.array([row.forced for row in rows], np.int32),
        "mask_row": stack.rows(), "masks": stack.masks(vocab_size),
    }


def draft_sampling_inputs(drafting: Sequence[SampledRequest], lengths: Array, block: int,
                          masks: Mapping[int, Array], vocab_size: int) -> dict[str, Array]:
    """The sampler's inputs of the draft phase, by drafting request.

    Args:
        drafting: requests. lengths: i32[D], tokens of each; its first draft comes after them.
        block: drafts of each. masks: what each may draft first, by index into ``drafting``; without
            one, and for later drafts, its own allowed_token_ids and min_tokens.
        vocab_size: ids there are.

    Returns:
        As ``sampling_inputs`` with D requests for Q rows, but sample_position.k and mask_row.k
        i32[D] for each k below ``block``, and neither recent (the phase knows its drafts) nor
        forced.
    """
    samplings = tuple(request.sampling for request in drafting)
    positions = lengths + np.arange(block, dtype=np.int32)[:, None]
    made = {f"sample_position.{k}": positions[k] for k in range(block)}
    if not masks and not any(s.masks.any for s in samplings):
        return made | _by_request(samplings) | _unmasked(len(drafting), block, vocab_size)
    stack = _Stack()
    for k in range(block):
        own = [request.sampling.masks.at(length - request.prompt_len + k)
               for request, length in zip(drafting, lengths.tolist(), strict=True)]
        if k == 0:
            own = [masks.get(i, mask) for i, mask in enumerate(own)]
        for mask in own:
            stack.add(mask)
        made[f"mask_row.{k}"] = stack.rows()
    return made | _by_request(samplings) | {"masks": stack.masks(vocab_size)}


@lru_cache(maxsize=64)
def _unmasked(requests: int, block: int, vocab_size: int) -> dict[str, Array]:
    """No draft has a mask."""
    none = np.full(requests, -1, np.int32)
    return {f"mask_row.{k}": none for k in range(block)} | {"masks": _Stack().masks(vocab_size)}


def _by_request(samplings: tuple[Sampling, ...]) -> dict[str, Array]:
    """What depends on the request alone, and the entries of all of them, each once."""
    return (_unchanging if all(s.counts is None for s in samplings) else _made)(samplings)


@lru_cache(maxsize=64)
def _unchanging(samplings: tuple[Sampling, ...]) -> dict[str, Array]:
    """Without entries nothing changes while the same requests run."""
    return _made(samplings)


def _made(samplings: Sequence[Sampling]) -> dict[str, Array]:
    floats = np.array([s.floats for s in samplings], np.float32).reshape(-1, len(_FLOATS))
    tables = [_NO_ENTRIES if s.counts is None else s.counts.table for s in samplings]
    ends = np.cumsum([table.shape[1] for table in tables], dtype=np.int32)
    begins = np.concatenate([np.zeros(1, np.int32), ends])[:len(ends)]
    entries = split_table(np.concatenate([_NO_ENTRIES, *tables], axis=1))
    return {
        **dict(zip(_FLOATS, np.ascontiguousarray(floats.T), strict=True)),
        "top_k": np.array([s.top_k for s in samplings], np.int32),
        "seed": np.array([s.seed for s in samplings], np.uint64),
        "adjust_spans": np.stack([begins, ends], axis=1),
        **dict(zip(_SHARED, entries, strict=True)),
    }


class _Stack:
    """The masks of a step, each once, and which row has which."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._masks: list[Array] = []
        self._rows: list[int] = []

    def add(self, mask: Array | None) -> None:
        """The next row's mask; None: all ids are allowed."""
        if mask is None:
            self._rows.append(-1)
            return
        at = self._at.setdefault(id(mask), len(self._masks))
        if at == len(self._masks):
            self._masks.append(mask)
        self._rows.append(at)

    def rows(self) -> Array:
        """i32: where the mask of each row added since the last call lies, -1 for none."""
        rows, self._rows = self._rows, []
        return np.array(rows, np.int32)

    def masks(self, vocab_size: int) -> Array:
        """i32[M, words]."""
        joined = np.concatenate([np.zeros(0, np.int32), *self._masks])
        return joined.reshape(len(self._masks), mask_words(vocab_size))


@dataclass(slots=True)  # not frozen: that takes longer to make, and the device waits
class Sampled:
    """The sampler's outputs of one step, by sampled row.

    Args:
        tokens: i32[Q]. chosen: f32[Q], their logprobs. top_ids, top: [Q,k], the best ones'.
        finite: the logits of all rows are known to be finite.
    """

    tokens: Array
    chosen: Array
    top_ids: Array
    top: Array
    finite: bool = False

    def not_finite(self, row: int) -> bool:
        """Whether the row's logits were not all finite: one NaN makes the log-sum NaN."""
        return not math.isfinite(self.chosen[row])

    def logprobs(self, row: int, count: int) -> TokenLogprobs:
        """The row's logprobs with the best ``count`` alternatives."""
        best = zip(self.top_ids[row, :count].tolist(), self.top[row, :count].tolist(), strict=True)
        return TokenLogprobs(float(self.chosen[row]), list(best))
