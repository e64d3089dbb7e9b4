"""Operands of ``adjust_logits`` for the tests of reference and kernel."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Adjustments:
    """The operands, in the op's order."""

    logits: Array
    entries: Array
    ids: Array
    counts: Array
    seen: Array
    bias: Array
    repetition: Array
    frequency: Array
    presence: Array
    recent: Array
    mask_row: Array
    masks: Array

    def operands(self) -> tuple[Array, ...]:
        return astuple(self)

    def changed(self, **fields: Array) -> Adjustments:
        return replace(self, **fields)


def case(rows: int, vocab: int, *, drafts: int = 4, seed: int = 0) -> Adjustments:
    """Rows with entries, drafts and masks of their own; drafts repeat and meet entries, and every
    fifth row has no entry."""
    rng = np.random.default_rng(seed)
    ids, entries = [], []
    for row in range(rows):
        size = 0 if row % 5 == 4 else int(rng.integers(3, 12))
        entries.append((len(ids), len(ids) + size))
        ids += sorted(rng.choice(vocab, size, replace=False).tolist())
    counts = rng.integers(0, 4, len(ids)).astype(np.int32)
    recent = rng.integers(-1, vocab, (rows, drafts)).astype(np.int32)
    for row, (begin, end) in enumerate(entries):
        if row % 2 == 0 and end > begin:
            recent[row, :2] = ids[begin]
    return Adjustments(
        (4 * rng.normal(size=(rows, vocab))).astype(np.float32),
        np.array(entries, np.int32).reshape(-1, 2), np.array(ids, np.int32), counts,
        ((counts > 0) | (rng.random(len(ids)) < 0.3)).astype(np.uint8),
        np.where(rng.random(len(ids)) < 0.3, rng.normal(size=len(ids)), 0).astype(np.float32),
        rng.uniform(0.7, 1.5, rows).astype(np.float32),
        rng.uniform(-1, 1, rows).astype(np.float32), rng.uniform(-1, 1, rows).astype(np.float32),
        recent, (np.arange(rows) % 3 - 1).astype(np.int32),
        rng.integers(-2**31, 2**31, (2, -(-vocab // 32))).astype(np.int32))
