"""Sampling: the choice of a token from its logits, and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.functions import exp, log
from deepinfer.numerics.noise import gumbel, stream
from deepinfer.numerics.sums import LANE_SUM, lane_sum

Array = NDArray[Any]

SAMPLE = Order("V", "lane_sum, then serial", LANE_SUM,
               "mass that top_k kept: lane_sum over token ids; top_p: serial, descending logit; "
               "ties: the lower token id")
LOG_SOFTMAX = Order("V", "lane_sum", LANE_SUM, "ties: the lower token id")

_LOWEST = np.float32(-np.inf)


@op("logits:f32[Q,V], temperature:f32[Q], top_k:i32[Q], top_p:f32[Q], min_p:f32[Q], seed:u64[Q], "
    "position:i32[Q] -> token:i32[Q]", order=SAMPLE)
def sample(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, seed: Array,
           position: Array, *, purpose: int) -> Array:
    """Choose one token per row by Gumbel-max over what top-k, top-p and min-p keep.

    s = (logit - max) / temperature; token = argmax(s + noise(seed, position, purpose, token)).
    A token takes part if it passes all three filters, with e = exp(s):
    top_k: it is among the first k by descending logit; top_p: the e of the better ones add up to
    less than top_p * (sum of e over what top_k kept); min_p: e >= min_p (the best has e = 1).
    Tokens with a logit of -inf or NaN take no part; a row of only such gives token 0.

    Args:
        logits: after penalties, biases and masks. temperature: not above 0 picks the largest logit.
        top_k: 0, or V and more, is off. top_p: 1 and more is off; the best token always passes.
        min_p: 0 is off. seed: of the request. position: absolute index of the token being chosen.
        purpose: keeps the noise of different uses apart.
    Order: the mass is a lane_sum over ascending token ids, filtered tokens adding +0; top-p sums
        serially from the first rank. Ties in a rank or in the final argmax: the lower token id.
    Source: DESIGN §6.
    """
    columns = zip(temperature, top_k, top_p, min_p, seed, position, strict=True)
    chosen = [_choose(row, purpose, *each) for row, each in zip(logits, columns, strict=True)]
    return np.array(chosen, np.int32)


def _choose(x: Array, purpose: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any,
            seed: Any, position: Any) -> int:
    ids = np.flatnonzero(x > _LOWEST)
    if len(ids) == 0:
        return 0
    best = ids[np.argmax(x[ids])]
    if not temperature > 0:
        return int(best)
    top = x[best]
    # The best is 0 even where the difference has no value, as for two infinities.
    s = np.where(x == top, np.float32(0), (x - top) / temperature)
    kept = _kept(x, exp(s), top_k, top_p, min_p)
    score = np.where(kept, s + gumbel(stream(seed, position, purpose), np.arange(len(x))), _LOWEST)
    return int(np.argmax(score)) if kept.any() else int(best)


def _kept(x: Array, e: Array, top_k: Any, top_p: Any, min_p: Any) -> Array:
    """Which tokens pass the three filters; e is exp(s) of each."""
    kept = x > _LOWEST
    ids = np.flatnonzero(kept)
    ranked = ids[np.argsort(-x[ids], kind="stable")]
    if 0 < top_k < len(ids):
        ranked = ranked[:top_k]
        kept = _only(ranked, kept)
    if top_p < 1:
        goal = top_p * lane_sum(np.where(kept, e, np.float32(0)))
        better = np.add.accumulate(e[ranked], dtype=np.float32)  # serial: one running sum
        kept = _only(ranked[:1 + int(np.sum(better[:-1] < goal))], kept)
    kept &= e >= min_p
    return kept


def _only(ids: Array, like: Array) -> Array:
    mask = np.zeros_like(like)
    mask[ids] = True
    return mask


@op("logits:f32[Q,V], token:i32[Q] -> chosen:f32[Q], top_ids:i32[Q,k], top:f32[Q,k]",
    order=LOG_SOFTMAX)
def logprobs(logits: Array, token: Array, *, k: int) -> tuple[Array, Array, Array]:
    """Log-probabilities of the chosen token and of the k most likely ones.

    logprob = (logit - max) - log(sum(exp(logit - max))): of the raw logits, before temperature,
    penalties and masks.

    Args:
        logits: raw. token: a token id per row. k: how many of the best to return, at least 1.
    Returns: chosen; top_ids by descending logit, ties by ascending id, NaN as -inf; top, theirs.
    Order: the sum over V in 16 lanes, then the tree of ``lane_sum``.
    Source: DESIGN §6.
    """
    clean = np.where(np.isnan(logits), _LOWEST, logits)
    shifted = logits - clean.max(axis=1, keepdims=True)
    values = shifted - log(lane_sum(exp(shifted)))[:, None]
    top_ids = np.argsort(-clean, axis=1, kind="stable")[:, :k].astype(np.int32)
    chosen = np.take_along_axis(values, token[:, None], axis=1)[:, 0]
    return chosen, top_ids, np.take_along_axis(values, top_ids, axis=1)
