"""Axes of the machine: threads, instruction sets, overlapped steps, other processes."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from deepinfer.settings import usable_cpus
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.compare import Difference, compare
from deepinfer.testing.invariance.restart import serve_elsewhere
from deepinfer.testing.invariance.subject import Setting


def overlap(bench: Bench, outcome: Outcome) -> None:
    """The next step is prepared while one runs: with company, with drafts, with a cache."""
    base = Setting(overlap=True, seqs=len(bench.jobs))
    settings = {"overlap": base, "overlap, cache": replace(base, prefix_cache="exact")}
    if bench.facts["draft_width"]:
        settings["overlap, drafts"] = replace(base, draft="fixed")
    for label, setting in settings.items():
        (run,) = outcome.run(bench, Trial(label, setting, [Stage(bench.jobs)]))
        outcome.show(f"times that another thread did host work, {label}", run.overlapped)


def threads(bench: Bench, outcome: Outcome) -> None:
    """One thread, and more than there are cores."""
    cores = usable_cpus()
    counts = sorted({1, cores + 1, 2 * cores + 1})
    seen = set()
    for count in counts:
        (run,) = outcome.run(bench, Trial(
            f"{count} threads", Setting(threads=count, seqs=len(bench.jobs)), [Stage(bench.jobs)]))
        seen.add(run.device.num_threads)
    outcome.show("threads of the reference", cores)
    outcome.show("threads", sorted(seen), shown=seen == set(counts))


def isa(bench: Bench, outcome: Outcome) -> None:
    """Every other ISA level that this machine runs."""
    *others, highest = bench.subject.levels
    if not others:
        outcome.skipped = f"this machine runs one ISA level, {highest}"
        return
    seen = []
    for level in others:
        (run,) = outcome.run(bench, Trial(
            f"ISA level {level}", Setting(isa=level, seqs=len(bench.jobs)), [Stage(bench.jobs)]))
        seen.append(run.device.isa)
    outcome.show("level of the reference", highest)
    outcome.show("levels", seen, shown=seen == others)


def restart(bench: Bench, outcome: Outcome) -> None:
    """Another process with another hash seed; there the Program is also compiled anew."""
    if bench.subject.spec() is None:
        outcome.show("a way to start another process", None)
        return
    elsewhere = serve_elsewhere(bench, Setting(seqs=len(bench.jobs)))
    outcome.conditions.append("another process")
    expected = {job.name: bench.alone(job) for job in bench.jobs}
    found = compare("another process", expected, elsewhere.run, outcome.counts)
    outcome.differences += [(d, None) for d in found]
    outcome.show("another process", elsewhere.pid, shown=elsewhere.pid != os.getpid())
    outcome.show("another hash seed", elsewhere.hash_differs)
    if bench.fault is None:
        rebuild(bench, outcome)


def rebuild(bench: Bench, outcome: Outcome) -> None:
    """The Program compiled again, with nothing from any cache, is the same Program."""
    with tempfile.TemporaryDirectory() as folder:
        digest, reason = bench.subject.rebuild(Path(folder))
    if digest is None:
        outcome.evidence["Program compiled again"] = f"not compared: {reason}"
        return
    outcome.conditions.append("Program compiled again")
    outcome.show("Program compiled again", digest)
    if digest != bench.subject.program.digest:
        outcome.differences.append((Difference(
            "-", "Program compiled again", "token", 0, None,
            f"its digest is {digest}, expected {bench.subject.program.digest}"), None))


AXES = (
    Axis("overlap", "steps scheduled while one runs", overlap, "stale_input"),
    Axis("threads", "how many threads compute", threads, "sum_by_threads", requests=2),
    Axis("isa", "which instructions compute", isa, "order_by_isa", requests=2),
    Axis("restart", "another process, the Program compiled again", restart, "order_by_process",
         requests=2),
)
