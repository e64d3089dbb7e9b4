"""Reading and writing parts of a device's state: what prefix caching and tests need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class StateAccess:
    """For a device that holds its state as host arrays.

    Attributes:
        state: arrays by name; the first axis is a slot, or a page for those in ``paged``.
        paged: names of the paged caches.
    """

    state: dict[str, Array]
    paged: tuple[str, ...]

    def read_slot(self, slot: int, names: Iterable[str]) -> dict[str, Array]:
        """Copies of one slot's rows of the named arrays."""
        return {name: self.state[name][slot].copy() for name in names}

    def write_slot(self, slot: int, arrays: Mapping[str, Array]) -> None:
        """Put back what ``read_slot`` gave, into any slot."""
        for name, array in arrays.items():
            self.state[name][slot] = array

    def read_pages(self, pages: Sequence[int]) -> dict[str, Array]:
        """Copies of these pages of every paged cache: [len(pages), ...] by name."""
        return {name: self.state[name][list(pages)] for name in self.paged}

    def write_pages(self, pages: Sequence[int], arrays: Mapping[str, Array]) -> None:
        """Put back what ``read_pages`` gave, into any pages."""
        for name, array in arrays.items():
            self.state[name][list(pages)] = array
