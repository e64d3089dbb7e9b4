"""The handlers of `deepinfer-tune`: one function a command, each returns an exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from autotune import report as reports
from autotune import shipping, transfer
from autotune.building import build_dir, lower, source_digest
from autotune.child import ChildFailed
from autotune.effort import Effort
from autotune.inputs import can_make
from autotune.keys import Machine
from autotune.measure import LocalRunner, Timeouts
from autotune.modelling import rank
from autotune.progress import Progress, duration, title
from autotune.results import Result, last_tuned, machines, quarantine, results
from autotune.session import Session, find_run, plan_json
from autotune.space import ROWS, Candidate, Task, tasks_of
from autotune.store import Store
from autotune.text import table
from autotune.verify import verify as verify_entries
from deepinfer.codegen.emit import lower_graph
from deepinfer.codegen.schedules import path_of, read_entries
from deepinfer.compiler import build_graphs, default_levels, read_config
from deepinfer.errors import RequestError, TargetError
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import MODELS
from deepinfer.graph.single import single_op_graphs
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.settings import cache_dir, usable_cpus
from deepinfer.targets.base import load_target


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tasks_of_model(model: str, target_name: str, rows: Sequence[int] = ROWS,
                   ops: Sequence[str] = ()) -> list[Task]:
    """The kernels of a model by name, directory or config."""
    cfg = MODELS[model]() if model in MODELS else read_config(model)
    target, limits = load_target(target_name), Limits.for_model(cfg)
    graphs = [lower_graph(g, target) for g in build_graphs(cfg, limits).values()]
    return tasks_of([*graphs, *single_op_graphs(cfg, limits)], target, rows, ops)


def tunable(tasks: Sequence[Task]) -> list[Task]:
    """Those with a choice to make and inputs to make it on; says how many are left out."""
    fixed = sum(len(t.problem.schedules()) < 2 for t in tasks)
    made = [t for t in tasks if len(t.problem.schedules()) > 1]
    for task in made:
        if not can_make(task.problem):
            say(f"not tuned: {title(task)}: no inputs are known for its integer operands")
    if fixed:
        say(f"{fixed} kernels have one schedule only")
    return [t for t in made if can_make(t.problem)]


def _positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}, expected an int >= 1", where=f"--{name}",
                               next="correct it or leave it out")


def _store(args: argparse.Namespace) -> Store:
    return Store(args.db or cache_dir() / "tuning.sqlite3")


def _runner(args: argparse.Namespace, isa: str, threads: int | None) -> LocalRunner:
    return LocalRunner(Machine.here(isa, threads), args.jobs or usable_cpus(),
                       Timeouts(build=args.build_timeout, time=args.time_timeout,
                                lock=args.lock_timeout),
                       lambda: say("waiting for another tuner on this machine"))


def tune(args: argparse.Namespace) -> int:
    _positive(args, "jobs", "threads", "repeats", "visits")
    tasks = tasks_of_model(args.model, args.target, args.rows or ROWS, args.ops)
    isa = args.isa or default_levels()[0]
    if args.target != "cpu" or isa not in host_levels():
        return rank(tasks, _store(args), args, isa)
    tasks = tunable(tasks)
    effort = Effort(args.mode, args.repeats, args.visits, fresh=args.fresh)
    if args.dry_run:
        print(table([("kernel", "schedules", "sizes", "uses"), *(
            (title(t), len(t.problem.schedules()), len(t.points), t.uses) for t in tasks)]))
        return 0
    store = _store(args)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    store.save_run(name, time.time_ns(), "running", plan_json(
        tasks, effort, isa=isa, threads=args.threads or usable_cpus(), model=args.model))
    say(f"run {name}")
    return _run(args, store, name, tasks, effort, isa, args.threads)


def resume(args: argparse.Namespace) -> int:
    _positive(args, "jobs")
    store = _store(args)
    name, state, plan = find_run(store, args.run)
    say(f"run {name} ({state})")
    effort, settings = Effort(**plan["effort"]), plan["settings"]
    return _run(args, store, name, [Task.from_json(t) for t in plan["tasks"]], effort,
                settings["isa"], settings["threads"])


def _run(args: argparse.Namespace, store: Store, name: str, tasks: Sequence[Task], effort: Effort,
         isa: str, threads: int | None) -> int:
    runner = _runner(args, isa, threads)
    try:
        with Progress(events=args.json) as progress:
            if not store.facts(runner.machine.id, "ceilings"):
                _measure_ceilings(runner, store)
            session = Session(name, runner, store, effort, progress, args.budget)
            state = session.run(tasks)
    finally:
        runner.close()
        store.close()
    verdicts = [o.verdict for o in session.outcomes if o.verdict is not None]
    say(f"{state}: {len(session.outcomes)} of {len(tasks)} kernels, "
        f"{sum(v.winner != 0 for v in verdicts)} with a faster schedule, "
        f"{sum(len(o.quarantined) for o in session.outcomes)} schedules quarantined")
    say("next: deepinfer-tune resume" if state != "done" else
        "next: deepinfer-tune report; deepinfer-tune apply")
    return 0


def _measure_ceilings(runner: LocalRunner, store: Store) -> None:
    try:
        store.add_fact(runner.machine.id, "ceilings", runner.ceilings())
    except ChildFailed as failed:
        say(f"the machine's ceilings could not be measured: {failed.reason}")


def _machine_of(store: Store, wanted: str | None) -> tuple[str, dict[str, Any]]:
    """The machine of this id or start of an id; else the only one, or the one of this processor
    and ISA level that was tuned last: a new compiler makes a new machine."""
    found = machines(store)
    fitting = [m for m in found if wanted is None or m.startswith(wanted)]
    if len(fitting) > 1 and wanted is None:
        here = Machine.here(default_levels()[0]).to_json()
        same = [m for m in fitting if all(found[m][k] == here[k] for k in ("cpu", "isa"))]
        fitting = last_tuned(store, same) or same or fitting
    if len(fitting) != 1:
        raise TargetError(f"{len(fitting)} machines fit, expected one of "
                          f"{', '.join(m[:12] for m in found) or 'none'}", where=str(store.path),
                          next="name one with --machine" if found else "deepinfer-tune tune")
    return fitting[0], found[fitting[0]]


def _ceilings(store: Store, machine: str) -> dict[str, float] | None:
    found = store.facts(machine, "ceilings")
    return {n: max(c[n] for c in found) for n in ("flops", "bytes")} if found else None


def _modelled(store: Store) -> list[dict[str, Any]]:
    rows = store.query("SELECT detail FROM fact WHERE kind = 'modelled' ORDER BY detail")
    found = [json.loads(r["detail"]) for r in rows]
    return sorted(found, key=lambda m: (m["target"], m["op"], m["shape"], m["ns"]))


def status(args: argparse.Namespace) -> int:
    store = _store(args)
    runs = []
    for name, begun, state, plan in store.runs():
        tasks = [Task.from_json(t) for t in plan["tasks"]]
        duels = store.query("SELECT count(DISTINCT subject) AS n FROM fact WHERE kind = 'duel' AND "
                            "json_extract(detail, '$.session') = ?", name)[0]["n"]
        samples = store.query("SELECT count(*) AS n FROM sample WHERE session = ?", name)[0]["n"]
        runs.append({"run": name, "begun": begun // 10**9, "state": state, "kernels": len(tasks),
                     "done": duels, "visits": samples})
    bad = quarantine(store)
    bodies = machines(store)
    found = {m: results(store, m) for m in bodies}
    known = {m: {"cpu": b["cpu"], "isa": b["isa"], "threads": b["threads"],
                 "kernels": len(found[m]), "not_visited": sum(len(r.unvisited()) for r in found[m])}
             for m, b in bodies.items()}
    if args.json:
        print(json.dumps({"runs": runs, "machines": known, "quarantined": bad,
                          "conflicts": transfer.conflicts(store)}))
        return 0
    print(table([("run", "state", "kernels duelled", "visits"), *(
        (r["run"], r["state"], f"{r['done']}/{r['kernels']}", r["visits"]) for r in runs)]))
    print(table([("machine", "cpu", "isa", "threads", "kernels", "schedules not visited"), *(
        (m[:12], *b.values()) for m, b in known.items())]))
    for name, reasons in bad.items():
        print(f"quarantined {name}: {'; '.join(reasons)}")
    return 0


def report(args: argparse.Namespace) -> int:
    store = _store(args)
    modelled, name = _modelled(store), ""
    machine: dict[str, Any] = {}
    if machines(store) or not modelled:
        name, machine = _machine_of(store, args.machine)
    found, bad, peaks = results(store, name), quarantine(store), _ceilings(store, name)
    print(reports.text(found, peaks, bad, modelled))
    if args.html is not None:
        args.html.write_text(reports.page(found, peaks, bad, modelled, machine), encoding="utf-8")
        say(f"wrote {args.html}")
    return 0


def source_today(result: Result, place: int) -> str:
    """Digest of the text that a measured schedule would be built from now."""
    candidate = Candidate(result.problem, place, result.problem.schedules()[place])
    return source_digest(lower(candidate))


def apply(args: argparse.Namespace) -> int:
    store, path = _store(args), args.out or path_of(args.target)
    if args.undo:
        shipping.undo(path, store)
        say(f"put back what stood in {path}")
        return 0
    name, machine = _machine_of(store, args.machine)
    found = [r for r in results(store, name) if r.problem.target == args.target]
    made = shipping.propose(found, path, machine, source_today)
    for change in made.changes:
        print(change.text())
    for key in made.stale:
        say(f"left as it is, its source or space changed since it was measured: {key}")
    say(f"{len(made.changes)} changes of {len(found)} tuned kernels; expected geometric mean of "
        f"all their phases: x{made.gain:.3f}")
    if made.changes and not args.dry_run:
        shipping.write(path, made.entries, store, time.time_ns())
        say(f"wrote {path}; `deepinfer-tune apply --undo` puts the old one back")
    return 0


def verify(args: argparse.Namespace) -> int:
    _positive(args, "jobs", "threads", "repeats", "visits")
    path = args.file or path_of("cpu")
    entries = dict(read_entries(path))
    if not entries:
        say(f"{path} has no entries: every kernel runs its default")
        return 0
    problems = {t.problem.key: t.problem for model in args.models
                for t in tasks_of_model(model, "cpu")}
    store, runner = _store(args), _runner(args, args.isa or default_levels()[0], args.threads)
    try:
        with Progress(events=args.json) as progress:
            checked = verify_entries(
                entries, problems, runner, store, f"verify-{uuid.uuid4().hex[:8]}",
                Effort("exhaustive", args.repeats, args.visits, fresh=True), progress)
    finally:
        runner.close()
        store.close()
    print(table([("state", "gain", "phase", "schedule", "kernel", "detail"), *(
        (c.state, "-" if c.gain is None else f"{c.gain:.3f}", c.entry.phase or "all",
         c.entry.schedule, c.entry.kernel.partition("[")[0], c.detail) for c in checked)]))
    counts = Counter(c.state for c in checked)
    say(", ".join(f"{n} {state}" for state, n in sorted(counts.items())))
    return 0 if all(c.good for c in checked) else 1


def export(args: argparse.Namespace) -> int:
    lines = transfer.export(_store(args))
    if args.out is None:
        for line in lines:
            print(line)
    else:
        args.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


def merge(args: argparse.Namespace) -> int:
    store = _store(args)
    broken: tuple[str, ...] = ()
    for file in args.files:
        got = transfer.merge(store, transfer.read_database(file), str(file))
        say(f"{file}: {got.added} rows added, {got.known} known")
        broken = got.conflicts
    for name in broken:
        print(f"different bits on different machines: {name}")
    return 1 if broken else 0


def gc(args: argparse.Namespace) -> int:
    began = time.monotonic()
    got = transfer.collect(_store(args), (build_dir(), cache_dir() / "objects"), days=args.days,
                           failures=args.failures, dry_run=args.dry_run)
    say(f"{'would remove' if args.dry_run else 'removed'} {got.rows} rows and {got.files} files of "
        f"{got.nbytes / 1e6:.1f} MB in {duration(time.monotonic() - began)}")
    return 0
