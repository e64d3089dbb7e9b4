"""Interleaved A/B timing: ratios that hold on a shared, noisy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PAIRS = 15
# One-sided 90 % quantiles of Student's t, by degrees of freedom from 1; the last for more.
_T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350,
        1.345, 1.341, 1.337, 1.333, 1.330, 1.328, 1.325, 1.323, 1.321, 1.319, 1.318, 1.316, 1.315,
        1.314, 1.313, 1.311, 1.310)


def half_width(samples: Sequence[float]) -> float:
    """From the mean of samples to its one-sided 90 % bound."""
    t = _T90[min(len(samples) - 1, len(_T90)) - 1]
    return t * statistics.stdev(samples) / len(samples) ** 0.5


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios b / a of paired measurements.

    Args:
        ratios: one a pair. a, b: medians of what was measured.
    """

    ratios: tuple[float, ...]
    a: float
    b: float

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def lower(self) -> float:
        """Lower one-sided 90 % bound of the mean ratio."""
        return statistics.fmean(self.ratios) - half_width(self.ratios)

    @property
    def upper(self) -> float:
        """Upper one-sided 90 % bound of the mean ratio."""
        return statistics.fmean(self.ratios) + half_width(self.ratios)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(a: Callable[[], float], b: Callable[[], float], pairs: int = PAIRS) -> Ratio:
    """Measure a and b in turns, who goes first alternating.

    Args:
        a, b: measure once and return a number (seconds, or a rate).
    """
    found: list[tuple[float, float]] = []
    for i in range(pairs):
        if i % 2:
            second, first = b(), a()
        else:
            first, second = a(), b()
        found.append((first, second))
    return Ratio(tuple(y / x for x, y in found), statistics.median(x for x, _ in found),
                 statistics.median(y for _, y in found))
