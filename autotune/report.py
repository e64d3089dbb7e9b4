"""The report: a table as text, and one HTML page that needs nothing from anywhere."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.model import LABEL
from autotune.results import Result
from autotune.space import Sizes
from autotune.stats import geomean
from autotune.svg import COLORS, Plot
from autotune.text import table

_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1040px;color:#111}
table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 10px;text-align:left;
border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}svg{font-size:11px;margin:4px}
.grid{stroke:#e5e7eb}code{font-size:12px}h2{margin-top:1.6em}.plots{display:flex;flex-wrap:wrap}"""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel at one point, as the table shows it.

    Args:
        name, shape, schedule: texts. default_us, best_us: medians. noise: relative error of the
            winner's median. gain: default / winner. over_median: the median schedule of those that
            were measured / winner. measured, schedules: how many were, of how many.
            intensity: operations a byte. flops, nbytes: a second reached.
        roof: part of the machine's own ceiling at this intensity; None where it was not measured.
    """

    name: str
    shape: str
    schedule: str
    default_us: float
    best_us: float
    noise: float
    gain: float
    over_median: float
    measured: int
    schedules: int
    intensity: float
    flops: float
    nbytes: float
    roof: float | None


def rows_of_report(results: Sequence[Result], ceilings: Mapping[str, float] | None) -> list[Row]:
    """A row for each kernel and point. A kernel's winner may differ between prefill and the rest;
    each point shows the one of its phase."""
    made = []
    for result in results:
        for points in result.phases().values():
            verdict = result.verdict(points)
            for point in points:
                made.append(_row(result, point, verdict.winner, ceilings))
    return made


def _row(result: Result, point: Sizes, winner: int, ceilings: Mapping[str, float] | None) -> Row:
    at = result.points.index(point)
    default, best = result.times[0][at], result.times[winner][at]
    ratios = [ns / base for (_, p), (ns, base) in result.landscape.items() if p == point]
    nbytes, flops = result.problem.work(point)
    reached = flops / best.median * 1e9, nbytes / best.median * 1e9
    roof = None
    if ceilings:
        ideal = max(flops / ceilings["flops"], nbytes / ceilings["bytes"])
        roof = ideal / (best.median / 1e9)
    return Row(result.problem.op, result.problem.shape(point), result.schedules[winner],
               default.median / 1000, best.median / 1000, best.error / best.median,
               default.median / best.median, statistics.median(ratios) * default.median
               / best.median, len(ratios), len(result.problem.schedules()), flops / nbytes,
               *reached, roof)


def text(results: Sequence[Result], ceilings: Mapping[str, float] | None,
         quarantined: Mapping[str, Sequence[str]], modelled: Sequence[Mapping[str, Any]]) -> str:
    """The table, the totals, and what was quarantined."""
    rows = rows_of_report(results, ceilings)
    parts = []
    if rows:
        head = ("op", "shape", "schedule", "default us", "tuned us", "+-%", "gain", "over median",
                "visited", "GB/s", "GFLOP/s", "of roof")
        parts.append(table([head, *(
            (r.name, r.shape, r.schedule, f"{r.default_us:.1f}", f"{r.best_us:.1f}",
             f"{100 * r.noise:.1f}", f"{r.gain:.3f}", f"{r.over_median:.3f}",
             f"{r.measured}/{r.schedules}",
             f"{r.nbytes / 1e9:.1f}", f"{r.flops / 1e9:.1f}",
             "-" if r.roof is None else f"{r.roof:.2f}") for r in rows)]))
        parts.append(totals(rows))
    left = sum(len(r.unvisited()) for r in results)
    if left:
        parts.append(f"not visited: {left} of {sum(len(r.problem.schedules()) for r in results)} "
                     "schedules, which the static model did not rank among the best; "
                     "`tune --mode exhaustive` visits them")
    if ceilings:
        parts.append(f"measured ceilings: {ceilings['flops'] / 1e9:.1f} GFLOP/s of "
                     f"multiply-adds, {ceilings['bytes'] / 1e9:.1f} GB/s read")
    if quarantined:
        parts.append("quarantined:\n" + "\n".join(
            f"  {name}: {reason}" for name, reasons in quarantined.items() for reason in reasons))
    if modelled:
        parts.append(f"{LABEL}, not measured:\n" + table(
            [("target", "op", "shape", "schedule", f"{LABEL} us", "bound", "in use"), *(
                (m["target"], m["op"], m["shape"], m["schedule"], f"{m['ns'] / 1000:.1f}",
                 m["bound"], f"{m['use']:.2f}") for m in modelled)]))
    return "\n\n".join(parts) or "nothing was measured yet"


def totals(rows: Sequence[Row]) -> str:
    """The geometric means of a table."""
    return (f"geometric means over {len(rows)} rows: gain over default "
            f"{geomean([r.gain for r in rows]):.3f}, over the median schedule "
            f"{geomean([r.over_median for r in rows]):.3f}")


def page(results: Sequence[Result], ceilings: Mapping[str, float] | None,
         quarantined: Mapping[str, Sequence[str]], modelled: Sequence[Mapping[str, Any]],
         machine: Mapping[str, Any]) -> str:
    """The HTML page."""
    rows = rows_of_report(results, ceilings)
    parts = ["<!doctype html><html lang=en><head><meta charset=utf-8>",
             f"<title>deepinfer-tune</title><style>{_STYLE}</style></head><body>",
             "<h1>deepinfer-tune</h1>", f"<p>{_machine_text(machine)}</p>"]
    if rows:
        parts += [f"<p>{html.escape(totals(rows))}</p>", "<div class=plots>",
                  _gain_plot(rows), _roofline(rows, ceilings), "</div>"]
    parts.append(f"<pre>{html.escape(text(results, ceilings, quarantined, modelled))}</pre>")
    for result in results:
        parts.append(f"<h2>{html.escape(result.problem.op)}</h2>"
                     f"<code>{html.escape(result.problem.key)}</code><div class=plots>"
                     + "".join(_landscape(result, p) for p in result.points) + "</div>")
    return "".join([*parts, "</body></html>\n"])


def _machine_text(machine: Mapping[str, Any]) -> str:
    if not machine:
        return "no measurements"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return html.escape(f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads of "
                       f"{machine['cores']} cores; {versions}")


def _gain_plot(rows: Sequence[Row]) -> str:
    plot = Plot("gain over default", "kernels and sizes, by gain", "default / tuned")
    for place, row in enumerate(sorted(rows, key=lambda r: r.gain)):
        plot.point(place, row.gain, f"{row.name} {row.shape}: {row.schedule} x{row.gain:.3f}")
    plot.line([(0, 1.0), (max(1, len(rows) - 1), 1.0)])
    return plot.svg()


def _roofline(rows: Sequence[Row], ceilings: Mapping[str, float] | None) -> str:
    plot = Plot("roofline", "operations a byte", "GFLOP/s", x_log=True, y_log=True)
    shown = [r for r in rows if r.intensity > 0 and r.flops > 0]
    colors = {name: COLORS[i % 5] for i, name in enumerate(sorted({r.name for r in shown}))}
    for r in shown:
        plot.point(r.intensity, r.flops / 1e9, f"{r.name} {r.shape}", colors[r.name])
    if ceilings and shown:
        edge = ceilings["flops"] / ceilings["bytes"]
        low, high = min(r.intensity for r in shown), max(edge, *(r.intensity for r in shown))
        plot.line([(x, min(ceilings["flops"], x * ceilings["bytes"]) / 1e9)
                   for x in (min(low, edge), edge, high)])
    return plot.svg()


def _landscape(result: Result, point: Sizes) -> str:
    """Times of all schedules at a point, as far as each was measured."""
    plot = Plot(f"time against schedule, {result.problem.shape(point)}", "schedule",
                f"us at {', '.join(f'{n}={v}' for n, v in point) or 'fixed size'}")
    at = result.points.index(point)
    base = result.times[0][at].median / 1000
    found = {i: ns / b * base for (i, p), (ns, b) in result.landscape.items() if p == point}
    for place, us in sorted(found.items()):
        final = place in result.times
        plot.point(place, us, f"{result.schedules[place]}: {us:.1f} us"
                   + ("" if final else " (pruned)"), COLORS[0] if final else COLORS[5])
    plot.line([(min(found), base), (max(found), base)], COLORS[1])
    plot.x_ticks([(i, str(i)) for i in sorted(found)])
    return plot.svg()
