"""Batches: from the rows that a step computes to the arrays that its phase declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

from deepinfer.errors import ProgramError
from deepinfer.program import Phase
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampler import SampleRow, sampling_inputs

Array = np.ndarray[Any, Any]
BLOCKED = -1  # a lookback before the request's first token


@dataclass(slots=True)
class Rows:
    """Contiguous rows of one request in one step.

    Args:
        request: whose. start, end: positions start .. end - 1.
        sample: after which rows a token is chosen: none, the last, or all.
        drafts: tokens of the last rows, proposed and not yet accepted.
        forced: the chosen token is the known one: prompt logprobs.

    Attributes:
        sampled: positions after which a token is chosen.
        kept: positions whose rows go on past the replay cut.
    """

    request: Request
    start: int
    end: int
    sample: Literal["none", "last", "all"] = "none"
    drafts: tuple[int, ...] = ()
    forced: bool = False
    sampled: range = field(init=False)
    kept: range = field(init=False)

    def __post_init__(self) -> None:
        self._set_ranges()

    def _set_ranges(self) -> None:
        first = {"none": self.end, "last": self.end - 1, "all": self.start}[self.sample]
        self.sampled = range(first, self.end)
        self.kept = range(min(self.end, max(self.start, self.request.keep_from)), self.end)

    def __len__(self) -> int:
        return self.end - self.start

    def move(self, by: int) -> None:
        """To later positions."""
        self.start, self.end = self.start + by, self.end + by
        self._set_ranges()

    def tokens(self, start: int) -> list[int]:
        """Tokens at positions start .. end - 1, the drafts last."""
        known = self.request.tokens
        return known[start:self.end] + list(self.drafts[:max(0, self.end - len(known))])


class Layout:
    """Where the rows of a batch lie: one pass over its requests, shared by all inputs.

    Args:
        batch: rows by request, in any order. lookback: tokens that each row looks back at.
    """

    def __init__(self, batch: Sequence[Rows], lookback: int) -> None:
        starts = np.array([rows.start for rows in batch], np.int32)
        counts = np.array([rows.end for rows in batch], np.int32) - starts
        self.batch = batch
        self.firsts = offsets(counts)
        self.request = np.repeat(np.arange(len(batch), dtype=np.int32), counts)
        self.local = np.arange(self.firsts[-1], dtype=np.int32) - self.firsts[self.request]
        self.positions = starts[self.request] + self.local
        flat = np.fromiter(chain.from_iterable(_with_history(rows, lookback - 1)
                                               for rows in batch), np.int32)
        at = np.arange(len(self.positions)) + (self.request + 1) * (lookback - 1)
        self.tokens = flat[at]
        self.lookback = flat[at[:, None] - np.arange(lookback)]

    def spans(self, counts: Array, floors: Sequence[int]) -> Array:
        """i32[R,4]: slot, first row, end row, floor."""
        firsts = offsets(counts)
        slots = [rows.request.slot for rows in self.batch]
        return np.stack([np.array(slots, np.int32), firsts[:-1], firsts[1:],
                         np.array(floors, np.int32)], axis=1)


def offsets(counts: Array) -> Array:
    """i32: [0, c0, c0 + c1, ...]."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])


def _with_history(rows: Rows, width: int) -> list[int]:
    """The tokens of the rows with ``width`` older ones in front."""
    oldest = rows.start - width
    return [BLOCKED] * max(0, -oldest) + rows.tokens(max(0, oldest))


def build_inputs(phase: Phase, batch: Sequence[Rows], facts: Mapping[str, Any], *,
                 pages_per_seq: int, masks: Mapping[tuple[str, int], Array] | None = None
                 ) -> dict[str, Array]:
    """The inputs of one target step.

    Args:
        phase: what it declares is what it gets; models without ratio-2 layers, say, have no groups.
        batch: rows by request, in any order. facts: of the Program's manifest.
        pages_per_seq: width of the page table.
        masks: i32[words] of the tokens allowed after (request id, position).

    Returns:
        Rows: tokens, positions, request i32[N]; spans i32[R,4] (slot, first row, end row, floor);
        pages i32[R,P]; entry_positions i32[N] (-1: cached already); group_rows, group_positions,
        group_request i32[G] (rows that close a group of two, the position of its first token,
        whose); lookback i32[N,A] (newest first, -1 before the start); is_image u8[N].
        Past the replay cut: kept_rows, kept_positions, kept_request i32[K], kept_is_image u8[K],
        kept_spans i32[R,4]; sample_rows i32[Q], which count kept rows; ``sampling_inputs``.

    Raises:
        ProgramError: the phase declares an input that this runtime does not know.
    """
    layout = Layout(batch, max(1, int(facts["max_ngram"])))
    positions, request = layout.positions, layout.request
    written = positions >= np.array([rows.request.write_from for rows in batch],
                                    np.int32)[request]
    groups = np.flatnonzero((positions % 2 == 1) & written).astype(np.int32)
    made = {
        "tokens": layout.tokens, "positions": positions, "request": request,
        "spans": layout.spans(np.diff(layout.firsts), [r.request.window_floor for r in batch]),
        "pages": _page_table(batch, pages_per_seq),
        "entry_positions": np.where(written, positions, np.int32(-1)),
        "group_rows": groups, "group_positions": positions[groups] - np.int32(1),
        "group_request": request[groups], "lookback": layout.lookback,
        "is_image": np.zeros(len(positions), np.uint8),
        **_kept(layout),
        **sampling_inputs(_sample_rows(batch, masks or {}), int(facts["vocab_size"]),
                          int(facts["recent"])),
    }
    return declared(phase, made)


def declared(phase: Phase, made: Mapping[str, Array]) -> dict[str, Array]:
    """What the phase declares, of all that was made for it.

    Raises:
        ProgramError: it declares an input that this runtime does not know.
    """
    unknown = [name for name in phase.inputs if name not in made]
    if unknown:
        raise ProgramError(f"phase '{phase.name}' declares inputs {unknown}, expected some of "
                           f"{sorted(made)}", where="build_inputs",
                           next="use the runtime of the version that compiled the Program")
    return {name: made[name] for name in phase.inputs}


def _page_table(batch: Sequence[Rows], width: int) -> Array:
    """Pages a request does not have read as page 0; no row looks there for more than an address."""
    table = np.zeros((len(batch), width), np.int32)
    for row, rows in zip(table, batch, strict=True):
        row[:len(rows.request.pages)] = rows.request.pages
    return table


def _kept(layout: Layout) -> dict[str, Array]:
    """The rows that go on past the replay cut, and which of them choose a token."""
    batch = layout.batch
    counts = np.array([len(rows.kept) for rows in batch], np.int32)
    dropped = np.diff(layout.firsts) - counts
    keep = np.flatnonzero(layout.local >= dropped[layout.request]).astype(np.int32)
    firsts = offsets(counts)
    picks = [range(int(end) - len(rows.sampled), int(end))
             for rows, end in zip(batch, firsts[1:], strict=True)]
    return {
        "kept_rows": keep, "kept_positions": layout.positions[keep],
        "kept_request": layout.request[keep], "kept_is_image": np.zeros(len(keep), np.uint8),
        "kept_spans": layout.spans(counts, [max(r.request.replay_floor, r.request.window_floor)
                                            for r in batch]),
        "sample_rows": np.fromiter(chain.from_iterable(picks), np.int32),
    }


def _sample_rows(batch: Sequence[Rows], masks: Mapping[tuple[str, int], Array]
                 ) -> list[SampleRow]:
    made = []
    for rows in batch:
        known = rows.request.tokens
        for position in rows.sampled:
            chosen = position + 1  # absolute index of the token that is chosen there
            made.append(SampleRow(
                rows.request, chosen, recent=rows.drafts[:max(0, chosen - len(known))],
                mask=masks.get((rows.request.request_id, position)),
                forced=known[chosen] if rows.forced and chosen < len(known) else -1))
    return made
