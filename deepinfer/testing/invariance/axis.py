"""An axis: one thing that must not change a bit, how to change it, and how to know it changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepinfer.testing.invariance.bench import Bench, Trial
from deepinfer.testing.invariance.compare import Counts, Difference
from deepinfer.testing.invariance.record import Run


@dataclass(frozen=True, slots=True)
class Axis:
    """One row of the table of axes.

    Args:
        name: as on the command line. text: what varies, in a line.
        vary: serves the bench's requests under the varied conditions, into an ``Outcome``.
        control: the fault of ``deepinfer.testing.faults`` that it must catch.
        requests: how many are enough for the control.
        approximate: it reports a drift and cannot fail.
    """

    name: str
    text: str
    vary: Callable[[Bench, Outcome], None]
    control: str | None
    requests: int = 3
    approximate: bool = False


@dataclass(slots=True)
class Outcome:
    """What the trials of one axis gave.

    Args:
        counts: how much was compared. differences: with the trials they were found in.
        conditions: labels of the trials. evidence: that the conditions occurred, by name.
        missing: conditions that had to occur and did not.
        skipped: why this machine or model cannot have the condition at all.
        drift: of an approximate axis.
    """

    counts: Counts = field(default_factory=Counts)
    differences: list[tuple[Difference, Trial | None]] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    skipped: str | None = None
    drift: dict[str, Any] | None = None

    def run(self, bench: Bench, trial: Trial) -> list[Run]:
        """Serve a trial and compare it; its differences are kept."""
        runs = bench.serve(trial)
        self.conditions.append(trial.label)
        self.differences += [(d, trial) for d in bench.compare(trial, runs, self.counts)]
        return runs

    def show(self, name: str, value: Any, *, shown: bool | None = None) -> None:
        """Note evidence; a condition that is not ``shown`` (default: a false value) is missing."""
        self.evidence[name] = value
        if not (bool(value) if shown is None else shown):
            self.missing.append(f"{name} is {value!r}")
