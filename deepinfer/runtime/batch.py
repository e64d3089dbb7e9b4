"""Batches: from the rows that a step computes to the arrays that its phase declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.errors import ProgramError
from deepinfer.program import Phase
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampler import sampling_inputs

Array = np.ndarray[Any, Any]
BLOCKED = -1  # a lookback before the request's first token


@dataclass(frozen=True, slots=True)
class Rows:
    """Contiguous rows of one request in one step.

    Args:
        request: whose. start, end: positions start .. end - 1.
        sample: "last" chooses a token after the last row, "all" after every row, "none" not.
    """

    request: Request
    start: int
    end: int
    sample: str = "none"

    def __len__(self) -> int:
        return self.end - self.start

    def sampled(self) -> range:
        """Which of these rows reach the head, counted from the first."""
        return range({"none": len(self), "last": len(self) - 1, "all": 0}[self.sample], len(self))


def build_inputs(phase: Phase, batch: Sequence[Rows], *, pages_per_seq: int, max_ngram: int
                 ) -> dict[str, Array]:
    """The inputs of one forward step.

    Args:
        phase: what it declares is what it gets; models without ratio-2 layers, say, have no groups.
        batch: rows by request, in any order. pages_per_seq: width of the page table.
        max_ngram: width of the lookback.

    Returns:
        tokens, positions, request i32[N]; spans i32[R,3] (slot, first row, end row); pages
        i32[R,P]; group_rows, group_positions, group_request i32[G] (rows that close a group of two,
        the position of its first token, whose); lookback i32[N,A] (newest first, -1 before the
        start); is_image u8[N]; sample_rows i32[Q]; and ``sampling_inputs``.

    Raises:
        ProgramError: the phase declares an input that this runtime does not know.
    """
    first_rows = np.cumsum([0, *(len(rows) for rows in batch)])
    positions = _join([np.arange(rows.start, rows.end) for rows in batch])
    request = np.repeat(np.arange(len(batch)), [len(rows) for rows in batch])
    groups = np.flatnonzero(positions % 2 == 1)
    picks = [(rows, int(first), row) for rows, first in zip(batch, first_rows, strict=False)
             for row in rows.sampled()]
    made = {
        "tokens": _i32(_join([rows.request.tokens[rows.start:rows.end] for rows in batch])),
        "positions": _i32(positions),
        "request": _i32(request),
        "spans": _i32([(_slot(rows), first_rows[i], first_rows[i + 1])
                       for i, rows in enumerate(batch)]).reshape(len(batch), 3),
        "pages": _page_table(batch, pages_per_seq),
        "group_rows": _i32(groups),
        "group_positions": _i32(positions[groups] - 1),
        "group_request": _i32(request[groups]),
        "lookback": _join([_lookback(rows, max(1, max_ngram)) for rows in batch]),
        "is_image": np.zeros(len(positions), np.uint8),
        "sample_rows": _i32([first + row for _, first, row in picks]),
        **sampling_inputs([(rows.request.params, rows.start + row + 1) for rows, _, row in picks]),
    }
    declared = [v.name for v in phase.values if v.kind == "input"]
    unknown = [name for name in declared if name not in made]
    if unknown:
        raise ProgramError(f"phase '{phase.name}' declares inputs {unknown}, expected some of "
                           f"{sorted(made)}", where="build_inputs",
                           next="use the runtime of the version that compiled the Program")
    return {name: made[name] for name in declared}


def _i32(values: Any) -> Array:
    return np.ascontiguousarray(values, np.int32)


def _join(parts: Sequence[Any]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _slot(rows: Rows) -> int:
    assert rows.request.slot is not None
    return rows.request.slot


def _page_table(batch: Sequence[Rows], width: int) -> Array:
    """Pages a request does not have read as page 0; no row looks there for more than an address."""
    table = np.zeros((len(batch), width), np.int32)
    for row, rows in zip(table, batch, strict=True):
        row[:len(rows.request.pages)] = rows.request.pages
    return table


def _lookback(rows: Rows, width: int) -> Array:
    """Each row's token and those before it, newest first."""
    oldest = rows.start - width + 1
    known = rows.request.tokens[max(0, oldest):rows.end]
    ids = _i32([BLOCKED] * max(0, -oldest) + known)
    return _i32(np.lib.stride_tricks.sliding_window_view(ids, width)[:, ::-1])
