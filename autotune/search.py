"""The search of one kernel's schedules: build, check bits, prune, and let the best duel.

Every visit is in the database before the next one begins, and everything that is there already is
taken from there: a search that was killed goes on where it stopped, and one that is complete
measures nothing.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotune.building import Built
from autotune.effort import DUEL, Effort, Rung
from autotune.keys import compile_body
from autotune.measure import Failure, Runner
from autotune.results import phases_of
from autotune.space import Sizes, Task, digest
from autotune.stats import Timing, Verdict, apart, close, decide, geomean
from autotune.store import Store

GATE_ROWS = (1, 7, 131)  # one row, a ragged few, and more than any block of rows
HOPELESS = 1.02  # times the default's time after the last rung: nothing that a duel could turn
CHEAP = 2 * 10**7  # operations that the numpy reference is asked for


class Listener(Protocol):
    """Is told what happens, as it happens."""

    def __call__(self, what: str, /, **detail: Any) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What the search of one kernel came to.

    Args:
        verdict: None where the default could not be used. times: of the finalists, by id, at each
            point. quarantined: reasons by id. measured, reused: visits.
    """

    task: Task
    verdict: Verdict | None = None
    times: dict[int, tuple[Timing, ...]] = field(default_factory=dict)
    quarantined: dict[int, Failure] = field(default_factory=dict)
    measured: int = 0
    reused: int = 0


class Search:
    """One search.

    Args:
        task: kernel and points. runner: of the machine. store: where all goes.
        session: name of the run; only visits of one session are compared with each other.
        effort: how much. tell: hears events. check: called before each step; may end the search by
            raising. now: nanoseconds, for the samples. only: ids to visit, beside the default;
            None: all.
    """

    def __init__(self, task: Task, runner: Runner, store: Store, session: str, effort: Effort, *,
                 tell: Listener, check: Callable[[], None], now: Callable[[], int],
                 only: Sequence[int] | None = None) -> None:
        self.task, self.runner, self.store = task, runner, store
        self.session, self.effort = session, effort
        self.tell, self.check, self.now = tell, check, now
        self.outcome = Outcome(task)
        self.built: dict[int, Built] = {}
        self._sources: dict[int, str] = {}  # of all that were built, quarantined later or not
        self._seen: dict[tuple[int, Sizes, str, int, int], tuple[int, ...]] = {}
        self.candidates = {c.index: c for c in task.candidates()
                           if only is None or c.index in (0, *only)}

    def run(self) -> Outcome:
        self._build()
        if 0 in self.built:
            self._gate()
        if 0 in self.outcome.quarantined:
            return self.outcome
        self._duel(self._finalists())
        return self.outcome

    def _finalists(self) -> dict[tuple[Sizes, ...], list[int]]:
        """Those that halving leaves at the points of each phase, which may get a schedule of its
        own."""
        alive = {points: sorted(self.built) for points in phases_of(self.task.points).values()}
        for place, rung in enumerate(self.effort.rungs(len(self.built))):
            alive = {points: self._prune(points, left, place, rung)
                     for points, left in alive.items()}
        return alive

    def _quarantine(self, index: int, failure: Failure, subject: str) -> None:
        self.built.pop(index, None)
        self.outcome.quarantined[index] = failure
        known = {"kind": failure.kind, "reason": failure.reason, "kernel": self.task.problem.key,
                 "schedule": str(self.candidates[index].schedule)}
        if known not in self.store.facts(subject, "quarantine"):
            self.store.add_fact(subject, "quarantine", known)
        self.tell("quarantine", candidate=self.candidates[index], failure=failure)

    def _known_bad(self, index: int, subject: str) -> bool:
        """Whether the database says so; its reason is the outcome's, too."""
        facts = self.store.facts(subject, "quarantine")
        if facts:
            self._quarantine(index, Failure(facts[0]["kind"], facts[0]["reason"]), subject)
        return bool(facts)

    def _build(self) -> None:
        self.check()
        bodies = {i: compile_body(c, self.runner.machine.isa)
                  for i, c in self.candidates.items()}
        keys = {i: digest(body) for i, body in bodies.items()}
        # A build may fail for the machine's sake: too slow, too small. Others try it themselves.
        subjects = {i: f"{key}@{self.runner.machine.id}" for i, key in keys.items()}
        wanted = [c for i, c in self.candidates.items() if not self._known_bad(i, subjects[i])]
        for candidate, made in self.runner.build(wanted):
            if isinstance(made, Failure):
                self._quarantine(candidate.index, made, subjects[candidate.index])
            else:
                self.built[candidate.index] = made
                self._sources[candidate.index] = made.source
                self.store.add_fact(keys[candidate.index], "built", {
                    "source": made.source, "compile": bodies[candidate.index]})
                self.tell("built", candidate=candidate)
            self.check()

    def _record(self, index: int, sizes: Sizes) -> str:
        return self.store.record(self.candidates[index], sizes, self.runner.machine,
                                 self._sources[index])

    def _gate_sizes(self) -> Iterable[Sizes]:
        rows = [self.task.problem.sizes(r) for r in GATE_ROWS]
        return dict.fromkeys([*rows, *self.task.points])

    def _gate(self) -> None:
        """All schedules write the default's bits, and it writes the reference's where that is
        cheap to know; whoever does not is quarantined before any clock starts."""
        for sizes in self._gate_sizes():
            expected = ""
            for index in sorted(self.built):
                self.check()
                record = self._record(index, sizes)
                if self._known_bad(index, record):
                    if index == 0:
                        return
                    continue
                got = self._bits(index, sizes, record)
                if isinstance(got, Failure):
                    self._quarantine(index, got, record)
                elif index == 0:
                    expected = self._reference(sizes, record) or got
                    if got != expected:
                        self._quarantine(0, Failure("reference", "other bits than the numpy "
                                         f"reference at {self.task.problem.shape(sizes)}"), record)
                elif got != expected:
                    self._quarantine(index, Failure("mismatch", "other bits than the default at "
                                     f"{self.task.problem.shape(sizes)}"), record)
                if 0 not in self.built:
                    return

    def _bits(self, index: int, sizes: Sizes, record: str) -> str | Failure:
        known = self.store.facts(record, "bits")
        if known:
            return str(known[0]["digest"])
        got = self.runner.gate(self.candidates[index], self.built[index], sizes)
        if not isinstance(got, Failure):
            self.store.add_fact(record, "bits", {"digest": got})
        return got

    def _reference(self, sizes: Sizes, record: str) -> str:
        """The digest of the reference's bits, or "" where it is not cheap or has none."""
        if self.task.problem.work(sizes)[1] > CHEAP:
            return ""
        known = self.store.facts(record, "reference")
        if known:
            return str(known[0]["digest"])
        got = self.runner.reference(self.candidates[0], self.built[0], sizes)
        if isinstance(got, Failure):
            self.tell("unchecked", candidate=self.candidates[0], failure=got)
            return ""
        self.store.add_fact(record, "reference", {"digest": got})
        return got

    def _in_turn(self, indices: Sequence[int], salt: int) -> list[int]:
        """A fixed order that is another one in each round: slow drift of the machine's speed then
        falls on all alike."""
        return sorted(indices, key=lambda i: hashlib.sha256(
            f"{self.task.problem.key}\0{salt}\0{i}".encode()).digest())

    def _visit(self, index: int, sizes: Sizes, session: str, rung: int, visit: int, repeats: int,
               share: float = 1.0) -> tuple[int, ...] | None:
        """The runs of one visit, from the database or the machine; None if it is quarantined, or
        if an earlier session did not need it."""
        if index in self.outcome.quarantined:
            return None
        key = (index, sizes, session, rung, visit)
        if key in self._seen:
            return self._seen[key]
        record = self._record(index, sizes)
        if self._known_bad(index, record):
            return None
        known = self.store.samples(record, session).get((session, rung, visit))
        if known is not None:
            self.outcome.reused += 1
            self._seen[key] = known
            return known
        if session != self.session:
            return None
        self.check()
        got = self.runner.time(self.candidates[index], self.built[index], sizes, repeats,
                               share)
        if isinstance(got, Failure):
            self._quarantine(index, got, record)
            return None
        self.store.add_sample(record, session, rung, visit, self.now(), got)
        self.outcome.measured += 1
        self._seen[key] = got
        self.tell("sample", candidate=self.candidates[index], sizes=sizes, rung=rung, ns=got)
        return got

    def _session_with(self, points: Sequence[Sizes], index: int, rung: int) -> str:
        """The latest session in which this schedule and the default were visited at all of the
        points in a rung; else this session."""
        if self.effort.fresh:
            return self.session
        common: list[str] | None = None
        for sizes in points:
            for i in {0, index}:
                found = [s for s, r, _ in self.store.samples(self._record(i, sizes)) if r == rung]
                common = found if common is None else [s for s in common if s in found]
        return self.session if not common or self.session in common else common[-1]

    def _prune(self, points: Sequence[Sizes], alive: list[int], place: int, rung: Rung
               ) -> list[int]:
        ratios: dict[int, list[float]] = {index: [] for index in alive}
        sessions = {index: self._session_with(points, index, place) for index in alive}
        for sizes in points:  # outermost: the arrays of a point are made once
            for index in self._in_turn(alive, place):
                ns, base = (self._visit(i, sizes, sessions[index], place, 0, rung.repeats,
                                        rung.share) for i in (index, 0))
                if ns is not None and base is not None:
                    ratios[index].append(statistics.median(ns) / statistics.median(base))
        scores = {i: geomean(r) for i, r in ratios.items()
                  if i and i not in self.outcome.quarantined and r}
        best = sorted(scores, key=lambda i: (scores[i], i))
        left = self.effort.survivors(len(alive))
        if left == self.effort.finalists:
            best = [i for i in best if scores[i] < HOPELESS]
        return sorted([0, *best[:left - 1]])

    def _duel_session(self, alive: Sequence[int], needed: dict[Sizes, dict[int, int]]) -> str:
        """The latest session that ended a duel of all of ``alive``, as they are now, with the
        visits ``needed`` of each at these points; else this one."""
        if self.effort.fresh:
            return self.session
        common = [d["session"] for d in self.store.facts(
            self.store.kernel(self.task.problem), "duel")
            if d["machine"] == self.runner.machine.id and d["visits"] >= self.effort.visits
            and d["enough"] >= self.effort.least(2) and {*alive} <= {*d["places"]}]
        latest: dict[str, int] = {}
        for index in alive:
            for sizes in self.task.points:
                done: dict[str, int] = {}
                for session, rung, _ in self.store.samples(self._record(index, sizes)):
                    if rung == DUEL and session in common:
                        done[session] = done.get(session, 0) + 1
                        latest[session] = len(latest)
                common = [s for s in common if done.get(s, 0) >= needed[sizes][index]]
        return max(common, key=lambda s: latest[s]) if common and (
            self.session not in common) else self.session

    def _duel(self, finalists: dict[tuple[Sizes, ...], list[int]]) -> None:
        """Visits in turns: of the rivals at each point, and one of what only another phase left,
        so that every finalist has a time everywhere."""
        alive = sorted({i for left in finalists.values() for i in left})
        at = {p: left for points, left in finalists.items() for p in points}
        session = self._duel_session(alive, {p: {
            i: self.effort.least(len(rivals)) if i in rivals else 1 for i in alive}
            for p, rivals in at.items()})
        visits: dict[Sizes, dict[int, list[tuple[int, ...]]]] = {}
        for sizes, rivals in at.items():
            found = visits[sizes] = {}
            for visit in range(self.effort.visits):
                if visit >= self.effort.least(len(rivals)) and self._settled(found, rivals):
                    break
                for index in self._in_turn(rivals if visit else alive, DUEL + visit):
                    ns = self._visit(index, sizes, session, DUEL, visit, self.effort.repeats)
                    if ns is not None:
                        found.setdefault(index, []).append(ns)
        if 0 in self.outcome.quarantined:
            return
        left = [i for i in alive if i not in self.outcome.quarantined]
        self.outcome.times = {i: tuple(Timing.of(visits[p][i]) for p in self.task.points)
                              for i in left}
        self.outcome.verdict = decide(self.outcome.times)
        if session == self.session:
            self.store.add_fact(self.store.kernel(self.task.problem), "duel", {
                "machine": self.runner.machine.id, "session": session, "at": self.now(),
                "visits": self.effort.visits, "enough": self.effort.least(2), "places": left,
                "winners": self._winners(), "points": list(self.task.points)})
        self.tell("verdict", outcome=self.outcome)

    def _winners(self) -> list[str]:
        """The schedules that win in some phase, or at all points together."""
        groups = [*phases_of(self.task.points).values(), self.task.points]
        found = {decide({i: [t for t, p in zip(times, self.task.points, strict=True) if p in points]
                         for i, times in self.outcome.times.items()}).winner for points in groups}
        return [str(self.candidates[i].schedule) for i in sorted(found)]

    def _settled(self, visits: dict[int, list[tuple[int, ...]]], rivals: Sequence[int]) -> bool:
        """Whether at a point each of its phase's finalists differs from the default outside the
        noise, or so little that no more visits would show it."""
        times = {i: Timing.of(v) for i, v in visits.items()
                 if i in rivals and i not in self.outcome.quarantined}
        return 0 in times and all(apart(times[0], t) or close(times[0], t)
                                  for i, t in times.items() if i)
