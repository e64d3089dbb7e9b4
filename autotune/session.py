"""A run over many kernels: a budget of time, interruption at any moment, and going on later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.effort import Effort
from autotune.measure import Runner
from autotune.ranking import visited, winners
from autotune.results import phases_of
from autotune.search import Listener, Outcome, Search
from autotune.space import Task
from autotune.store import Store
from deepinfer.errors import TargetError


class BudgetSpent(Exception):
    """The time given to the run is over."""


@dataclass(slots=True)
class Session:
    """One run.

    Args:
        name: of the run, in the database. runner, store: see there. effort: per kernel.
        budget: seconds; None for no limit. tell: hears events. clock: seconds, monotonic.
        now: nanoseconds since the epoch.
    """

    name: str
    runner: Runner
    store: Store
    effort: Effort
    tell: Listener
    budget: float | None = None
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], int] = time.time_ns
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, tasks: Sequence[Task]) -> str:
        """Tune the tasks in order; returns the run's state, "done", "budget" or "interrupted".

        Whatever happens, all that was measured is in the database. An interruption is raised again
        after it was noted.
        """
        begun = self.clock()

        def check() -> None:
            if self.budget is not None and self.clock() - begun >= self.budget:
                raise BudgetSpent

        self.store.set_state(self.name, "running")
        try:
            chosen = [self._chosen(t) for t in tasks]
            most = [self.effort.visits_of(len(ids), len(phases_of(t.points))) * len(t.points)
                    for t, ids in zip(tasks, chosen, strict=True)]
            total, done = sum(most), 0
            self.tell("begin", total=total, kernels=len(tasks))
            for task, ids, visits in zip(tasks, chosen, most, strict=True):
                self.tell("kernel", task=task, visited=len(ids))
                search = Search(task, self.runner, self.store, self.name, self.effort,
                                tell=self.tell, check=check, now=self.now, only=ids)
                self.outcomes.append(search.run())
                done += visits
                self.tell("progress", done=done, total=total)
        except BudgetSpent:
            self.store.set_state(self.name, "budget")
            return "budget"
        except KeyboardInterrupt:
            self.store.set_state(self.name, "interrupted")
            raise
        self.store.set_state(self.name, "done")
        return "done"

    def _chosen(self, task: Task) -> list[int]:
        """The ids to visit. A run that goes on visits what it began with, whatever has shipped or
        won elsewhere since: times are compared within one run."""
        kernel = self.store.kernel(task.problem)
        names = [str(s) for s in task.problem.schedules()]
        for fact in self.store.facts(kernel, "chosen"):
            if fact["session"] == self.name and {*fact["schedules"]} <= {*names}:
                return sorted(names.index(n) for n in fact["schedules"])
        ids = visited(task, self.runner, self.effort,
                      winners(task, self.store, self.runner.machine.id))
        self.store.add_fact(kernel, "chosen", {"session": self.name,
                                               "schedules": [names[i] for i in ids]})
        return ids


def plan_json(tasks: Sequence[Task], effort: Effort, **settings: Any) -> dict[str, Any]:
    """What a run is to do, as the database holds it."""
    return {"tasks": [t.to_json() for t in tasks], "settings": settings,
            "effort": {n: getattr(effort, n) for n in Effort.__slots__}}


def find_run(store: Store, name: str | None) -> tuple[str, str, dict[str, Any]]:
    """The run of this name, or the latest that is not done: name, state, plan.

    Raises:
        TargetError: there is none.
    """
    runs = store.runs()
    for found, _, state, plan in runs:
        if found == name or (name is None and state != "done"):
            return found, state, plan
    raise TargetError(f"no run '{name}' in the database" if name else
                      "no unfinished run in the database", where=str(store.path),
                      next="`deepinfer-tune status` lists runs; `deepinfer-tune tune` begins one")
