"""Stats: what an engine did and holds, and one step's record for observers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deepinfer.runtime.batch import Rows
from deepinfer.runtime.draft import AcceptStats
from deepinfer.runtime.execute import TargetStep
from deepinfer.runtime.pages import PagePool

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now.

    Args:
        steps: run. rows: computed by the target, of them prefill_rows of prompts.
        verified, accepted: drafts. preemptions: requests that lost their state. hit_tokens: taken
            from the prefix cache.
        running: requests with state. unfinished: all of them. free_pages: that can be had now,
            cached_pages: known by their contents; free_slots.
        accepts: drafts by position.
    """

    steps: int = 0
    rows: int = 0
    prefill_rows: int = 0
    verified: int = 0
    accepted: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    running: int = 0
    unfinished: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    free_slots: int = 0
    accepts: AcceptStats = field(default_factory=AcceptStats)

    def add(self, batch: Sequence[Rows], accepted: Mapping[str, int], preempted: int) -> None:
        """Count one step."""
        for rows in batch:
            self.rows += len(rows)
            decodes = rows.sample == "all" and not rows.forced
            self.prefill_rows += 0 if decodes else len(rows)
            self.verified += len(rows.drafts)
        self.accepted += sum(accepted.values())
        self.preemptions += preempted

    def now(self, steps: int, running: int, unfinished: int, pool: PagePool,
            accepts: AcceptStats) -> EngineStats:
        """A copy with what the engine holds."""
        return replace(self, steps=steps, running=running, unfinished=unfinished,
                       free_pages=pool.free_pages, cached_pages=pool.cached_pages,
                       free_slots=pool.free_slots, accepts=accepts.copy())


@dataclass(frozen=True, slots=True)
class RowRecord:
    """Rows of a request in a step: positions start .. end - 1, sampled after ``sampled`` of them,
    the last; ``drafts`` of them were proposals."""

    request_id: str
    start: int
    end: int
    sampled: int
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, for observers.

    Args:
        step: its number. phase: of the target. rows: by request, in batch order.
        inputs, outputs: arrays of the target phase, with the values named in ``engine.trace``.
        drafted: the drafts each request verified. accepted: how many of them stood.
        widths: the same as counts. preempted: ids. hits: cached positions by request.
    """

    step: int
    phase: str
    rows: tuple[RowRecord, ...]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    drafted: Mapping[str, list[int]]
    accepted: Mapping[str, int]
    widths: Mapping[str, int]
    preempted: Sequence[str]
    hits: Mapping[str, int]

    @staticmethod
    def of(number: int, step: TargetStep, batch: Sequence[Rows], accepted: Mapping[str, int],
           preempted: Sequence[str], hits: Mapping[str, int]) -> StepRecord:
        rows = tuple(RowRecord(r.request.request_id, r.start, r.end, len(r.sampled), r.drafts)
                     for r in batch)
        drafted = {r.request_id: list(r.drafts) for r in rows if r.drafts}
        inputs = {name: array.copy() for name, array in step.inputs.items()}  # may be used again
        return StepRecord(number, step.phase, rows, inputs, step.outputs, drafted,
                          dict(accepted), {k: len(v) for k, v in drafted.items()},
                          list(preempted), dict(hits))
