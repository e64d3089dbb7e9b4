"""Small plots as SVG text: points and lines on linear or logarithmic axes."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 40  # margins
COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")


@dataclass(slots=True)
class Plot:
    """One plot.

    Args:
        title, x_label, y_label: texts. width, height: pixels. x_log, y_log: logarithmic axes.
    """

    title: str
    x_label: str
    y_label: str
    width: int = 460
    height: int = 260
    x_log: bool = False
    y_log: bool = False
    _points: list[tuple[float, float, str, str]] = field(default_factory=list)
    _lines: list[tuple[list[tuple[float, float]], str]] = field(default_factory=list)
    _ticks: list[tuple[float, str]] = field(default_factory=list)

    def point(self, x: float, y: float, label: str, color: str = COLORS[0]) -> None:
        """A dot; ``label`` is shown when the pointer rests on it."""
        self._points.append((x, y, label, color))

    def line(self, points: Sequence[tuple[float, float]], color: str = COLORS[5]) -> None:
        self._lines.append((list(points), color))

    def x_ticks(self, ticks: Sequence[tuple[float, str]]) -> None:
        """Names of places on the x axis, instead of numbers."""
        self._ticks = list(ticks)

    def svg(self) -> str:
        """The element; empty without anything to show."""
        places = [(x, y) for x, y, _, _ in self._points] + [p for ps, _ in self._lines for p in ps]
        if not places:
            return ""
        xs = _Axis([x for x, _ in places], LEFT, self.width - RIGHT, self.x_log)
        ys = _Axis([y for _, y in places], self.height - BOTTOM, TOP, self.y_log)
        parts = [f'<svg width="{self.width}" height="{self.height}" role="img" '
                 f'aria-label="{html.escape(self.title, quote=True)}">']
        for value in ys.ticks():
            y = ys.at(value)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{self.width - RIGHT}" y2="{y:.1f}" '
                         f'class="grid"/><text x="{LEFT - 5}" y="{y + 4:.1f}" '
                         f'text-anchor="end">{_number(value)}</text>')
        for value, name in self._ticks or [(v, _number(v)) for v in xs.ticks()]:
            parts.append(f'<text x="{xs.at(value):.1f}" y="{self.height - BOTTOM + 15}" '
                         f'text-anchor="middle">{html.escape(name)}</text>')
        for points, color in self._lines:
            path = " ".join(f"{xs.at(x):.1f},{ys.at(y):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"/>')
        for x, y, label, color in self._points:
            parts.append(f'<circle cx="{xs.at(x):.1f}" cy="{ys.at(y):.1f}" r="3.5" fill="{color}">'
                         f"<title>{html.escape(label)}</title></circle>")
        middle = (LEFT + self.width - RIGHT) // 2
        parts.append(f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">'
                     f"{html.escape(self.x_label)}</text>")
        parts.append(f'<text x="12" y="{self.height // 2}" text-anchor="middle" '
                     f'transform="rotate(-90 12 {self.height // 2})">'
                     f"{html.escape(self.y_label)}</text></svg>")
        return "".join(parts)


class _Axis:
    """Maps values to pixels."""

    def __init__(self, values: Sequence[float], first: float, last: float, log: bool) -> None:
        self.log, self.first, self.last = log, first, last
        self.low: float
        self.high: float
        low, high = min(values), max(values)
        if log:
            self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high))
            if self.low == self.high:
                self.high += 1
        else:
            room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
            self.low, self.high = low - room, high + room

    def at(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self.first + (place - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**e for e in range(int(self.low), int(self.high) + 1)]
        raw = (self.high - self.low) / 4
        step = 10.0 ** math.floor(math.log10(raw))
        step *= next(m for m in (1, 2, 5, 10) if m * step >= raw)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, int(self.high // step) + 1)]


def _number(value: float) -> str:
    return f"{value:.3g}"
