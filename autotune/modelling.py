"""`tune` without a device: ranks the schedules of a target's kernels by the static model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from autotune.child import Child, ChildFailed
from autotune.model import LABEL, Modelled, model
from autotune.progress import title
from autotune.space import Candidate, Sizes, Task
from autotune.store import Store
from autotune.text import table
from autotune.worker import candidate_json
from deepinfer.errors import TargetError


def rank(tasks: Sequence[Task], store: Store, args: argparse.Namespace, isa: str) -> int:
    """Print and keep the modelled times; returns an exit code."""
    child = Child()
    rows: list[tuple[object, ...]] = [("kernel", "size", "rank", "schedule", f"{LABEL} us",
                                       "bound", "in use")]
    try:
        for task in [t for t in tasks if len(t.problem.schedules()) > 1]:
            launches = {c: _launch(c, child, args.build_timeout) for c in task.candidates()}
            for sizes in task.points:
                found = _ranked(launches, sizes, args.threads or 8)
                for place, (candidate, made) in enumerate(found, 1):
                    rows.append((title(task), " ".join(f"{n}={v}" for n, v in sizes), place,
                                 candidate.schedule, f"{made.ns / 1000:.1f}", made.bound,
                                 f"{made.use:.2f}"))
                    detail = {"target": task.problem.target, "op": task.problem.op, "isa": isa,
                              "shape": task.problem.shape(sizes), "ns": made.ns, "use": made.use,
                              "schedule": str(candidate.schedule), "bound": made.bound}
                    store.add_fact(store.kernel(task.problem), LABEL, detail)
                    if args.json:
                        print(json.dumps({"event": LABEL, **detail}), flush=True)
    finally:
        child.close()
        store.close()
    if not args.json:
        what = f"CPU of level {isa}" if args.target == "cpu" else f"{args.target} device"
        print(f"{LABEL}, not measured: there is no {what} to measure on here")
        print(table(rows))
    return 0


def _launch(candidate: Candidate, child: Child, seconds: float) -> dict[str, Any] | None:
    """Launch data of the lowered kernel; empty on cpu, None where it cannot be built."""
    if candidate.problem.target == "cpu":
        return {}
    try:
        got = child.ask({"do": "lower", "candidate": candidate_json(candidate)}, seconds)
        return dict(got["launch"])
    except ChildFailed:
        return None


def _ranked(launches: dict[Candidate, dict[str, Any] | None], sizes: Sizes, threads: int
            ) -> list[tuple[Candidate, Modelled]]:
    found = []
    for candidate, launch in launches.items():
        if launch is not None:
            try:
                found.append((candidate, model(candidate, sizes, launch, threads)))
            except TargetError:
                continue  # a block that the machine cannot hold
    return sorted(found, key=lambda f: (f[1].ns, f[0].index))
