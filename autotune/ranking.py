"""Which schedules of a space halving visits: the default, the static model's best, earlier winners.

A bad schedule takes as long to build and to gate as a good one, so the first round of pruning is
the model's, which costs nothing. What it leaves out is neither built nor gated nor timed: it is
not visited, which says nothing against it. An exhaustive search visits all.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.effort import Effort
from autotune.measure import Runner
from autotune.results import phases_of
from autotune.space import Task
from autotune.stats import geomean
from autotune.store import Store
from deepinfer.codegen.schedules import path_of, read_entries


def visited(task: Task, runner: Runner, effort: Effort, also: Iterable[int] = ()) -> list[int]:
    """The ids to visit, ascending: the default, the best of the model, and ``also``. One that the
    gate refuses is not replaced: whether it does is not known beforehand.

    Phases may want different schedules, so the best of each are taken in turns, ties to the lowest
    id.
    """
    candidates = task.candidates()
    count = effort.visited(len(candidates))
    if count == len(candidates):
        return [c.index for c in candidates]
    places: dict[int, int] = {}  # the best one of all phases
    for points in phases_of(task.points).values():
        expected = {c.index: geomean([runner.expected(c, p) for p in points]) for c in candidates}
        for place, index in enumerate(sorted(expected, key=lambda i: (expected[i], i))):
            places[index] = min(place, places.get(index, place))
    best = [i for i in sorted(places, key=lambda i: (places[i], i)) if i]
    return sorted({0, *best[:count - 1], *also})


def winners(task: Task, store: Store, machine: str) -> set[int]:
    """Ids of what won a duel of this kernel on this machine, or ships for it: a search that did
    not visit them could replace them by something slower. Duels of before this was noted do not
    say who won."""
    problem = task.problem
    names = [str(s) for s in problem.schedules()]
    won = {name for duel in store.facts(store.kernel(problem), "duel")
           if duel["machine"] == machine for name in duel.get("winners", ())}
    won |= {str(entry.schedule) for (kernel, _), entry in
            read_entries(path_of(problem.target)).items() if kernel == problem.key}
    return {names.index(name) for name in won if name in names}
