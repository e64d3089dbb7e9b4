"""How much a search measures: rungs that prune, then a duel of what is left."""

from __future__ import annotations

from dataclasses import dataclass

DUEL = 99  # the rung of the last, interleaved visits, which alone decide


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Args:
        mode: "halving" prunes before the duel, "exhaustive" lets all schedules duel.
        repeats: runs of a visit. visits: of each finalist, in turns.
        finalists: that halving leaves, the default included. eta: one in so many survives a rung.
        fresh: measure even what the database has.
    """

    mode: str = "halving"
    repeats: int = 24
    visits: int = 5
    finalists: int = 3
    eta: int = 4
    fresh: bool = False

    def rungs(self, schedules: int) -> tuple[int, ...]:
        """Repeats of each rung of pruning; none where all may duel at once."""
        if self.mode == "exhaustive" or schedules <= self.finalists:
            return ()
        made, left = [], schedules
        while left > self.finalists:
            made.append(left)
            left = self.survivors(left)
        last = len(made)
        return tuple(max(3, self.repeats // self.eta ** (last - i)) for i in range(last))

    def survivors(self, schedules: int) -> int:
        """How many go on from a rung, the default included."""
        return max(self.finalists, -(-schedules // self.eta))

    def visits_of(self, schedules: int) -> int:
        """Visits to one point that a search of so many schedules makes."""
        total, left = 0, schedules
        for _ in self.rungs(schedules):
            total, left = total + left, self.survivors(left)
        return total + left * self.visits
