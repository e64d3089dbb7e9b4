"""Token counts of a request, as penalties and biases read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_IDS, _COUNTS, _SEEN, _BIAS = range(4)


class TokenCounts:
    """The tokens of a request whose logits its penalties or biases change, by ascending id.

    Only committed tokens are counted: drafts reach the sampler as ``recent``, so a rejected one
    leaves nothing to take back. The prompt is noted once; adding a token costs one search and, for
    a new id, one move of the entries after it.

    Args:
        prompt: the prompt's ids; they count as seen, but not as output.
        repetition: whether seen tokens matter. output: whether counts of the output matter.
        bias: id -> bias.
    """

    def __init__(self, prompt: Iterable[int], bias: Mapping[int, float], *, repetition: bool,
                 output: bool) -> None:
        self._counts = repetition or output
        seen = np.unique(np.fromiter(prompt, np.int32)) if repetition else np.zeros(0, np.int32)
        biased = np.fromiter(sorted(bias), np.int32)
        ids = np.union1d(seen, biased)
        self._size = len(ids)
        # One table, so that an insertion moves, and a batch joins, four arrays at once.
        self._table = np.zeros((4, self._size + 64), np.int32)
        self._table[_IDS, :self._size] = ids
        self._table[_SEEN, np.searchsorted(ids, seen)] = 1
        self._table[_BIAS].view(np.float32)[np.searchsorted(ids, biased)] = [
            bias[i] for i in sorted(bias)]

    def add(self, tokens: Iterable[int]) -> None:
        """Count committed output tokens."""
        if not self._counts:
            return
        for token in tokens:
            at = bisect_left(self._table[_IDS], token, 0, self._size)
            if at == self._size or self._table[_IDS, at] != token:
                self._insert(at, token)
            self._table[_COUNTS, at] += 1
            self._table[_SEEN, at] = 1

    def _insert(self, at: int, token: int) -> None:
        if self._size == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._table[:, at + 1:self._size + 1] = self._table[:, at:self._size]
        self._table[:, at] = (token, 0, 0, 0)
        self._size += 1

    @property
    def table(self) -> Array:
        """i32[4, E]: ids, counts, seen, and the bits of f32 biases. Changes with the next add."""
        return self._table[:, :self._size]

    def entries(self) -> tuple[Array, Array, Array, Array]:
        """ids i32[E] ascending, counts i32[E], seen u8[E], bias f32[E]."""
        return split_table(self.table)


def split_table(table: Array) -> tuple[Array, Array, Array, Array]:
    """The four arrays of a table, contiguous copies where the table is not."""
    rows = np.ascontiguousarray(table)
    return rows[_IDS], rows[_COUNTS], rows[_SEEN].astype(np.uint8), rows[_BIAS].view(np.float32)
