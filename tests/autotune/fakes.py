"""A target, a runner and a machine whose times are made up, so that searches are exact."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune import keys, ranking, results, search, space
from autotune.building import Built
from autotune.effort import Effort
from autotune.keys import Machine, Policy
from autotune.measure import Failure
from autotune.space import Candidate, Problem, Sizes, Task
from deepinfer.ir.op import Attrs
from deepinfer.targets.base import Kernel, LoweredKernel, Schedule, Target, grid

OP = "silu_mul"  # any op: nothing of it is run
MACHINE = Machine("fake", "generic", 1, 1, 1 << 20, (("compiler", "none"),), Policy())
POINTS = ((("rows", 1),), (("rows", 256),))
SPACE = grid(a=(0, 1, 2, 3), b=(0, 1, 2, 3))


def lower(program: Any, symbol: str) -> LoweredKernel:
    raise AssertionError("the fake runner builds nothing")


def build(spec: Any) -> Any:
    raise AssertionError("the fake runner builds nothing")


def fake_target(schedules: Sequence[Schedule]) -> Target:
    made = Kernel(OP, build, "N", lambda spec: tuple(schedules), lambda spec: 0)
    return Target("fake", {}, (), {OP: made}, lower, lambda *a, **k: {}, lambda: {})


def use_space(monkeypatch: pytest.MonkeyPatch, schedules: Sequence[Schedule] = SPACE) -> None:
    """Let problems of the target "fake" have these schedules."""
    target = fake_target(schedules)
    for module in (space, keys, results):
        monkeypatch.setattr(module, "load_target", lambda name: target)
    keys.sources_digest.cache_clear()


def problem(width: int = 64) -> Problem:
    row = ("temp", "bf16", (("rows", 1), width))
    return Problem("fake", OP, Attrs({"limit": 7.0}), (row, row))


def task(points: tuple[Sizes, ...] = POINTS, width: int = 64) -> Task:
    return Task(problem(width), 1, points)


def noise(*key: object) -> float:
    """In -1..1, the same every time."""
    held = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(held[:4], "little") / 2**31 - 1


@dataclass
class FakeRunner:
    """Times are ``ns(candidate, sizes)`` with a relative ``jitter``.

    Args:
        guess: what the static model is taken to say; None: ``ns``.
        failures: by schedule id and stage ("build", "gate", "time"). bits: by id, where they are
            not "same". source: of the text that it says it built. spent: nanoseconds that its
            visits took, warm-up and all.
    """

    ns: Callable[[Candidate, Sizes], float]
    jitter: float = 0.001
    guess: Callable[[Candidate, Sizes], float] | None = None
    failures: dict[tuple[int, str], Failure] = field(default_factory=dict)
    bits: dict[int, str] = field(default_factory=dict)
    reference_bits: str = "same"
    source: str = "text"
    machine: Machine = MACHINE
    calls: list[tuple[str, int]] = field(default_factory=list)
    spent: float = 0.0
    before: Callable[[str, int], None] = lambda what, index: None

    def _note(self, what: str, index: int) -> Failure | None:
        self.before(what, index)
        self.calls.append((what, index))
        return self.failures.get((index, what))

    def expected(self, candidate: Candidate, sizes: Sizes) -> float:
        return (self.guess or self.ns)(candidate, sizes)

    def build(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Built | Failure]]:
        for c in candidates:
            built = Built("lib", "kernel", f"{self.source}{c.index}")
            yield c, self._note("build", c.index) or built

    def gate(self, candidate: Candidate, built: Built, sizes: Sizes) -> str | Failure:
        return self._note("gate", candidate.index) or self.bits.get(candidate.index, "same")

    def reference(self, candidate: Candidate, built: Built, sizes: Sizes) -> str | Failure:
        return self._note("reference", candidate.index) or self.reference_bits

    def time(self, candidate: Candidate, built: Built, sizes: Sizes, repeats: int,
             share: float = 1.0) -> tuple[int, ...] | Failure:
        failure = self._note("time", candidate.index)
        if failure is not None:
            return failure
        base, policy = self.ns(candidate, sizes), self.machine.policy.part(share)
        fit = int(policy.seconds * 1e9 / base) - policy.warmup
        runs = min(repeats, max(policy.least, fit))
        self.spent += base * (policy.warmup + runs)
        key = (candidate.index, sizes, len(self.calls))
        return tuple(round(base * (1 + self.jitter * noise(*key, i))) for i in range(runs))

    def close(self) -> None:
        pass

    def count(self, what: str) -> int:
        return sum(w == what for w, _ in self.calls)


class Ticks:
    """A clock that goes on by one nanosecond a look."""

    def __init__(self) -> None:
        self.at = 10**18

    def __call__(self) -> int:
        self.at += 1
        return self.at


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, what: str, /, **detail: Any) -> None:
        self.events.append((what, detail))


def run_search(runner: FakeRunner, store: Any, session: str = "s", *,
               effort: Effort | None = None, given: Task | None = None,
               now: Callable[[], int] | None = None, only: Sequence[int] | None = None
               ) -> search.Outcome:
    """As a session does it, where nothing has won before; ``only``: ids, whatever the model says.
    """
    what, much = given or task(), effort or Effort()
    return search.Search(what, runner, store, session, much, tell=Heard(), check=lambda: None,
                         now=now or Ticks(), only=only or ranking.visited(what, runner, much)).run()


def landscape(seed: int, spread: float = 1.0, bumps: float = 1.0
              ) -> Callable[[Candidate, Sizes], float]:
    """Times from 1 to 1 + spread, smooth in the knobs with bumps; the best place is anywhere.
    Without the bumps it is what a good model would say."""

    def ns(candidate: Candidate, sizes: Sizes) -> float:
        cost, rows = 0.0, dict(sizes).get("rows", 1)
        for name, value in candidate.schedule.items:
            best = int(4 * (noise(seed, name) + 1) / 2)
            cost += abs(value - best) / 6
        bump = bumps * (noise(seed, candidate.schedule.items) + 1) / 4
        return 20_000 * rows**0.5 * (1 + spread * (cost + bump) / 1.5)

    return ns


def temporary(tmp_path: Path, name: str = "t.db") -> Any:
    from autotune.store import Store

    return Store(tmp_path / name)

