"""Ahead: the inputs of the next verify step, made while the draft of this one runs.

Once a step's tokens are committed, all of the next step but the drafts themselves is known: who
takes part, where its rows lie, what its sampler reads. Only what does not need another decision is
prepared; anything else (a prefill, a grammar, penalties, too few pages) is left to the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepinfer.program import Phase
from deepinfer.runtime.batch import Rows, build_inputs
from deepinfer.runtime.request import Request

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A verify step that waits for its drafts.

    Args:
        batch: rows with placeholders for drafts, ``width`` each. inputs: of the phase.
    """

    batch: list[Rows]
    width: int
    inputs: dict[str, Array]

    @staticmethod
    def prepare(phase: Phase, requests: Sequence[Request], widths: Sequence[int],
                facts: Mapping[str, Any], pages_per_seq: int) -> Ahead | None:
        """The next step of these requests, or None if they do not all verify equally many drafts.

        Args:
            requests: decoding, with pages up to their drafts' ends. widths: drafts of each.
        """
        width = widths[0] if widths else 0
        if not width or any(w != width for w in widths) or any(
                r.matcher is not None or r.sampling.penalises for r in requests):
            return None
        blank = (int(facts["noise_token"]),) * width
        batch = [Rows(r, r.computed, len(r.tokens) + width, "all", blank) for r in requests]
        return Ahead(batch, width, build_inputs(phase, batch, facts, pages_per_seq=pages_per_seq))

    def fill(self) -> list[Rows] | None:
        """Put the requests' drafts in; None if one has too few after all."""
        drafts = [tuple(rows.request.drafts[:self.width]) for rows in self.batch]
        if any(len(d) < self.width for d in drafts):
            return None
        shape = (len(self.batch), 1 + self.width)
        tokens = self.inputs["tokens"].reshape(shape)
        tokens[:, 1:] = np.array(drafts, np.int32)
        if "lookback" in self.inputs:
            lookback = self.inputs["lookback"].reshape(*shape, -1)
            for back in range(min(self.width, lookback.shape[2])):
                lookback[:, back + 1:, back] = tokens[:, 1:shape[1] - back]
        return [replace(rows, drafts=d) for rows, d in zip(self.batch, drafts, strict=True)]
