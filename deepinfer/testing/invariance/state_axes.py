"""Axes of state: where a prompt is cut, where its state lies, what of it is kept and found."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.runtime.request import SamplingParams
from deepinfer.testing.bits import first_element
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.batch_axes import copies, origins
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.compare import Difference
from deepinfer.testing.invariance.jobs import Job, draw_ids, new_job
from deepinfer.testing.invariance.record import Between, Live
from deepinfer.testing.invariance.subject import Setting

Array = np.ndarray[Any, Any]
FILLS = {"zeros": 0x00, "NaN": 0xFF, "large numbers": 0x7E}


def chunking(bench: Bench, outcome: Outcome) -> None:
    """Chunks of odd and even sizes, alone and behind a longer prompt with small steps (case A4)."""
    page = int(bench.facts["page_size"])
    reference = {j.name: {0} for j in bench.jobs}
    for chunk in sorted({1, 3, max(2, page // 2 - 1), page}):
        jobs = [j for j in bench.jobs if chunk >= 3 or len(j.prompt) <= 8 * page]
        trial = Trial(f"chunks of {chunk}", Setting(chunk=chunk), [Stage([j]) for j in jobs])
        cuts = {n: seen for run in outcome.run(bench, trial) for n, seen in run.cuts.items()}
        other = sum(cuts[j.name] != reference[j.name] for j in jobs)
        outcome.show(f"prompts cut in chunks of {chunk}", other,
                     shown=other > 0 or all(len(j.prompt) <= chunk for j in jobs))
    ahead = new_job(bench.facts, "ahead", 2 * page + 1, bench.seed + 9,
                    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    seqs = len(bench.jobs) + 1
    for rows in (seqs + page // 2, seqs + page):
        (run,) = outcome.run(bench, Trial(
            f"steps of {rows} rows", Setting(seqs=seqs, rows=rows), [Stage([ahead, *bench.jobs])]))
        outcome.show(f"steps of {rows} with prompt and generated rows", run.mixed)


def page_placement(bench: Bench, outcome: Outcome) -> None:
    """In pages that lie anywhere, and in state that holds zeros, NaN, large numbers or what others
    left there (case D7)."""
    for label, byte in FILLS.items():
        trial = Trial(f"state full of {label}", Setting(fill=byte), [Stage([j], reopen=True)
                                                                     for j in bench.jobs])
        outcome.run(bench, trial)
    page = int(bench.facts["page_size"])
    short, long = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 40))
    # Requests of one page, every second of which stays: their pages make a comb.
    stay = [new_job(bench.facts, f"stay{n}", page // 2, bench.seed + 60 + n,
                    long if n % 2 else short) for n in range(6)]
    setting = Setting(seqs=len(stay) + len(bench.jobs))
    stage = Stage(stay, later=bench.jobs, between=lambda: after_calls(3, bench.jobs))
    (run,) = outcome.run(bench, Trial("among pages of others", setting, [stage]))
    tables = {n: t for j in bench.jobs for n, t in [(j.name, max(run.pages[j.name], key=len))]}
    apart = [t for t in tables.values() if any(b - a != 1 for a, b in zip(t, t[1:], strict=False))]
    outcome.show("page tables that do not start at page 0",
                 sum(t[0] != 0 for t in tables.values()))
    outcome.show("page tables that are not in a row", len(apart))
    outcome.show("fills", sorted(FILLS))


def prefix_hit(bench: Bench, outcome: Outcome) -> None:
    """Cold, then from the cache: the same prompt, a longer one, one that shares half of it, two at
    once; and from a directory after a restart (cases A3, D2)."""
    page = int(bench.facts["page_size"])
    room = int(bench.facts["max_model_len"]) - 2 * page
    jobs = [j for j in bench.jobs if page < len(j.prompt) < room]
    if not jobs:
        params = bench.jobs[0].params
        jobs = [new_job(bench.facts, "long", page + 3, bench.seed + 8, params)]
    tails = [replace(j, name=f"{j.name}+", prompt=(
        *j.prompt, *draw_ids(bench.facts, page // 2 + 1, bench.seed + 30 + i)))
        for i, j in enumerate(jobs)]
    forks = [replace(j, name=f"{j.name}/", prompt=(
        *j.prompt[:page + 1], *draw_ids(bench.facts, 5, bench.seed + 40 + i)))
        for i, j in enumerate(jobs)]
    twins = copies(jobs, len(jobs))
    setting = Setting(prefix_cache="exact", seqs=max(8, 2 * len(jobs)))
    stages = [Stage(jobs), Stage(jobs), Stage(tails), Stage(forks),
              Stage([*jobs, *twins], origin=origins([*jobs, *twins], jobs)),
              Stage(jobs, reopen=True)]
    names = ("cold", "same prompt", "longer prompt", "shared start", "two at once", "flushed")
    runs = outcome.run(bench, Trial("prefix cache", setting, stages))
    for name, run in zip(names, runs, strict=True):
        hits = sum(run.hits.values())
        cold = name in ("cold", "flushed")
        outcome.show(f"cached tokens, {name}", hits, shown=(hits == 0) if cold else hits > 0)
    if bench.facts["draft_width"]:
        drafting = replace(setting, draft="fixed")
        runs = outcome.run(bench, Trial("prefix cache and drafts", drafting, stages[:3]))
        outcome.show("cached tokens, with drafts", sum(runs[1].hits.values()))
        outcome.show("drafted tokens after a hit", runs[1].drafted)
    with tempfile.TemporaryDirectory() as folder:
        kept = replace(setting, cache_dir=Path(folder))
        runs = outcome.run(bench, Trial("prefix cache on disk", kept, [
            Stage(jobs), Stage(jobs, reopen=True)]))
        outcome.show("cached tokens, from disk", sum(runs[1].hits.values()))


def preemption(bench: Bench, outcome: Outcome) -> None:
    """Preempted in the middle of the prompt and after 1, 4 and 7 tokens, with and without what the
    cache keeps, and for want of pages (case D5)."""
    page = int(bench.facts["page_size"])
    jobs = bench.jobs
    plain = Setting(seqs=len(jobs), chunk=max(2, page // 2))
    settings = {"off": plain, "exact": replace(plain, prefix_cache="exact")}
    if bench.facts["draft_width"]:
        settings["off, drafts"] = replace(plain, draft="fixed")
    for cache, setting in settings.items():
        (run,) = outcome.run(bench, Trial(
            f"preempted, cache {cache}", setting,
            [Stage(jobs, between=lambda: preempts([j.name for j in jobs]))]))
        outcome.show(f"preemptions, cache {cache}", run.asked, shown=run.asked >= len(jobs))
        outcome.show(f"requests preempted, cache {cache}", len(run.preempted),
                     shown=len(run.preempted) == len(jobs))
    # Three that fill a page each and soon want another, in a pool of four.
    grow = [Job(f"grow{n}", draw_ids(bench.facts, page - 2, bench.seed + 20 + n),
                replace(jobs[n % len(jobs)].params, max_tokens=12, stop_token_ids=(), min_tokens=0,
                        structured=None, ignore_eos=True)) for n in range(3)]
    (run,) = outcome.run(bench, Trial("a pool too small for all", Setting(seqs=3, pages=4),
                                      [Stage(grow)]))
    outcome.show("preemptions for want of pages", run.preempted.total())


def preempts(names: Sequence[str]) -> Between:
    """Preempt each request once in its prompt and after 1, 4 and 7 tokens."""
    due = {name: [0, 1, 4, 7] for name in names}

    def between(live: Live, call: int) -> bool:
        for name, marks in due.items():
            if call and marks and live.made.get(name, 0) >= marks[0] and live.preempt(name):
                marks.pop(0)
                while marks and marks[0] <= live.made[name]:
                    marks.pop(0)
        return False
    return between


def after_calls(calls: int, jobs: Sequence[Job]) -> Between:
    def between(live: Live, call: int) -> bool:
        if call == calls:
            live.add(*jobs)
        return call < calls
    return between


def prefill_vs_decode(bench: Bench, outcome: Outcome) -> None:
    """What decode computed row by row, as prefill: a request's own tokens as the prompt, and every
    row of them at once."""
    greedy = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    again, origin = [], {}
    for job in bench.jobs:
        alone = bench.alone(job)
        decoded = sum(row.phase == "decode" for row in alone.logits)
        outcome.show(f"rows of {job.name} that were decoded", decoded)
        for made in {1, len(alone.tokens) // 2, len(alone.tokens) - 1} - {0}:
            name = f"{job.name}@{made}"
            again.append(Job(name, tuple(alone.sequence[:len(job.prompt) + made]), greedy))
            origin[name] = job
    runs = outcome.run(bench, Trial("prefill of generated tokens", Setting(), [
        Stage([job], origin=origin, logits_only=True) for job in again]))
    outcome.show("rows as prefill", sum(run.phases["prefill"] for run in runs))
    page = int(bench.facts["page_size"])
    with bench.open(Setting()) as (engine, watch):
        for chunk in (None, min(page // 2 - 1 or 1, engine.scheduler.chunk)):
            for job in bench.jobs:
                sequence = bench.alone(job).sequence[:-1]
                _score(bench, outcome, job, engine.score(sequence, chunk))
        outcome.show("calls of the prefill phase to score", watch.phases.get("prefill", 0))
        outcome.show("phases of scoring", sorted(watch.phases),
                     shown={*watch.phases} == {"prefill"})


def _score(bench: Bench, outcome: Outcome, job: Job, rows: Array) -> None:
    for known in bench.alone(job).logits:
        outcome.counts.rows += 1
        outcome.counts.bits += known.row.nbytes * 8
        element = first_element(known.row, np.ascontiguousarray(rows[known.position]))
        if element is not None:
            outcome.differences.append((Difference(job.name, "score", "logits", known.position,
                                                   None, str(element)), None))
            return


AXES = (
    Axis("chunking", "where a prompt is cut", chunking, "lost_pending"),
    Axis("page_placement", "where state lies and what was there before", page_placement,
         "pages_in_a_row"),
    Axis("prefix_hit", "a prefix taken from the cache", prefix_hit, "ring_not_restored"),
    Axis("preemption", "state taken away and computed again", preemption, "resumed_position"),
    Axis("prefill_vs_decode", "a row as prefill and as decode", prefill_vs_decode,
         "many_rows_kernel", requests=2),
)
