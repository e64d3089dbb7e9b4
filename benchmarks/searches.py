"""Searches that are measured: a runner with a stopwatch, and the two modes to search in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.building import Built
from autotune.effort import Effort
from autotune.keys import Machine
from autotune.measure import Failure, LocalRunner
from autotune.ranking import visited
from autotune.results import Result, results
from autotune.search import Search
from autotune.space import Candidate, Sizes, Task
from autotune.store import Store

PARTS = ("build", "gate", "time")


@contextmanager
def cache_in(folder: Path | None) -> Iterator[None]:
    """Builds go to this cache directory; None: the usual one."""
    before = os.environ.get("DEEPINFER_CACHE_DIR")
    if folder is not None:
        os.environ["DEEPINFER_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            del os.environ["DEEPINFER_CACHE_DIR"]
            if before is not None:
                os.environ["DEEPINFER_CACHE_DIR"] = before


@dataclass
class Stopwatch:
    """A runner that knows how long each kind of request took in all, and keeps what it built."""

    inner: LocalRunner
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    built: dict[Candidate, Built] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        return self.inner.machine

    def expected(self, candidate: Candidate, sizes: Sizes) -> float:
        return self.inner.expected(candidate, sizes)

    def _clocked(self, part: str, ask: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return ask()
        finally:
            self.spent[part] += time.perf_counter() - begin

    def build(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Built | Failure]]:
        made = self.inner.build(candidates)
        while (got := self._clocked("build", lambda: next(made, None))) is not None:
            if isinstance(got[1], Built):
                self.built[got[0]] = got[1]
            yield got

    def gate(self, *args: Any) -> str | Failure:
        return self._clocked("gate", lambda: self.inner.gate(*args))

    def reference(self, *args: Any) -> str | Failure:
        return self._clocked("gate", lambda: self.inner.reference(*args))

    def time(self, *args: Any) -> tuple[int, ...] | Failure:
        return self._clocked("time", lambda: self.inner.time(*args))

    def close(self) -> None:
        self.inner.close()


class Mode:
    """One way to search: its runner, database and build cache.

    Args:
        effort: of its searches. machine: to measure. folder: where its database and cache are.
        cache: whether the cache is its own, too.
    """

    def __init__(self, effort: Effort, machine: Machine, folder: Path, cache: bool) -> None:
        folder.mkdir(exist_ok=True)
        self.effort, self.cache = effort, folder / "cache" if cache else None
        self.store = Store(folder / "tuning.sqlite3")
        self.runner = Stopwatch(LocalRunner(machine, machine.cores))

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Start all processes and compile what every library shares, with kernels of which no
        search is measured; none of it counts."""
        points = {t.candidates()[0]: t.points[0] for t in tasks}
        with cache_in(self.cache):
            for candidate, made in list(self.runner.build(list(points))):
                if isinstance(made, Built):
                    self.runner.time(candidate, made, points[candidate], 3)
        self.runner.spent = dict.fromkeys(PARTS, 0.0)

    def search(self, task: Task) -> dict[str, float]:
        """Search one kernel, as if nothing had won before; returns the seconds of each part, and
        of "all"."""
        before, begin = dict(self.runner.spent), time.perf_counter()
        with cache_in(self.cache):
            Search(task, self.runner, self.store, "benchmark", self.effort,
                   tell=lambda what, /, **detail: None, check=lambda: None,
                   now=time.time_ns, only=visited(task, self.runner, self.effort)).run()
        spent = {p: self.runner.spent[p] - before[p] for p in PARTS}
        return spent | {"all": time.perf_counter() - begin}

    def result(self, task: Task) -> Result | None:
        return next((r for r in results(self.store, self.runner.machine.id)
                     if r.problem == task.problem), None)

    def close(self) -> None:
        self.runner.close()
        self.store.close()
