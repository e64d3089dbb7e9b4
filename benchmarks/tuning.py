"""The tuner: what it gains, and what halving saves against an exhaustive search.

    python benchmarks/tuning.py --plan                    # what would run, and about how long
    python benchmarks/tuning.py --budget 30m --out tuning.jsonl

Each kernel is searched twice, halving and exhaustive, each with its own database and its own empty
build cache, in turns who goes first. Then the winners, the default that ships and the median
schedule of the space (of the exhaustive search) run against each other in interleaved rounds.
Goals: halving's time is at most a quarter of that of the exhaustive search, stated twice: builds,
gates and timings all counted, and without builds; its winner is within 3 % of the other's, 1.15
times as fast as the median schedule (geometric mean), and never slower than the default outside
what the tuner takes for noise. Every schedule passes the gate before its first timing. Halving
builds, gates and times only what its static model ranks best; it is not told what ships.

Kernels are taken by their share of the time of a step, until --share of it is covered, or until the
budget would not hold one more; the output says which were left out. Nothing here fails.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contest import Contest, contest
from pairs import Ratio
from records import Goal, Record, Report, arguments, settle, shown, told
from searches import PARTS, Mode

from autotune.building import Built
from autotune.cli import length_of_time
from autotune.commands import tasks_of_model, tunable
from autotune.effort import Effort
from autotune.inputs import can_make
from autotune.keys import Machine, Policy, compile_body
from autotune.measure import Failure, LocalRunner
from autotune.progress import duration, title
from autotune.results import Result, phases_of
from autotune.space import ROWS, Sizes, Task
from autotune.stats import faster, geomean
from deepinfer.codegen.schedules import choose

MODES = ("exhaustive", "halving")
SHARE = 0.25  # of the exhaustive search's time
BUILD = 0.6  # seconds of one build on one core, for the plan
START = 0.2  # seconds to make the arrays of one point, for the plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A kernel with its share of a step, averaged over the points, and its estimated seconds."""

    task: Task
    share: float
    seconds: float


def plan(tasks: Sequence[Task], machine: Machine, efforts: Sequence[Effort], rounds: int
         ) -> list[Planned]:
    """All tasks, those that take most of a step first; default schedules are built and timed."""
    runner, ns = LocalRunner(machine, machine.cores), dict[tuple[Task, Sizes], float]()
    try:
        built = dict(runner.build([t.candidates()[0] for t in tasks]))
        for task in tasks:
            first = task.candidates()[0]
            made = built[first]
            for sizes in task.points if isinstance(made, Built) else ():
                got = runner.time(first, made, sizes, 3, 0.1)
                ns[task, sizes] = 0.0 if isinstance(got, Failure) else statistics.median(got)
    finally:
        runner.close()
    able = [t for t in tasks if all(ns.get((t, p)) for p in t.points)]
    largest = max(len(t.points) for t in able)
    totals = [sum(t.uses * ns[t, t.points[min(i, len(t.points) - 1)]] for t in able)
              for i in range(largest)]
    made_plan = []
    for task in able:
        shares = [task.uses * ns[task, task.points[min(i, len(task.points) - 1)]] / totals[i]
                  for i in range(largest)]
        made_plan.append(Planned(task, statistics.fmean(shares), _estimate(
            task, [ns[task, p] * 1e-9 for p in task.points], machine, efforts, rounds)))
    return sorted(made_plan, key=lambda p: -p.share)


def _estimate(task: Task, seconds: Sequence[float], machine: Machine, efforts: Sequence[Effort],
              rounds: int) -> float:
    """Seconds that the searches of a task and its contest may take."""
    count, policy = len(task.problem.schedules()), machine.policy
    total = 0.0
    for effort in efforts:
        visited = effort.visited(count)
        total += visited * BUILD / machine.cores + (5 + len(seconds)) * START
        for each in seconds:
            full = min(each * (policy.warmup + effort.repeats), policy.seconds + 3 * each) + 0.003
            rungs = effort.rungs(visited)
            short, part = (visited, rungs[0].share) if rungs else (0, 1.0)  # of the first rung
            total += full * (effort.visits_of(visited) - short) + (full * part + 0.003) * short
            total += 3 * visited * each * machine.threads + visited * 0.01  # gate, on one thread
    return total + 4 * rounds * sum(7 * each + 0.001 for each in seconds)


def chosen(planned: Sequence[Planned], share: float, budget: float | None) -> list[Planned]:
    """The first ones: until their share is reached, or the budget holds no more."""
    kept: list[Planned] = []
    for each in planned:
        taken = sum(k.seconds for k in kept)
        if sum(k.share for k in kept) >= share or (
                budget is not None and taken + each.seconds > budget):
            break
        kept.append(each)
    return kept


def median_id(result: Result, points: Sequence[Sizes]) -> int:
    """The schedule in the middle of the space by its mean time at these points; of two in the
    middle the faster one."""
    scores = {i: geomean([result.landscape[i, p][0] / result.landscape[i, p][1] for p in points])
              for i in result.schedules if all((i, p) in result.landscape for p in points)}
    ordered = sorted(scores, key=lambda i: (scores[i], i))
    return ordered[(len(ordered) - 1) // 2]


def default_id(task: Task, phase: str) -> int:
    """The schedule that ships for the phase."""
    problem = task.problem
    schedule = choose(problem.kernel(), problem.spec(), problem.target, phase or "decode")
    return problem.schedules().index(schedule)


class Bench:
    """Searches and contests, and the records of them.

    Args:
        args: settled options. report: for the records. machine: to measure. modes: by name.
    """

    def __init__(self, args: Any, report: Report, machine: Machine, modes: dict[str, Mode]) -> None:
        self.args, self.report, self.machine, self.modes = args, report, machine, modes
        self.seconds: dict[str, list[dict[str, float]]] = {m: [] for m in modes}
        self.ratios: dict[str, list[tuple[float, ...]]] = {}

    def task(self, task: Task, place: int) -> None:
        """Search one kernel in both modes, then let the winners of each phase compete."""
        for name in MODES[::1 if place % 2 else -1]:
            self.seconds[name].append(self.modes[name].search(task))
        found = {name: mode.result(task) for name, mode in self.modes.items()}
        every, halved = found["exhaustive"], found["halving"]
        if every is None or halved is None:
            print(f"no result: {title(task)}", file=sys.stderr)
            return
        built = {c.index: b for c, b in self.modes["exhaustive"].runner.built.items()
                 if c.problem == task.problem}
        for phase, points in phases_of(task.points).items():
            ids = {"exhaustive": every.verdict(points).winner,
                   "halving": halved.verdict(points).winner,
                   "median": median_id(every, points), "default": default_id(task, phase)}
            got = contest(task, points, ids.values(), built, self.machine, self.args.pairs)
            self._compare(task, phase, points, ids, got)

    def _compare(self, task: Task, phase: str, points: Sequence[Sizes], ids: dict[str, int],
                 got: Contest) -> None:
        params = {"model": self.args.model, "op": task.problem.op, "kernel": title(task),
                  "rows": [max((n for _, n in p), default=1) for p in points],
                  "threads": self.args.threads}
        names = {name: str(task.problem.schedules()[i]) for name, i in ids.items()}
        tuned = ids["halving"]
        for base, goal in (("exhaustive", Goal(0.97)), ("median", None), ("default", None)):
            samples = got.over(ids[base], tuned)
            ratio = Ratio(samples, got.timing(ids[base]).median, got.timing(tuned).median)
            more: dict[str, Any] = {"schedules": names, "same": ids[base] == tuned}
            if base == "default":
                slower = faster(got.timing(ids[base]), got.timing(tuned))
                more |= {"goal": ">= 1 but for noise", "holds": not slower}
            self.ratios.setdefault(base, []).append(samples)
            self.report.add(Record("tuned over", params | {"over": base}, samples, "ratio",
                                   told(ratio, goal) | more))

    def totals(self) -> None:
        """Geometric means over all kernels and phases, and the time of the searches."""
        params = {"model": self.args.model, "threads": self.args.threads}
        goals = {"exhaustive": Goal(0.97), "median": Goal(1.15)}
        for base, rows in self.ratios.items():
            means = tuple(geomean(list(of_round)) for of_round in zip(*rows, strict=True))
            ratio = Ratio(means, 0.0, 0.0)
            # The default is what ships, and equal to it is no miss.
            more = {"goal": ">= 1 but for noise", "holds": ratio.upper >= 1.0}
            self.report.add(Record("tuned over, all", params | {"over": base}, means, "ratio",
                                   told(ratio, goals.get(base)) | {"shapes": len(rows)}
                                   | (more if base == "default" else {})))
        counted = {"all": ("all",), "gate and time": ("gate", "time"), **{p: (p,) for p in PARTS}}
        for part, of in counted.items():
            spent = {m: sum(s[p] for s in self.seconds[m] for p in of) for m in MODES}
            share = spent["halving"] / spent["exhaustive"]
            goal = ({"goal": f"<= {SHARE:g}", "holds": share <= SHARE}
                    if part in ("all", "gate and time") else {})
            self.report.add(Record("halving's share of time", params | {"part": part}, (share,),
                                   "share", {"median": share, "upper": share, "lower": share,
                                             "seconds": spent} | goal))


def show(report: Report) -> None:
    """Tables of what the report holds."""
    rows: dict[str, dict[str, Record]] = {}
    for r in report.records:
        if r.name == "tuned over":
            rows.setdefault(f"{r.params['kernel']}, rows {r.params['rows']}", {})[
                r.params["over"]] = r
    report.table("halving's winner: base / tuned, median [lower 90 %]",
                 ("kernel", "schedule", "over exhaustive", "over median", "over default"),
                 [(name, r["median"].more["schedules"]["halving"],
                   *("same" if r[b].more["same"] else shown(r[b].more)
                     for b in ("exhaustive", "median", "default"))) for name, r in rows.items()])
    report.table("tuned over, all: kernels and phases", (
        "tuned over", "geometric mean", "shapes"), [
        (r.params["over"], shown(r.more), r.more["shapes"]) for r in report.records
        if r.name == "tuned over, all"])
    report.table("halving's share of time: of all, builds too, and of what holds the machine", (
        "part", "halving", "exhaustive", "share"), [
        (r.params["part"], *(f"{r.more['seconds'][m]:.1f} s" for m in MODES[::-1]), shown(r.more))
        for r in report.records if r.name == "halving's share of time"])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="mini", help="mini, tiny, v4.1-flash or a directory")
    parser.add_argument("--op", nargs="+", default=[], help="only kernels of these ops")
    parser.add_argument("--share", type=float, default=1.0,
                        help="of a step's time in kernels with a choice (%(default)s: all)")
    parser.add_argument("--budget", type=length_of_time, metavar="TIME", help="90, 90s, 30m, 2h")
    parser.add_argument("--plan", action="store_true", help="only say what would run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep both databases there")
    args = settle(parser.parse_args())
    efforts = {name: Effort(name) for name in MODES}
    policy, rows = None, ROWS
    if args.smoke:
        args.model, args.op, rows = "tiny", args.op or ["hyper_mix"], (1, 65)
        policy = Policy(warmup=1, seconds=0.01)
        efforts = {n: replace(e, repeats=3, visits=2, enough=2) for n, e in efforts.items()}
    begin = time.monotonic()
    report, machine = Report(args), Machine.here(args.isa, args.threads, policy)
    every = tasks_of_model(args.model, "cpu", rows)
    fixed = [t for t in every if len(t.problem.schedules()) == 1 and can_make(t.problem)]
    tasks = tunable([t for t in every if not args.op or t.problem.op in args.op])
    planned = plan(tasks, machine, list(efforts.values()), args.pairs)
    kept = chosen(planned, args.share, args.budget and args.budget - 60)
    report.table(f"{args.model}: {report.machine['cpu']}, {args.isa}, {args.threads} threads; "
                 f"{len(kept)} of {len(planned)} kernels with a choice, "
                 f"{sum(p.share for p in kept):.1%} of their time in a step, about "
                 f"{duration(sum(p.seconds for p in kept))}",
                 ("kernel", "schedules", "of a step", "estimate", ""),
                 [(title(p.task), len(p.task.problem.schedules()), f"{p.share:.1%}",
                   f"{p.seconds:.0f} s", "" if p in kept else "left out") for p in planned])
    if args.plan:
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        modes = {n: Mode(e, machine, folder / n, not args.smoke) for n, e in efforts.items()}
        bench = Bench(args, report, machine, modes)
        try:
            for mode in modes.values():
                mode.warm_up(fixed[-2 * machine.cores:])
            for each in kept:  # what a process works out once shall count for neither mode
                compile_body(each.task.candidates()[0], machine.isa)
            for place, each in enumerate(kept):
                if args.budget and time.monotonic() - begin + each.seconds > args.budget:
                    print(f"out of time: {len(kept) - place} kernels left out", file=sys.stderr)
                    break
                print(f"[{place + 1}/{len(kept)}] {title(each.task)}", file=sys.stderr, flush=True)
                bench.task(each.task, place)
        finally:
            for mode in modes.values():
                mode.close()
        bench.totals()
    show(report)
    singles = [r for r in report.records if r.name == "tuned over"
               and r.params["over"] == "median"]
    report.plot([f"{r.params['kernel']}, rows {r.params['rows']}" for r in singles],
                [r.median for r in singles], "median schedule / tuned", line=1.15)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
