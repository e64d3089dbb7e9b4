"""How much a search measures: what it visits, rungs that prune, then a duel of what is left."""

from __future__ import annotations

from dataclasses import dataclass

DUEL = 99  # the rung of the last, interleaved visits, which alone decide
FEW = 8  # runs of the shortest visit of a rung, if there is time for them


@dataclass(frozen=True, slots=True)
class Rung:
    """One round of pruning, of one visit to each schedule that is left.

    Args:
        repeats: runs of a visit, at most. share: part of a full visit's time after which it ends.
    """

    repeats: int
    share: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Args:
        mode: "halving" visits the static model's best and prunes them before the duel,
            "exhaustive" lets all schedules duel.
        repeats: runs of a visit. visits: of each finalist, in turns.
        enough: visits after which halving ends the duel at a point where all is settled.
        finalists: that halving leaves of a phase, the default included.
        eta: one in so many is visited and survives a rung, and has so many times the time in the
            next.
        fresh: measure even what the database has.
    """

    mode: str = "halving"
    repeats: int = 24
    visits: int = 5
    enough: int = 3
    finalists: int = 2
    eta: int = 4
    fresh: bool = False

    def visited(self, schedules: int) -> int:
        """How many of a space are built, gated and timed at all, the default included; the static
        model is the rung before the first."""
        if self.mode == "exhaustive":
            return schedules
        return min(schedules, self.survivors(schedules))

    def rungs(self, schedules: int) -> tuple[Rung, ...]:
        """The rounds of pruning; none where all may duel at once."""
        if self.mode == "exhaustive" or schedules <= self.finalists:
            return ()
        last, left = 0, schedules
        while left > self.finalists:
            last, left = last + 1, self.survivors(left)
        return tuple(Rung(min(self.repeats, max(FEW, self.repeats // 2 ** (last - i))),
                          1 / self.eta ** (last - i)) for i in range(last))

    def survivors(self, schedules: int) -> int:
        """How many go on from a rung, the default included."""
        return max(self.finalists, -(-schedules // self.eta))

    def least(self, rivals: int) -> int:
        """Visits to a point that a duel of so many makes, however clear it is: one where there is
        only the default, so that its time is known."""
        if self.mode == "exhaustive":
            return self.visits
        return 1 if rivals == 1 else min(self.enough, self.visits)

    def visits_of(self, schedules: int, phases: int = 1) -> int:
        """Visits to one point that a search of so many schedules makes at most; each of the phases
        may have finalists of its own."""
        total, left = 0, schedules
        for _ in self.rungs(schedules):
            total, left = total + left, self.survivors(left)
        if total:
            left = min(schedules, 1 + (left - 1) * phases)
        return total + left * self.visits
