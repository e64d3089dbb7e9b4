"""Penalties, biases, masks and forced tokens against plain loops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.ops.adjust import adjust_logits, force_token, recent_push, recent_start
from deepinfer.ops.sample import logprobs, sample
from tests.ops.adjust_cases import Adjustments, case

Array = np.ndarray[Any, Any]


def plain(c: Adjustments) -> Array:
    """Every token of every row by itself, in float64 and in the field's order."""
    out = c.logits.astype(np.float64)
    for q, (begin, end) in enumerate(c.entries):
        for t in range(out.shape[1]):
            at = [e for e in range(begin, end) if c.ids[e] == t]
            drafted = c.recent[q].tolist().count(t)
            count = drafted + sum(int(c.counts[e]) for e in at)
            if drafted or any(c.seen[e] for e in at):
                r = float(c.repetition[q])
                out[q, t] = out[q, t] / r if out[q, t] > 0 else out[q, t] * r
            if count:
                out[q, t] -= count * float(c.frequency[q]) + float(c.presence[q])
            out[q, t] += sum(float(c.bias[e]) for e in at)
            row = c.mask_row[q]
            if row >= 0 and not int(np.uint32(c.masks[row, t // 32])) >> (t % 32) & 1:
                out[q, t] = -np.inf
    return out


def test_all_transforms_together() -> None:
    c = case(12, 70)
    got = adjust_logits(*c.operands())
    expected = plain(c)
    assert np.isneginf(expected).any() and not np.isneginf(expected).all(1).any()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert (got != c.logits).any(1).all()


@pytest.mark.parametrize("without", ["entries", "recent", "mask", "penalties"])
def test_each_part_is_in_the_case(without: str) -> None:
    """Negative control: a case without one of its parts has other results in some row."""
    c = case(12, 70)
    less = {"entries": dict(entries=np.zeros_like(c.entries)),
            "recent": dict(recent=np.full_like(c.recent, -1)),
            "mask": dict(mask_row=np.full_like(c.mask_row, -1)),
            "penalties": dict(repetition=np.ones_like(c.repetition),
                              frequency=0 * c.frequency, presence=0 * c.presence)}[without]
    assert (adjust_logits(*c.changed(**less).operands()) != adjust_logits(*c.operands())).any()


def test_neutral_rows_keep_their_bits() -> None:
    """-0, denormals, infinities and NaN of rows without entries, and of neutral entries."""
    c = case(6, 40)
    strange = np.float32([-0.0, 0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, 3e38])
    c = c.changed(logits=np.resize(strange, c.logits.shape).astype(np.float32),
                  mask_row=np.full(6, -1, np.int32))
    nothing = c.changed(entries=np.zeros_like(c.entries), recent=np.full_like(c.recent, -1))
    neutral = c.changed(repetition=np.ones(6, np.float32), frequency=np.zeros(6, np.float32),
                        presence=np.zeros(6, np.float32), bias=np.zeros_like(c.bias))
    assert (c.entries[:, 1] > c.entries[:, 0]).any() and (c.recent >= 0).any()
    for same in (nothing, neutral):
        assert adjust_logits(*same.operands()).tobytes() == c.logits.tobytes()


def test_drafts_count_as_output_whether_they_have_an_entry_or_not() -> None:
    """A row with drafts equals the row whose entries count them."""
    c = case(1, 40).changed(
        entries=np.int32([[0, 3]]), ids=np.int32([4, 9, 20]), counts=np.int32([2, 0, 1]),
        seen=np.uint8([1, 0, 1]), bias=np.float32([0, 1, 0]), recent=np.int32([[9, 30, 9, -1]]),
        mask_row=np.int32([-1]))
    counted = c.changed(
        entries=np.int32([[0, 4]]), ids=np.int32([4, 9, 20, 30]), counts=np.int32([2, 2, 1, 1]),
        seen=np.uint8([1, 1, 1, 1]), bias=np.float32([0, 1, 0, 0]),
        recent=np.full((1, 4), -1, np.int32))
    got = adjust_logits(*c.operands())
    assert got.tobytes() == adjust_logits(*counted.operands()).tobytes()
    uncounted = c.changed(recent=np.full((1, 4), -1, np.int32))
    assert np.flatnonzero(got != adjust_logits(*uncounted.operands())).tolist() == [9, 30]


def test_rows_may_share_their_entries() -> None:
    c = case(2, 40)
    alike = {n: np.repeat(getattr(c, n)[:1], 2, axis=0) for n in (
        "logits", "entries", "repetition", "frequency", "presence", "mask_row")}
    c = c.changed(recent=np.int32([[3, -1, -1, -1]] * 2), **alike)
    got = adjust_logits(*c.operands())
    assert got[0].tobytes() == got[1].tobytes() != c.logits[0].tobytes()


def test_a_nan_logit_stays_visible_behind_a_mask() -> None:
    """The choice goes on among what is allowed, the raw logprob of it is NaN."""
    c = case(1, 40).changed(mask_row=np.zeros(1, np.int32), masks=np.int32([[2, 0]]))
    c.logits[0, 7] = np.nan
    adjusted = adjust_logits(*c.operands())
    one = np.ones(1, np.float32)
    token = sample(adjusted, one, np.zeros(1, np.int32), one, 0 * one, np.zeros(1, np.uint64),
                   np.zeros(1, np.int32), purpose=0)
    assert token.tolist() == [1] and not np.isnan(adjusted).any()
    assert np.isnan(logprobs(c.logits, token, k=1)[0]).all()


def test_forced_tokens_and_the_drafts_of_a_block() -> None:
    assert force_token(np.int32([5, 6, 7]), np.int32([-1, 0, 3])).tolist() == [5, 0, 3]
    recent = recent_start(np.int32([8, 9]), width=3)
    for tokens in ([1, 2], [3, 4], [5, 6], [7, 8]):
        recent = recent_push(recent, np.int32(tokens))
    assert recent.tolist() == [[7, 5, 3], [8, 6, 4]]
