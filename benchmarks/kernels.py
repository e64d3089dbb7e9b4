"""Single kernels: time, GB/s, GFLOP/s, and fractions of this machine's own ceilings.

    python benchmarks/kernels.py                                  # the kernels of `mini`
    python benchmarks/kernels.py --model v4.1-flash --family gemm experts --rows 1 256
    python benchmarks/kernels.py --op packed_linear_fp8 --out kernels.jsonl --plot kernels.png

Kernels are built and timed by the tuner's test stand, with the schedule that ships, on weights
that come from memory. Where a ratio is a goal it is of interleaved pairs (ceiling or peer over
kernel, so more is better) with a one-sided 90 % bound. Nothing here fails.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from ceilings import matmul_seconds, policy
from pairs import Ratio, compare
from records import Goal, Record, Report, arguments, ratio_record, settle, shown
from shapes import FAMILIES, Point, format_of, points
from traffic import node_bytes, node_flops

from autotune.building import Built
from autotune.clock import Clock
from autotune.keys import Machine
from autotune.measure import Failure, LocalRunner
from autotune.space import Candidate
from autotune.stand import Stand
from autotune.stats import geomean
from deepinfer.ir.types import Kind

REPEATS = 5  # runs behind one sample, their median
LARGE = 256  # rows from which on arithmetic is the ceiling
# M = 1 by format: against the bandwidth counted in stored bytes, and torch's bf16 matmul.
SMALL_GOALS = {"fp8": {"read": Goal(0.8), "torch bf16": Goal(1.6)},
               "fp4": {"read": Goal(0.8), "torch bf16": Goal(3.0)}, "bf16": {"read": Goal(0.8)}}


def goals(point: Point, isa: str) -> Mapping[str, Goal]:
    """The goals of a linear at its number of rows on this ISA level."""
    if point.family != "gemm":
        return {}
    kind = format_of(point.problem.op)
    if point.rows == 1:
        return SMALL_GOALS[kind]
    if point.rows >= LARGE and kind != "bf16":
        return {"torch bf16" if isa == "amx" else "fma": Goal(0.8)}
    return {}


def work_of(point: Point, stand: Stand) -> tuple[int, int]:
    """Bytes of weights and caches that the kernel reads, and operations of its products. For one
    without either: bytes of what it is given and makes, and operations as ``codegen.cost`` takes.
    """
    node, loose = point.problem.node(), point.problem.work(point.sizes)
    experts = {}
    if point.family == "experts":
        at = next(i for i, v in enumerate(node.inputs) if v.name == "offsets")
        experts = {"": int((np.diff(stand.arrays[at]) > 0).sum())}
    step = replace(point.step(), experts=experts)
    return int(node_bytes(node, step)) or loose[0], node_flops(node, step) or loose[1]


class Bench:
    """Measures points one after another.

    Args:
        args: settled options.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.clock = Clock(args.isa, args.threads)
        self.policy = policy(cold=not args.smoke, seconds=0.05 if args.smoke else 1.0)

    def close(self) -> None:
        self.clock.close()

    def arithmetic(self) -> float:
        """Operations per second that registers allow, bf16 tiles where there are any."""
        for unit in ("amx", "fma"):
            operations, times = self.clock.multiply_adds(unit, self.policy, REPEATS)
            if operations:
                return operations / min(times) * 1e9
        raise AssertionError("every level has multiply-adds")

    def references(self, point: Point, nbytes: int, flops: int) -> dict[str, Callable[[], float]]:
        """What a kernel is compared with: seconds that each would take for the same work."""
        weights = any(v.kind is Kind.WEIGHT for v in point.problem.node().inputs)
        how = self.policy if weights else replace(self.policy, cold_bytes=0)

        def read() -> float:
            got, times = self.clock.reads(nbytes, how, REPEATS)
            return statistics.median(times) * 1e-9 * max(1.0, nbytes / got)

        def fma() -> float:
            operations, times = self.clock.multiply_adds("fma", self.policy, REPEATS)
            return statistics.median(times) * 1e-9 * flops / operations

        made: dict[str, Callable[[], float]] = {"read": read, "fma": fma}
        if point.family == "gemm":
            m, n, k = point.matrix
            for dtype in ("bf16", "fp32"):
                made[f"torch {dtype}"] = matmul_seconds(m, n, k, dtype, self.args.threads,
                                                        self.policy.cold_bytes)
        return made

    def wanted(self, point: Point) -> tuple[str, ...]:
        """The ceiling that binds at this size, and the peers."""
        if point.family != "gemm":
            return ("read",)
        peers = ("torch bf16", "torch fp32") if point.rows in (1, LARGE) else ("torch bf16",)
        return ("fma" if point.rows >= LARGE else "read", *peers)

    def measure(self, point: Point, built: Built) -> list[Record]:
        """Records of one point: the kernel's time, and a ratio to each reference."""
        candidate = point.candidate()
        params = {"model": self.args.model, "op": point.problem.op, "shape": point.shape(),
                  "rows": point.rows, "family": point.family, "threads": self.args.threads}
        stand = Stand(point.problem, point.sizes, self.args.isa, self.args.threads)
        nbytes, flops = work_of(point, stand)
        taken: list[float] = []

        def kernel() -> float:
            times = stand.time(candidate, built, self.policy, REPEATS)
            taken.append(statistics.median(times) * 1e-9)
            return taken[-1]

        try:
            ratios: dict[str, Ratio] = {}
            found, asked = self.references(point, nbytes, flops), goals(point, self.args.isa)
            for name in self.wanted(point):
                ratios[name] = compare(kernel, found[name], self.args.pairs)
        finally:
            stand.close()
        seconds = statistics.median(taken)
        more = {"bytes": nbytes, "flops": flops, "GB/s": nbytes / seconds / 1e9,
                "GFLOP/s": flops / seconds / 1e9, "schedule": str(candidate.schedule)}
        return [Record("kernel", params, tuple(1e6 * t for t in taken), "us", more), *(
            ratio_record("kernel ratio", params | {"over": name}, ratio, asked.get(name),
                         reference_us=1e6 * ratio.b) for name, ratio in ratios.items())]


def built(found: Iterable[Point], args: Any) -> dict[Candidate, Built | Failure]:
    """All kernels, built on all cores by the tuner's builders."""
    runner = LocalRunner(Machine.here(args.isa, args.threads), args.threads)
    try:
        return dict(runner.build(list(dict.fromkeys(p.candidate() for p in found))))
    finally:
        runner.close()


def rows_of(records: Iterable[Record]) -> list[tuple[object, ...]]:
    """One line of the table a kernel and size."""
    lines: dict[str, dict[str, Record]] = {}
    for record in records:
        params = {k: v for k, v in record.params.items() if k != "over"}
        lines.setdefault(str(params), {})[record.params.get("over", "")] = record
    return [(f"{r[''].params['op']} {r[''].params['shape']}", r[""].params["rows"],
             f"{r[''].median:.1f}", f"{r[''].more['GB/s']:.2f}", f"{r[''].more['GFLOP/s']:.2f}",
             *(shown(r[o].more) if o in r else "-"
               for o in ("read", "fma", "torch bf16", "torch fp32")))
            for r in lines.values()]


def summary(records: Iterable[Record]) -> list[tuple[object, ...]]:
    """Geometric means of the ratios that have a goal, by op, rows and what they are over."""
    groups: dict[tuple[str, int, str, str], list[Record]] = {}
    for r in records:
        if "goal" in r.more:
            groups.setdefault((r.params["op"], r.params["rows"], r.params["over"],
                               r.more["goal"]), []).append(r)
    return [(f"{op}, {rows} rows, over {over}", goal, len(rs),
             f"{geomean([r.more['median'] for r in rs]):.2f}",
             f"{min(r.more['lower'] for r in rs):.2f}", sum(r.more["holds"] for r in rs))
            for (op, rows, over, goal), rs in groups.items()]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="mini", help="mini, v4.1-flash, tiny or a directory")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--op", nargs="+", default=[], help="only kernels of these ops")
    parser.add_argument("--rows", nargs="+", type=int, help="of a step (1..8 and 256; 1, 16, 256)")
    parser.add_argument("--context", type=int, default=2048, help="positions of each request")
    parser.add_argument("--most-gflop", type=float, default=50.0, help="leave larger points out")
    parser.add_argument("--most-mb", type=float, default=2000.0, help="leave larger points out")
    args = settle(parser.parse_args())
    if args.smoke:
        args.model, args.rows, args.context = "tiny", args.rows or [1], 64
    found = list(points(args.model, args.family, args.rows, args.context, args.op))
    works = [p.problem.work(p.sizes) for p in found]
    kept = [p for p, (nbytes, flops) in zip(found, works, strict=True)
            if flops <= 1e9 * args.most_gflop and nbytes <= 1e6 * args.most_mb]
    libraries = built(kept, args)
    report, bench = Report(args), Bench(args)
    try:
        for point in kept:
            library = libraries[point.candidate()]
            if isinstance(library, Failure):
                print(f"{point.problem.op} {point.shape()}: {library.kind}: {library.reason}",
                      file=sys.stderr)
            else:
                report.add(*bench.measure(point, library))
        peak = bench.arithmetic()
    finally:
        bench.close()
    report.table(f"kernels of {args.model}: {report.machine['cpu']}, {args.isa}, {args.threads} "
                 f"threads, {peak / 1e9:.0f} GFLOP/s in registers; ratios: median [lower 90 %]",
                 ("kernel", "rows", "us", "GB/s", "GFLOP/s", "read", "fma", "torch bf16",
                  "torch fp32"), rows_of(report.records))
    if any("goal" in r.more for r in report.records):
        report.table("goals, geometric means over shapes", ("goal of", "goal", "shapes", "geomean",
                     "lowest bound", "hold"), summary(report.records))
    if len(kept) < len(found):
        print(f"{len(found) - len(kept)} points left out: above --most-gflop or --most-mb")
    ratios = [r for r in report.records if r.params.get("over") in ("read", "fma")
              and math.isfinite(r.median)]
    report.plot([f"{r.params['op']} {r.params['shape']}, {r.params['over']}" for r in ratios],
                [r.median for r in ratios], "fraction of the ceiling", line=0.8)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
