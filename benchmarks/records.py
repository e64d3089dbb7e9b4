"""Records of benchmarks: all samples, what they belong to, as lines of JSON, a table and a plot."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pairs import PAIRS, Ratio

from autotune.keys import Machine, Policy
from deepinfer.compiler import default_levels
from deepinfer.graph.make_model import MODELS, make_model
from deepinfer.settings import cache_dir, usable_cpus

FORMAT = 1
REST = 0.01  # seconds between sides, so that threads that spin for work have gone to sleep
WIDTH = 160  # columns of a table that goes to a file
ROOT = Path(__file__).parents[1]
HIGHER = {"tokens/s", "GB/s", "GFLOP/s", "ratio"}  # of all other units less is better
SUFFIXES = {".py", ".h", ".cc", ".cpp", ".json"}


@dataclass(frozen=True, slots=True)
class Record:
    """One quantity that was measured several times.

    Args:
        name: what was measured. params: of what, as JSON data; name and params are its identity.
        samples: every measurement. unit: of a sample.
        more: what was derived from it: rates, ratios with their bounds and goals.
    """

    name: str
    params: Mapping[str, Any]
    samples: tuple[float, ...]
    unit: str
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def better(self) -> str:
        return "higher" if self.unit in HIGHER else "lower"

    @property
    def key(self) -> str:
        """Equal exactly for records of the same quantity."""
        return json.dumps([self.name, self.params], sort_keys=True)

    def to_json(self, machine: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": FORMAT, "name": self.name, "params": dict(self.params),
                "samples": list(self.samples), "unit": self.unit, "better": self.better,
                "more": dict(self.more), "machine": dict(machine), "source": dict(source)}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a ratio should be: at least ``least`` or at most ``most``; it holds if the one-sided
    90 % bound on that side does."""

    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def holds(self, ratio: Ratio) -> bool:
        return (ratio.lower >= self.least if self.least is not None
                else ratio.upper <= (self.most or 0.0))


def told(ratio: Ratio, goal: Goal | None = None) -> dict[str, Any]:
    """A ratio of pairs as JSON data."""
    made: dict[str, Any] = {"median": ratio.median, "lower": ratio.lower, "upper": ratio.upper,
                            "pairs": len(ratio.ratios)}
    return made if goal is None else made | {"goal": str(goal), "holds": goal.holds(ratio)}


def ratio_record(name: str, params: Mapping[str, Any], ratio: Ratio, goal: Goal | None = None,
                 **more: Any) -> Record:
    """A ratio of pairs as a record of its own, all pairs as samples."""
    return Record(name, params, ratio.ratios, "ratio", told(ratio, goal) | more)


def machine_facts(isa: str, threads: int) -> dict[str, Any]:
    """The machine and its tools, as the tuner keys its measurements, and the peers' library."""
    facts = Machine.here(isa, threads, Policy()).to_json()
    del facts["policy"]  # each record says how it was taken
    try:
        facts["versions"]["torch"] = version("torch")
    except PackageNotFoundError:
        facts["versions"]["torch"] = "not installed"
    return facts


@cache
def source_facts() -> Mapping[str, str]:
    """The commit, where git knows one, and a digest of all sources as they are."""
    digest = hashlib.sha256()
    for top in ("deepinfer", "autotune", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True,
                          text=True)
    return {"commit": done.stdout.strip() or "unknown", "digest": digest.hexdigest()[:16]}


def arguments(text: str | None, **parts: Any) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=text,
                                   formatter_class=argparse.RawDescriptionHelpFormatter, **parts)
    made.add_argument("--smoke", action="store_true", help="tiny sizes: seconds, no figures")
    made.add_argument("--threads", type=int, help="of kernels and peers (all cores)")
    made.add_argument("--pairs", type=_pairs, help=f"interleaved measurements of a ratio ({PAIRS})")
    made.add_argument("--out", type=Path, metavar="FILE", help="append records, a JSON line each")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot there")
    return made


def _pairs(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of pairs, expected an int >= 2: "
                                         "one pair has no bound")
    return int(text)


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what was left open: threads, pairs, and the ISA level that is measured."""
    args.threads = args.threads or usable_cpus()
    args.pairs = args.pairs or (2 if args.smoke else PAIRS)
    args.isa = default_levels()[0]
    return args


def model_of(name: str) -> Path:
    """A model's directory; the random ones are made once."""
    if name not in MODELS:
        return Path(name)
    path = cache_dir() / "models" / name
    if not (path / "config.json").exists():
        make_model(name, path, seed=0)
    return path


class Report:
    """Collects records: written out one by one as they are made, shown together at the end.

    Args:
        args: settled options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.records = args, list[Record]()
        self.machine = machine_facts(args.isa, args.threads)

    def add(self, *records: Record) -> None:
        self.records += records
        if self.args.out is not None:
            with self.args.out.open("a", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps(record.to_json(self.machine, source_facts())) + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        show_table(title, columns, rows)

    def plot(self, labels: Sequence[str], values: Sequence[float], axis: str, *,
             line: float | None = None) -> None:
        """Horizontal bars, if a plot was asked for; ``line`` marks what they are compared with."""
        if self.args.plot is None:
            return
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(9, max(2.0, 0.24 * len(labels) + 1)))
        axes.barh(range(len(labels)), values, color="#4c78a8")
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        if line is not None:
            axes.axvline(line, color="#e45756", linewidth=1)
        figure.tight_layout()
        figure.savefig(self.args.plot, dpi=120)
        plt.close(figure)


def shown(told_: Mapping[str, Any] | None) -> str:
    """A ratio in a table: median, the bound that its goal is about, and whether that holds."""
    if told_ is None:
        return "-"
    mark = {True: " ok", False: " MISSED", None: ""}[told_.get("holds")]
    goal = f" ({told_['goal']})" if "goal" in told_ else ""
    bound = told_["upper" if str(told_.get("goal")).startswith("<") else "lower"]
    return f"{told_['median']:.3g} [{bound:.3g}]{goal}{mark}"


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are right-aligned."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=escape(title), title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if not i else "right", overflow="fold",
                         min_width=40 if not i else None)
    for row in rows:
        shown.add_row(*(escape(str(cell)) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(shown)
