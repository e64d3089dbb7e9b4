"""Times with their noise, and the rule by which a schedule wins."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAD_TO_SIGMA = 1.4826  # of a normal distribution
MEDIAN_ERROR = 1.2533  # sqrt(pi/2): standard error of a median, in sigma/sqrt(n)
SIGMAS = 3.0  # two times differ if their intervals of this many standard errors do not meet
FLOOR = 0.01  # drift that no sample shows: closer than 1 % is never a difference


@dataclass(frozen=True, slots=True)
class Timing:
    """A time and how well it is known.

    Args:
        median, mad: nanoseconds; the median absolute deviation of single runs.
        error: standard error of the median. samples: runs behind it. visits: that they are from.
    """

    median: float
    mad: float
    error: float
    samples: int
    visits: int

    @staticmethod
    def of(visits: Sequence[Sequence[int]]) -> Timing:
        """From the runs of one or more visits.

        The median is the median of the visits' medians. Its error is the larger of two: what the
        spread inside the visits implies, and what the spread between them implies. Runs of one
        visit share the state of the machine, so many runs alone prove little.
        """
        medians = [float(statistics.median(v)) for v in visits]
        center = statistics.median(medians)
        runs = [ns for v in visits for ns in v]
        spread = statistics.median(abs(ns - center) for ns in runs)
        inside = statistics.median(
            [_mad(v) for v in visits]) * MAD_TO_SIGMA * MEDIAN_ERROR / math.sqrt(len(runs))
        between = _mad(medians) * MAD_TO_SIGMA * MEDIAN_ERROR / math.sqrt(len(medians))
        return Timing(center, spread, max(inside, between), len(runs), len(visits))

    @property
    def low(self) -> float:
        return self.median - max(SIGMAS * self.error, FLOOR / 2 * self.median)

    @property
    def high(self) -> float:
        return self.median + max(SIGMAS * self.error, FLOOR / 2 * self.median)


def _mad(values: Sequence[float]) -> float:
    center = statistics.median(values)
    return float(statistics.median(abs(v - center) for v in values))


def faster(a: Timing, b: Timing) -> bool:
    """Whether ``a`` is faster than ``b`` outside the noise; a single visit of one of them, which
    tells nothing of the noise between visits, never shows it."""
    return min(a.visits, b.visits) > 1 and a.high < b.low


def apart(a: Timing, b: Timing) -> bool:
    """Whether one of them is faster outside the noise."""
    return faster(a, b) or faster(b, a)


def close(a: Timing, b: Timing) -> bool:
    """Whether their medians differ by less than what is ever called a difference."""
    return abs(a.median / b.median - 1) < FLOOR


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which schedule to use.

    Args:
        winner: its id; 0, the default, unless another one is faster outside the noise.
        gain: geometric mean over the points of default time / winner time; 1.0 for the default.
        gains: that ratio at each point. reason: why, in one sentence.
    """

    winner: int
    gain: float
    gains: tuple[float, ...]
    reason: str


def decide(times: Mapping[int, Sequence[Timing]]) -> Verdict:
    """The winner among schedules that were timed at the same points, side by side.

    A schedule can win only if it is faster than the default at one point outside the noise, faster
    at all points together, and at none slower by more than ``FLOOR`` in the medians, whatever the
    noise: in enough of it nothing is ever shown to be slower. Of these the one with the largest
    mean gain is best; the winner is the lowest id among those that the best one does not beat
    outside the noise, so that equal schedules give the same answer every time.

    Args:
        times: id -> timing at each point; 0 is there.
    """
    default = times[0]
    points = range(len(default))

    def gains(index: int) -> tuple[float, ...]:
        return tuple(default[p].median / times[index][p].median for p in points)

    able = [i for i in sorted(times) if i
            and not any(times[i][p].median > (1 + FLOOR) * default[p].median for p in points)
            and geomean(gains(i)) > 1 and any(faster(times[i][p], default[p]) for p in points)]
    if not able:
        return Verdict(0, 1.0, (1.0,) * len(default), "no schedule beats the default outside the "
                       "noise" if len(times) > 1 else "there is only the default")
    best = max(able, key=lambda i: (geomean(gains(i)), -i))
    alike = [i for i in able if i == best or not any(
        faster(times[best][p], times[i][p]) for p in points)]
    winner = min(alike)
    tied = f", tied with {', '.join(str(i) for i in alike if i != winner)}" if alike[1:] else ""
    return Verdict(winner, geomean(gains(winner)), gains(winner),
                   f"faster outside the noise{tied}")
