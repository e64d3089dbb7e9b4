"""Rejection sampling of drafts: optional rules that keep the target's distribution, not its bits.

The default rule (``draft.accept``) gives the very tokens that the target alone would have given.
These two accept a little more and give tokens of the same *distribution* instead: above temperature
0 the output depends on where draft blocks began and ended, so on width, load and preemption. The
same seed with the same drafts in the same blocks gives the same tokens; greedy requests always get
the target's own.

All arithmetic is float64 in a fixed order on what the compiled filters keep. Randomness is keyed
noise of ``numerics.noise`` under purposes of its own (the Program's sampler has purpose 0):
ACCEPT (seed, position of the block's first draft; token id = index of the draft), RESIDUAL (seed,
position of the token), and DRAFT, from which ``draft_seed`` makes the seed that drafts are sampled
with: independent of all other noise, and new in every block, so that no draft is drawn again with
noise an earlier verdict has looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.numerics.functions import exp, log
from deepinfer.numerics.noise import gumbel, stream, uniform
from deepinfer.numerics.sums import lane_sum
from deepinfer.runtime.draft import accept

Array = NDArray[Any]
F64 = NDArray[np.float64]
Method = Literal["rejection", "block"]
ACCEPT, RESIDUAL, DRAFT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Filters:
    """What shapes a distribution after penalties and masks; as the compiled sampler takes them.

    Args:
        temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return not np.float32(self.temperature) > 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """``accepted`` drafts stand; ``token`` comes after them."""

    accepted: int
    token: int


def verify(drafts: Sequence[int], p_logits: Array, q_logits: Array, filters: Filters, *, seed: int,
           position: int, method: Method) -> Verdict:
    """Judge the drafts of one request and choose the token after the accepted ones.

    Args:
        drafts: the verified ones, sampled from q with ``draft_seed``.
        p_logits: f32[drafts + 1, V] of the target, after penalties, biases and masks.
        q_logits: f32[drafts, V] of the draft, likewise. A drafter that samples nothing has all its
            mass on the draft: 0 there and -inf elsewhere.
        filters: of the request, applied to both. seed: of the request.
        position: absolute index of the first draft.
        method: "rejection" judges draft by draft, "block" all prefixes together, which accepts at
            least as many on average.

    Source: spec §5.4.
    """
    if filters.greedy:
        chosen = [best(row) for row in p_logits]
        count = accept(drafts, chosen)
        return Verdict(count, chosen[count])
    p, q = distributions(p_logits, filters), distributions(q_logits, filters)
    chances = CHANCES[method](drafts, p, q)
    draws = uniform(stream(seed, position, ACCEPT), np.arange(len(drafts)))
    count = COUNTS[method](chances, draws)
    return Verdict(count, choose(after(drafts, p, q, count, method), seed, position + count))


def draft_seed(seed: int, position: int) -> int:
    """The seed that a block of drafts is sampled with under these rules.

    Args:
        seed: of the request. position: absolute index of the block's first draft.
    """
    return int(stream(seed, position, DRAFT)[0])


def best(logits: Array) -> int:
    """The largest logit's token, the lower id of equals; 0 if none is above -inf."""
    ids = np.flatnonzero(logits > -np.inf)
    return int(ids[np.argmax(logits[ids])]) if len(ids) else 0


def distributions(logits: Array, filters: Filters) -> F64:
    """The probabilities f64[Q,V] that the compiled sampler draws from.

    The filters keep exactly what the op ``sample`` keeps: same fp32 sums, same ties. A row without
    a logit above -inf has all its mass on token 0, which that op gives.

    Args:
        logits: f32[Q,V]. filters: with a temperature above 0.
    Order: exp(s) in fp32, each a float64 share of their serial float64 sum over ascending ids.
    """
    made = np.zeros(logits.shape, np.float64)
    for row, x in zip(made, logits, strict=True):
        weights = _kept(np.asarray(x, np.float32), filters).astype(np.float64)
        total = _serial(weights)
        row[...] = weights / total if total > 0 else _one_hot(best(x), len(x))
    return made


def _kept(x: Array, filters: Filters) -> Array:
    """exp((x - max) / temperature) of the tokens that pass all filters, 0 of the others."""
    ids = np.flatnonzero(x > -np.inf)
    weights = np.zeros(len(x), np.float32)
    if not len(ids):
        return weights
    ranked = ids[np.argsort(-x[ids], kind="stable")]
    top = x[ranked[0]]
    with np.errstate(invalid="ignore", over="ignore"):
        s = np.where(x == top, np.float32(0), (x - top) / np.float32(filters.temperature))
    e = exp(s)
    if 0 < filters.top_k < len(ranked):
        ranked = ranked[:filters.top_k]
    top_p = np.float32(filters.top_p)
    if top_p < 1:
        mass = np.zeros(len(x), np.float32)
        mass[ranked] = e[ranked]
        better = np.add.accumulate(e[ranked], dtype=np.float32)  # serial: one running sum
        ranked = ranked[:1 + int(np.sum(better[:-1] < top_p * lane_sum(mass)))]
    ranked = ranked[e[ranked] >= np.float32(filters.min_p)]
    weights[ranked] = e[ranked]
    return weights


def rejection_chances(drafts: Sequence[int], p: F64, q: F64) -> F64:
    """Of each draft, the chance that it is accepted after those before it: min(p / q, 1)."""
    return np.array([min(1.0, p[i, x] / q[i, x]) if q[i, x] > 0 else 0.0
                     for i, x in enumerate(drafts)])


def block_chances(drafts: Sequence[int], p: F64, q: F64) -> F64:
    """h_i of each prefix of i = 1 .. n drafts: the chance that it is accepted if no longer one is.

    With rho_i as of ``_weights``: h_n = rho_n; else h_i = R / (R + 1 - rho_i), R = the sum of
    max(rho_i * p_i - q_i, 0), where p_i and q_i are of the token after the prefix.

    Source: arXiv 2403.10444, algorithm 2, as spec §5.4 gives it.
    """
    rho = _weights(drafts, p, q)
    chances = rho[1:].copy()
    for i in range(1, len(drafts)):
        if 0 < rho[i] < 1:
            left = _serial(np.maximum(rho[i] * p[i] - q[i], 0))
            chances[i - 1] = left / (left + 1 - rho[i])
    return chances


def _weights(drafts: Sequence[int], p: F64, q: F64) -> F64:
    """rho_0 = 1, rho_i = min(rho_(i-1) * p(x_i) / q(x_i), 1): what the target leaves of a prefix's
    chance; 0 from a draft on that q excludes."""
    rho = np.ones(len(drafts) + 1)
    for i, x in enumerate(drafts):
        rho[i + 1] = min(rho[i] * p[i, x] / q[i, x], 1.0) if q[i, x] > 0 else 0.0
    return rho


def rejection_count(chances: F64, draws: Array) -> int:
    """Accepted drafts: those before the first whose draw is not below its chance."""
    refused = np.flatnonzero(~(np.float64(draws) < chances))
    return int(refused[0]) if len(refused) else len(chances)


def block_count(chances: F64, draws: Array) -> int:
    """Accepted drafts: the longest prefix whose own draw is below its chance."""
    passed = np.flatnonzero(np.float64(draws) < chances)
    return int(passed[-1]) + 1 if len(passed) else 0


CHANCES = {"rejection": rejection_chances, "block": block_chances}
COUNTS = {"rejection": rejection_count, "block": block_count}


def after(drafts: Sequence[int], p: F64, q: F64, accepted: int, method: Method) -> F64:
    """The distribution f64[V] of the token after ``accepted`` drafts.

    After all of them it is the target's own. Otherwise it is what the drafts left of it:
    max(rho * p - q, 0), normalised; rho is 1 for "rejection", ``_weights`` for "block".
    """
    target: F64 = p[accepted]
    if accepted == len(drafts):
        return target
    rho = 1.0 if method == "rejection" else _weights(drafts, p, q)[accepted]
    left: F64 = np.maximum(rho * target - q[accepted], 0)
    total = _serial(left)
    # Nothing is left where p = q: then a draft was refused that q says is impossible.
    return left / total if total > 0 else target


def choose(p: F64, seed: int, position: int) -> int:
    """Sample a token of p by Gumbel-max; ties: the lower id."""
    ids = np.flatnonzero(p > 0)
    noise = gumbel(stream(seed, position, RESIDUAL), ids)
    return int(ids[np.argmax(log(np.float32(p[ids])) + noise)])


def _serial(x: F64) -> float:
    """The sum in ascending order: one running sum, the same on every machine."""
    return float(np.add.accumulate(x)[-1])


def _one_hot(token: int, size: int) -> F64:
    made = np.zeros(size)
    made[token] = 1.0
    return made
