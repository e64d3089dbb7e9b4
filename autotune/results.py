"""What the database says: per kernel and machine, the landscape, the duel and who wins."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.effort import DUEL
from autotune.space import Problem, Sizes
from autotune.stats import Timing, Verdict, decide
from autotune.store import Store
from deepinfer.targets.base import load_target

PREFILL_ROWS = 64  # points of more rows are prefill's, others are of the phases that decode


def rows_of(sizes: Sizes) -> int:
    """The row count of a point."""
    return max((n for _, n in sizes), default=1)


def phases_of(points: Sequence[Sizes]) -> dict[str, tuple[Sizes, ...]]:
    """The points of "prefill" and of all other phases, ""; a group without points is absent."""
    small = tuple(p for p in points if rows_of(p) <= PREFILL_ROWS)
    large = tuple(p for p in points if rows_of(p) > PREFILL_ROWS)
    return {name: found for name, found in (("", small), ("prefill", large)) if found}


@dataclass(slots=True)
class Result:
    """One kernel on one machine.

    Args:
        kernel: its row. problem: what it is. machine: id. session: whose duel counts.
        schedules: id -> text. sources: id -> digest of the text that ran.
        points: sizes, ascending. times: id -> timing at each point, of the duel.
        landscape: (id, point) -> (median nanoseconds, median of the default beside it).
        quarantined: schedule text -> reasons.
    """

    kernel: str
    problem: Problem
    machine: str
    session: str
    schedules: dict[int, str] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    points: tuple[Sizes, ...] = ()
    times: dict[int, tuple[Timing, ...]] = field(default_factory=dict)
    landscape: dict[tuple[int, Sizes], tuple[float, float]] = field(default_factory=dict)
    quarantined: dict[str, list[str]] = field(default_factory=dict)
    timed: set[str] = field(default_factory=set)

    def verdict(self, points: Sequence[Sizes] | None = None) -> Verdict:
        """Who wins at these points (default: at all)."""
        chosen = [i for i, p in enumerate(self.points) if points is None or p in points]
        return decide({k: [t[i] for i in chosen] for k, t in self.times.items()})

    def unvisited(self) -> list[str]:
        """The schedules that no search timed and none refused: halving left them out. None of a
        kernel that is no more."""
        if self.problem.op not in load_target(self.problem.target).kernels:
            return []
        seen = self.timed | {*self.quarantined}
        return [s for s in map(str, self.problem.schedules()) if s not in seen]

    def phases(self) -> dict[str, tuple[Sizes, ...]]:
        """Its points by phase."""
        return phases_of(self.points)


def machines(store: Store) -> dict[str, dict[str, Any]]:
    """The machines in the database by id."""
    rows = store.query("SELECT machine, body FROM key ORDER BY id")
    found = {r["machine"]: json.loads(r["body"]) for r in rows}
    return {name: {k: v for k, v in body.items() if k != "kernel_source"}
            for name, body in sorted(found.items())}


def last_tuned(store: Store, names: Sequence[str]) -> list[str]:
    """The one of these machines that had the latest duel; none if none had one."""
    duels = [json.loads(r["detail"])
             for r in store.query("SELECT detail FROM fact WHERE kind = 'duel'")]
    latest = {d["machine"]: d["at"] for d in sorted(duels, key=lambda d: int(d["at"]))}
    return sorted((m for m in names if m in latest), key=lambda m: (latest[m], m))[-1:]


def results(store: Store, machine: str) -> list[Result]:
    """Every kernel with a complete duel on a machine, in order of its key."""
    made = []
    for row in store.query("SELECT id, problem FROM kernel ORDER BY key, id"):
        duels = [d for d in store.facts(row["id"], "duel") if d["machine"] == machine]
        if duels:
            duel = max(duels, key=lambda d: (d["at"], d["session"]))
            made.append(_result(store, row["id"], json.loads(row["problem"]), duel))
    return made


def _sizes(held: list[Any]) -> Sizes:
    return tuple((n, v) for n, v in held)


def _result(store: Store, kernel: str, problem: dict[str, Any], duel: dict[str, Any]) -> Result:
    made = Result(kernel, Problem.from_json(problem), duel["machine"], duel["session"])
    made.points = tuple(sorted(map(_sizes, duel["points"]), key=rows_of))
    rows = store.query(
        "SELECT r.schedule, r.place, r.sizes, m.body, s.session, s.rung, s.visit, s.ns "
        "FROM record r JOIN key m ON m.id = r.measure_key JOIN sample s ON s.record = r.id "
        "WHERE r.kernel = ? AND m.machine = ? ORDER BY s.session = ?, s.taken_at, s.id",
        kernel, made.machine, made.session)
    visits: dict[tuple[int, Sizes, str], list[list[int]]] = {}
    rounds: dict[tuple[str, int, Sizes], dict[int, float]] = {}
    for row in rows:
        place, sizes, ns = row["place"], _sizes(json.loads(row["sizes"])), json.loads(row["ns"])
        rounds.setdefault((row["session"], row["rung"], sizes), {})[place] = statistics.median(ns)
        made.schedules[place] = row["schedule"]
        made.timed.add(row["schedule"])
        made.sources[place] = json.loads(row["body"])["kernel_source"]
        if (row["session"], row["rung"]) == (made.session, DUEL):
            visits.setdefault((place, sizes, made.sources[place]), []).append(ns)
    made.times = {place: tuple(Timing.of(visits[place, p, made.sources[place]])
                               for p in made.points)  # of the last source, if it was edited
                  for place in duel["places"]}
    for (_, _, sizes), found in rounds.items():  # this session and the later rungs come last
        if 0 in found:
            made.landscape |= {(place, sizes): (ns, found[0]) for place, ns in found.items()}
    for place, timings in made.times.items():
        for sizes, timing, base in zip(made.points, timings, made.times[0], strict=True):
            made.landscape[place, sizes] = (timing.median, base.median)
    made.quarantined = quarantine(store, made.problem.key)
    return made


def quarantine(store: Store, kernel: str | None = None) -> dict[str, list[str]]:
    """Reasons by schedule, of one kernel, or by kernel and schedule, of all."""
    found: dict[str, list[str]] = {}
    for row in store.query("SELECT detail FROM fact WHERE kind = 'quarantine' ORDER BY detail"):
        detail = json.loads(row["detail"])
        if kernel in (None, detail["kernel"]):
            name = detail["schedule"] if kernel else f"{detail['kernel']} @{detail['schedule']}"
            found.setdefault(name, []).append(f"{detail['kind']}: {detail['reason']}")
    return found
