"""Checks a schedules file on this machine: each entry's bits and its time, against the default."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.effort import Effort
from autotune.measure import Runner
from autotune.results import PREFILL_ROWS, rows_of
from autotune.search import Listener, Search
from autotune.shipping import Entries, entry_points
from autotune.space import ROWS, Problem, Task
from autotune.stats import faster, geomean
from autotune.store import Store
from deepinfer.codegen.schedules import Entry


@dataclass(frozen=True, slots=True)
class Checked:
    """One entry.

    Args:
        state: "ok", "slower" (outside the noise), "bits" (a gate failed), "unknown" (no kernel of
            the given models is it) or "gone" (its schedule is not in the space any more).
        gain: geometric mean over its points of default / shipped, where both were timed.
    """

    entry: Entry
    state: str
    gain: float | None
    detail: str

    @property
    def good(self) -> bool:
        return self.state in ("ok", "unknown")


def verify(entries: Entries, problems: Mapping[str, Problem], runner: Runner, store: Store,
           session: str, effort: Effort, tell: Listener,
           now: Callable[[], int] = time.time_ns) -> list[Checked]:
    """Gate and time every entry anew, side by side with the default.

    Args:
        problems: kernels by the key that entries name them by.
    """
    return [_check(entry, problems.get(entry.kernel), runner, store, session, effort, tell, now)
            for _, entry in sorted(entries.items())]


def _check(entry: Entry, problem: Problem | None, runner: Runner, store: Store, session: str,
           effort: Effort, tell: Listener, now: Callable[[], int]) -> Checked:
    if problem is None:
        return Checked(entry, "unknown", None, "no kernel of these models")
    space = problem.schedules()
    if entry.schedule not in space:
        return Checked(entry, "gone", None, f"the space has {'; '.join(map(str, space))}")
    index = space.index(entry.schedule)
    large = entry.phase == "prefill"
    rows = [r for r in ROWS if (r > PREFILL_ROWS) == large]
    points = entry_points(entry, [problem.sizes(r) for r in rows])
    search = Search(Task(problem, 1, tuple(sorted(points, key=rows_of))), runner, store, session,
                    effort, tell=tell, check=lambda: None, now=now, only=[index])
    outcome = search.run()
    if outcome.quarantined:
        failure = outcome.quarantined.get(index) or outcome.quarantined[0]
        return Checked(entry, "bits", None, f"{failure.kind}: {failure.reason}")
    shipped, default = outcome.times[index], outcome.times[0]
    gain = geomean([d.median / s.median for d, s in zip(default, shipped, strict=True)])
    slower = [p for p, d, s in zip(points, default, shipped, strict=True) if faster(d, s)]
    if slower:
        return Checked(entry, "slower", gain, f"than the default at {_names(slower)}")
    return Checked(entry, "ok", gain, "")


def _names(points: Sequence[tuple[tuple[str, int], ...]]) -> str:
    return "; ".join(", ".join(f"{n}={v}" for n, v in p) for p in points)
