"""State of a fake device that is kept per request: what a row needs must be there, its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NOTHING = -7


class Rings:
    """Window rings: (position, token) in slot ``position % length`` of each request's row."""

    def __init__(self, slots: int, length: int, window: int) -> None:
        self.data = np.full((slots, length, 2), NOTHING, np.int64)
        self.length, self.window = length, window

    def require(self, slot: int, first: int, floor: int, tokens: Sequence[int]) -> None:
        """All positions that a row at ``first`` sees before itself are there, with their tokens."""
        for p in range(max(0, floor, first - self.window + 1), first):
            found = self.data[slot, p % self.length].tolist()
            assert found == [p, tokens[p]], (slot, p, found)

    def write(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        for p, token in list(enumerate(tokens, first))[-self.length:]:
            self.data[slot, p % self.length] = (p, token)


class Pending:
    """First halves of ratio-2 groups: (position, token) of an even position in slot
    ``position // 2 % length``, as a step with a group's second half finds it."""

    def __init__(self, slots: int, length: int) -> None:
        self.data = np.full((slots, length, 2), NOTHING, np.int64)
        self.length = length

    def require(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        found = self.data[slot, position // 2 % self.length].tolist()
        assert found == [position, tokens[position]], (slot, position, found)

    def write(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """All even rows among the last 2 * length of a span."""
        for p, token in list(enumerate(tokens, first))[-2 * self.length:]:
            if p % 2 == 0:
                self.data[slot, p // 2 % self.length] = (p, token)
