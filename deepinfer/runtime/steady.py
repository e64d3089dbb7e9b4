"""Steady: a verify step judged in arrays, so that the draft can follow at once.

Between the target's call and the draft's nothing is hidden by the device. If every request of the
step is plain and goes on after it, what the draft reads follows from the chosen tokens alone; they
are committed, request by request, while the draft runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.runtime.batch import Rows
from deepinfer.runtime.draft_batch import Anchors, Context
from deepinfer.runtime.request import Request

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Steady:
    """What is known of the step before it runs.

    Args:
        requests: each with an anchor and ``width`` drafts.
        slots, starts, lengths: i32[R], theirs, position of the anchor, tokens up to it.
        most: i32[R], tokens a request may get and still draft after them.
        enders: i32, tokens that may end a request.
    """

    requests: tuple[Request, ...]
    width: int
    slots: Array
    starts: Array
    lengths: Array
    most: Array
    enders: Array

    @staticmethod
    def of(batch: Sequence[Rows], window: int) -> Steady | None:
        """None if a request is not plain, or if their widths differ.

        Args:
            window: rows of context that the draft's rings need.
        """
        width = len(batch[0].drafts)
        requests = tuple(rows.request for rows in batch)
        if (not 0 < width < window or any(len(rows.drafts) != width for rows in batch)
                or not all(r.plain for r in requests)):
            return None
        lengths = np.array([len(r.tokens) for r in requests], np.int32)
        return Steady(requests, width, np.array([r.slot for r in requests], np.int32),
                      np.array([rows.start for rows in batch], np.int32), lengths,
                      np.array([r.max_len - 2 for r in requests], np.int32) - lengths,
                      np.array(sorted(frozenset[int]().union(*(r.enders for r in requests))),
                               np.int32))

    def judge(self, chosen: Array, tokens: Array) -> tuple[Context, Anchors] | None:
        """The draft's context and anchors, or None if a request may end in this step.

        Args:
            chosen: i32[R*(1+width)], the target's tokens. tokens: the same size, anchors and
                drafts.
        """
        shape = (len(self.requests), self.width + 1)
        picks = chosen.reshape(shape)
        right = picks[:, :-1] == tokens.reshape(shape)[:, 1:]
        counts = 1 + np.logical_and.accumulate(right, axis=1).sum(axis=1, dtype=np.int32)
        made = np.arange(shape[1]) < counts[:, None]
        if (counts > self.most).any() or (made & (picks[..., None] == self.enders).any(-1)).any():
            return None
        anchors = picks[np.arange(shape[0]), counts - 1]
        rows = np.arange(shape[0], dtype=np.int32) * np.int32(shape[1])
        return (Context(self.slots, self.starts, counts, rows),
                Anchors(self.requests, anchors, self.lengths + counts))
