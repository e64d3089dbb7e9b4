"""What a file of records says of the goals: a table for the README, and a plot.

    python benchmarks/goals.py benchmarks.jsonl                        # the table, as Markdown
    python benchmarks/goals.py benchmarks.jsonl --readme README.md --plot goals.png

Kernels are summed up: one line for an op, its number of rows and what it is compared with.
A ratio counts as its one-sided 90 % bound, seconds and bytes as their largest sample.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import Unusable
from records import FORMAT

from autotune.stats import geomean

BEGIN, END = "<!-- goals: benchmarks/goals.py writes this -->", "<!-- end of goals -->"
UNSAID = ("model", "threads", "dtype", "isa", "shape", "family", "kernel")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table.

    Args:
        what: name and parameters. values: what the goal is about, one of each record. holds: of how
            many of them the benchmark says that it is met. sign, goal: as in ``<= 0.05``. unit: of
            values and goal.
    """

    what: str
    values: tuple[float, ...]
    holds: int
    sign: str
    goal: float
    unit: str

    @property
    def value(self) -> float:
        return geomean(list(self.values))

    @property
    def worst(self) -> float:
        return min(self.values) if self.sign == ">=" else max(self.values)

    @property
    def reached(self) -> float:
        """1 where the goal is just met, more where it is exceeded."""
        return self.value / self.goal if self.sign == ">=" else self.goal / self.value

    def cells(self) -> tuple[str, ...]:
        value, count, holds = number(self.value, self.unit), len(self.values), "yes"
        if count > 1:
            value += f" ({count} kernels, worst {number(self.worst, self.unit)})"
            holds = f"{self.holds} of {count}"
        elif not self.holds:
            holds = "**no**"
        return self.what, value, f"{self.sign} {number(self.goal, self.unit)}", holds


def number(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    return f"{value:.3g}" + ("" if unit in ("ratio", "share") else f" {unit}")


def value_of(record: dict[str, Any]) -> float:
    """What the goal of a record is about."""
    more = record["more"]
    if "median" in more:
        return float(more["upper" if str(more["goal"]).startswith("<") else "lower"])
    return max(record["samples"])


def lines(records: Iterable[dict[str, Any]]) -> list[Line]:
    """One line of each goal, in the order of the file; of a repeated record the last counts."""
    found: dict[tuple[str, str, float, str], dict[str, tuple[float, bool]]] = {}
    for record in records:
        goal = re.match(r"(>=|<=|<) ([0-9.e+]+)", str(record["more"].get("goal")))
        if goal is None:
            continue
        said = {k: v for k, v in record["params"].items() if k not in UNSAID}
        if record["name"] == "tuned over":  # one line for all kernels
            said = {"over": said["over"]}
        what = ", ".join([record["name"], *(f"{k} {v}" for k, v in said.items())])
        if record["params"].get("model") == "bundled":
            what += ", bundled model"
        key = (what, goal[1], float(goal[2]), record["unit"])
        found.setdefault(key, {})[json.dumps(record["params"], sort_keys=True)] = (
            value_of(record), bool(record["more"]["holds"]))
    return [Line(what, tuple(value for value, _ in of.values()),
                 sum(holds for _, holds in of.values()), sign, bound, unit)
            for (what, sign, bound, unit), of in found.items()]


def machine_of(records: Sequence[dict[str, Any]]) -> str:
    machine = records[-1]["machine"]
    return f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads"


def markdown(found: Sequence[Line], machine: str) -> str:
    rows = [("what", "measured", "goal", "holds"), ("---", "---", "---", "---"),
            *(line.cells() for line in found)]
    return "\n".join([f"Machine: {machine}.", "", *("| " + " | ".join(row) + " |" for row in rows)])


def plot(found: Sequence[Line], machine: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.24 * len(found) + 1.2))
    reached = [line.reached for line in found]
    axes.barh(range(len(found)), [r - 1 for r in reached], left=1,
              color=["#4c78a8" if r >= 1 else "#e45756" for r in reached])
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), [line.what for line in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("of the goal; right of 1 it is met")
    axes.set_title(machine, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file.

    Raises:
        Unusable: the file cannot be read, holds none, or a line is no record.
    """
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not records or any(r["format"] != FORMAT for r in records):
            raise ValueError(f"{len(records)} records, expected some, of format {FORMAT}")
        return records
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"the records cannot be read: {type(error).__name__}: {error}\n"
                       f"  where: {path}\n"
                       "  next:  name a file that a benchmark wrote with --out") from None


def put(readme: Path, text: str) -> None:
    """Replace what stands between the two marks."""
    old = readme.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise Unusable(f"there is no place for the table: expected one {BEGIN!r} and then one "
                       f"{END!r}\n  where: {readme}\n  next:  put both marks where it belongs")
    head, tail = old.split(BEGIN)[0], old.split(END)[1]
    part = readme.with_name(readme.name + ".part")
    part.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")
    part.replace(readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--readme", type=Path, metavar="FILE", help="put the table there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot there")
    args = parser.parse_args()
    try:
        records = read(args.records)
        found, machine = lines(records), machine_of(records)
        text = markdown(found, machine)
        if args.readme is None:
            print(text)
        else:
            put(args.readme, text)
        if args.plot is not None:
            plot(found, machine, args.plot)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
