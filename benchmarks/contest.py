"""Several schedules of one kernel against each other: in turns, in one process."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.building import Built
from autotune.keys import Machine
from autotune.space import Candidate, Sizes, Task
from autotune.stand import Stand
from autotune.stats import Timing, geomean

REPEATS = 5  # runs behind one sample, their median


@dataclass(frozen=True, slots=True)
class Contest:
    """Nanoseconds of each schedule by id, at each point, of each round; a sample is a median."""

    points: tuple[Sizes, ...]
    ns: Mapping[int, tuple[tuple[float, ...], ...]]

    def over(self, base: int, other: int) -> tuple[float, ...]:
        """Of each round the geometric mean over the points of time(base) / time(other): above 1 if
        the other one is faster. One schedule against itself is 1."""
        return tuple(geomean([b[i] / o[i] for b, o in zip(self.ns[base], self.ns[other],
                                                          strict=True)])
                     for i in range(len(self.ns[base][0])))

    def timing(self, index: int) -> Timing:
        """Of all points together, as the tuner states a time: each round is a visit."""
        rounds = zip(*self.ns[index], strict=True)
        return Timing.of([[round(geomean(of_points))] for of_points in rounds])


def contest(task: Task, points: Sequence[Sizes], ids: Iterable[int], built: Mapping[int, Built],
            machine: Machine, rounds: int) -> Contest:
    """Time the schedules ``ids`` at each point, so many rounds; each round begins with another."""
    order = sorted(set(ids))
    candidates: dict[int, Candidate] = {c.index: c for c in task.candidates()}
    found: dict[int, list[list[float]]] = {i: [] for i in order}
    for sizes in points:
        stand = Stand(task.problem, sizes, machine.isa, machine.threads)
        try:
            for place in range(rounds):
                for n in range(len(order)):
                    index = order[(n + place) % len(order)]
                    if not place:
                        found[index].append([])
                    times = stand.time(candidates[index], built[index], machine.policy, REPEATS)
                    found[index][-1].append(statistics.median(times))
        finally:
            stand.close()
    return Contest(tuple(points), {i: tuple(map(tuple, s)) for i, s in found.items()})
