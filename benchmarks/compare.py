"""Two files of records side by side: fails on a regression outside the noise.

    python benchmarks/compare.py OLD.jsonl NEW.jsonl          # exit code 1 on a regression
    python benchmarks/compare.py OLD.jsonl NEW.jsonl --json --tolerance 0.05

The test is the tuner's (`autotune/stats.py`): a median and its standard error, from the spread of
the samples (their MAD as that of a normal distribution) and, where a record was taken several
times, from the spread between those; two medians differ if their intervals of three standard
errors, and of at least half the tolerance to each side, do not meet. Fewer than three samples
decide nothing. A record that is gone fails, too: it may hide a regression.

Exit codes: 0 nothing is worse; 1 a regression, or a record is missing; 2 files that do not compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import FORMAT, show_table

from autotune.stats import MAD_TO_SIGMA, MEDIAN_ERROR, SIGMAS, Timing

TOLERANCE = 0.03  # of a median: drift between runs that their samples do not show
LEAST = 3  # samples that say something about noise
BAD = ("regression", "missing")


class Unusable(Exception):
    """Files that cannot be compared; the text says what, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Series:
    """All samples of one quantity in one file.

    Args:
        visits: the samples of each record. unit, better: "lower" or "higher".
    """

    visits: tuple[tuple[float, ...], ...]
    unit: str
    better: str

    @property
    def count(self) -> int:
        return sum(map(len, self.visits))

    def timing(self) -> Timing:
        # The tuner's samples are whole nanoseconds; its arithmetic is that of any number.
        return Timing.of(self.visits)  # type: ignore[arg-type]

    def interval(self, tolerance: float) -> tuple[float, float]:
        """Where the median may lie."""
        made = self.timing()
        half = max(SIGMAS * made.error, tolerance / 2 * abs(made.median))
        return made.median - half, made.median + half


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one quantity.

    Args:
        key: name and parameters. verdict: "same", "faster", "regression", "undecided", "new" or
            "missing". ratio: new median over old, None where one is not there.
    """

    key: str
    verdict: str
    unit: str
    old: float | None
    new: float | None
    ratio: float | None

    def to_json(self) -> dict[str, Any]:
        name, params = json.loads(self.key)
        return {"name": name, "params": params, "verdict": self.verdict, "unit": self.unit,
                "old": self.old, "new": self.new, "ratio": self.ratio}


def read(path: Path) -> tuple[dict[str, Series], list[dict[str, Any]]]:
    """The quantities of a file, and the distinct machines they were measured on.

    Raises:
        Unusable: the file cannot be read, or a line is no record.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    machines: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"the records cannot be read: {error}\n  where: {path}\n"
                       "  next:  name a file that a benchmark wrote with --out") from None
    for number, line in enumerate(lines, 1):
        try:
            held = json.loads(line)
            if held["format"] != FORMAT:
                raise ValueError(f"format is {held['format']!r}, expected {FORMAT}")
            key = json.dumps([held["name"], held["params"]], sort_keys=True)
            held["samples"] = tuple(float(s) for s in held["samples"])
            assert held["better"] in ("lower", "higher") and held["samples"]
            if held["machine"] not in machines:
                machines.append(held["machine"])
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise Unusable(f"line {number} is no record: {type(error).__name__}: {error}\n"
                           f"  where: {path}\n  next:  measure again with --out") from None
        found.setdefault(key, []).append(held)
    return {key: Series(tuple(h["samples"] for h in records), records[0]["unit"],
                        records[0]["better"]) for key, records in found.items()}, machines


def require_one_machine(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    """Refuse records of different machines, or taken with different tools.

    Raises:
        Unusable: names the first field that differs.
    """
    distinct = [m for i, m in enumerate([*old, *new]) if m not in [*old, *new][:i]]
    if len(distinct) > 1:
        name, a, b = _difference(distinct[0], distinct[1])
        raise Unusable(f"the records are of different machines or tools: {name} is {a!r} and {b!r}"
                       "\n  where: OLD.jsonl and NEW.jsonl\n"
                       "  next:  measure both on one machine, or say --any-machine")


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, Any, Any]:
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, Mapping) and isinstance(y, Mapping) and x != y:
            inner, x, y = _difference(x, y)
            return f"{name}.{inner}", x, y
        if x != y:
            return name, x, y
    raise AssertionError("they differ")


def judge(key: str, old: Series | None, new: Series | None, tolerance: float) -> Change:
    """The verdict on one quantity."""
    if old is None or new is None:
        there = old or new
        assert there is not None
        median = there.timing().median
        return Change(key, "new" if old is None else "missing", there.unit,
                      None if old is None else median, None if new is None else median, None)
    before, after = old.timing().median, new.timing().median
    ratio = after / before if before else None
    if min(old.count, new.count) < LEAST:
        verdict = "undecided"
    else:
        (low, high), (new_low, new_high) = old.interval(tolerance), new.interval(tolerance)
        rose, fell = new_low > high, new_high < low
        worse, better = (rose, fell) if new.better == "lower" else (fell, rose)
        verdict = "regression" if worse else "faster" if better else "same"
    return Change(key, verdict, new.unit, before, after, ratio)


def compare(old: Mapping[str, Series], new: Mapping[str, Series], tolerance: float
            ) -> list[Change]:
    """All quantities of both files, in the order of the old one."""
    return [judge(k, old.get(k), new.get(k), tolerance) for k in dict.fromkeys([*old, *new])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD.jsonl")
    parser.add_argument("new", type=Path, metavar="NEW.jsonl")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE,
                        help="a change below this part is never a difference (%(default)s)")
    parser.add_argument("--any-machine", action="store_true",
                        help="compare records of different machines or tools all the same")
    parser.add_argument("--partial", action="store_true", help="NEW may lack records of OLD")
    args = parser.parse_args(argv)
    try:
        (old, old_machines), (new, new_machines) = read(args.old), read(args.new)
        if not args.any_machine:
            require_one_machine(old_machines, new_machines)
    except Unusable as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    changes = compare(old, new, args.tolerance)
    counts = Counter(c.verdict for c in changes)
    if args.json:
        print(json.dumps({
            "changes": [c.to_json() for c in changes], "counts": counts, "test": {
                "standard_errors": SIGMAS, "mad_to_sigma": MAD_TO_SIGMA,
                "median_error": MEDIAN_ERROR, "tolerance": args.tolerance, "least": LEAST}}))
    else:
        show_table("new over old", ("what", "old", "new", "unit", "new/old", "verdict"),
                   [_row(c) for c in changes])
        print(", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())))
    bad = BAD[:1] if args.partial else BAD
    return 1 if any(c.verdict in bad for c in changes) else 0


def _row(change: Change) -> tuple[object, ...]:
    name, params = json.loads(change.key)
    shown = [f"{v:.4g}" if v is not None else "-" for v in (change.old, change.new)]
    what = ", ".join(f"{k}={v}" for k, v in params.items())
    return (f"{name}: {what}", *shown, change.unit,
            f"{change.ratio:.3f}" if change.ratio is not None else "-", change.verdict)


if __name__ == "__main__":
    raise SystemExit(main())
