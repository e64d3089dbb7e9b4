"""Writes the winners into a target's schedules.json, and checks what stands there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.results import Result
from autotune.space import Sizes
from autotune.stats import Verdict, geomean
from autotune.store import Store
from deepinfer.codegen.schedules import FORMAT, Entry, parse, read_entries
from deepinfer.errors import TargetError
from deepinfer.targets.base import Schedule

Entries = dict[tuple[str, str], Entry]


@dataclass(frozen=True, slots=True)
class Change:
    """One entry that differs; ``before`` or ``after`` is None where there is no entry."""

    kernel: str
    phase: str
    before: Entry | None
    after: Entry | None

    def text(self) -> str:
        def name(entry: Entry | None) -> str:
            return "default" if entry is None else str(entry.schedule)

        gain = self.after.evidence["gain"] if self.after is not None else None
        sign = "+" if self.before is None else "-" if self.after is None else "~"
        where = f" [{self.phase}]" if self.phase else ""
        return (f"{sign} {self.kernel}{where}: {name(self.before)} -> {name(self.after)}"
                + (f", expected x{gain:.3f}" if gain is not None else ""))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What ``apply`` would write.

    Args:
        entries: of the whole file. changes: against the file as it is. stale: kernels whose
            measured source is not what would be built today; their entries stay as they are.
        gain: geometric mean of the expected gains of all kernels that were tuned.
    """

    entries: Entries
    changes: tuple[Change, ...]
    stale: tuple[str, ...]
    gain: float


def propose(results: Sequence[Result], path: Path, machine: Mapping[str, Any],
            source: Callable[[Result, int], str]) -> Proposal:
    """The file with the winners of these results; all other entries stay.

    Args:
        source: digest of the text that (result, schedule id) would be built from today.
    """
    before = dict(read_entries(path))
    after, stale, gains = dict(before), [], []
    for result in results:
        space = [str(s) for s in result.problem.schedules()]
        names = {i: result.schedules[i] for i in result.times}
        wins = {phase: result.verdict(points) for phase, points in result.phases().items()}
        used = {0, *(v.winner for v in wins.values())}
        if any(i >= len(space) or space[i] != names[i] or source(result, i) != result.sources[i]
               for i in used):
            stale.append(result.problem.key)
            continue
        for phase in ("", "prefill"):
            after.pop((result.problem.key, phase), None)
        after |= _entries(result, wins, machine)
        gains += [v.gain for v in wins.values()]
    changes = [Change(k, p, before.get((k, p)), after.get((k, p)))
               for k, p in sorted({*before, *after})
               if _line(before.get((k, p))) != _line(after.get((k, p)))]
    return Proposal(after, tuple(changes), tuple(stale), geomean(gains) if gains else 1.0)


def _entries(result: Result, wins: Mapping[str, Verdict], machine: Mapping[str, Any]) -> Entries:
    """Entries of one kernel: one for all phases where they agree, else one for prefill and one for
    the rest. A phase that was not measured keeps the default, by an entry if there must be one."""
    key, schedules = result.problem.key, result.problem.schedules()
    rest, prefill = wins.get(""), wins.get("prefill")
    made: Entries = {}
    if rest is not None and rest.winner:
        made[key, ""] = _entry(result, "", schedules[rest.winner], rest, machine)
    wanted = prefill.winner if prefill is not None else 0
    if result.problem.size_names() and wanted != (rest.winner if rest is not None else 0):
        verdict = prefill or Verdict(0, 1.0, (), "not measured")
        made[key, "prefill"] = _entry(result, "prefill", schedules[wanted], verdict, machine)
    return made


def _entry(result: Result, phase: str, schedule: Schedule, verdict: Verdict,
           machine: Mapping[str, Any]) -> Entry:
    points = result.phases().get(phase, ())
    shown = []
    for point in points:
        at = result.points.index(point)
        shown.append({"sizes": dict(point), "default_us": _us(result.times[0][at].median),
                      "tuned_us": _us(result.times[verdict.winner][at].median)})
    return Entry(result.problem.key, phase, schedule, {
        "gain": round(verdict.gain, 3), "points": shown,
        "machine": f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads"})


def _us(ns: float) -> float:
    return round(ns / 1000, 2)


def _line(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return json.dumps({"kernel": entry.kernel, "phase": entry.phase,
                       "schedule": dict(entry.schedule.items), **entry.evidence})


def file_text(entries: Mapping[tuple[str, str], Entry]) -> str:
    """The file: an entry a line, sorted by kernel and phase."""
    lines = [_line(entries[name]) for name in sorted(entries)]
    return (f'{{"format": {FORMAT}, "schedules": [\n' + ",\n".join(lines) + "\n]}\n")


def write(path: Path, entries: Entries, store: Store, at: int) -> None:
    """Replace the file at once, and keep its old text for ``undo``.

    Raises:
        TargetError: it cannot be written.
    """
    text = file_text(entries)
    parse(text.encode(), str(path))  # what is written can be read
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    _replace(path, text)
    store.query("INSERT INTO applied (at, path, before, after) VALUES (?, ?, ?, ?)",
                at, str(path), before, text)


def undo(path: Path, store: Store) -> None:
    """Put back what stood in the file before the last ``write``.

    Raises:
        TargetError: nothing was written, or the file was changed since.
    """
    rows = store.query("SELECT * FROM applied WHERE path = ? ORDER BY name DESC LIMIT 1", str(path))
    if not rows:
        raise TargetError("nothing was applied to this file from this database", where=str(path),
                          next="take an older file from version control")
    now = path.read_text(encoding="utf-8") if path.exists() else ""
    if now != rows[0]["after"]:
        raise TargetError("the file was changed since it was applied", where=str(path),
                          next="take an older file from version control")
    if rows[0]["before"]:
        _replace(path, rows[0]["before"])
    else:
        path.unlink()
    store.query("DELETE FROM applied WHERE name = ?", rows[0]["name"])


def _replace(path: Path, text: str) -> None:
    try:
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise TargetError(f"the schedules cannot be written: {error.strerror}", where=str(path),
                          next="give another file with --out, or run where you may write"
                          ) from None


def entry_points(entry: Entry, fallback: Sequence[Sizes]) -> tuple[Sizes, ...]:
    """The sizes that an entry was measured at."""
    points = [tuple((str(n), int(v)) for n, v in p["sizes"].items())
              for p in entry.evidence.get("points", ())]
    return tuple(points) or tuple(fallback)

