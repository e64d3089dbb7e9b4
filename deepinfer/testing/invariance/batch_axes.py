"""Axes of company: the same request again, beside others, in another place, beside bad ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deepinfer.runtime.request import SamplingParams
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.jobs import Job, draw_ids, new_job
from deepinfer.testing.invariance.record import Between, Live
from deepinfer.testing.invariance.subject import Setting

AWAY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)  # of the neighbours


def repeat(bench: Bench, outcome: Outcome) -> None:
    """Every request alone, twice in a row on one engine, then on engines of their own."""
    twice = [Stage([job]) for job in bench.jobs for _ in range(2)]
    runs = outcome.run(bench, Trial("twice on one engine", Setting(), twice))
    slots = {pages for run in runs for seen in run.pages.values() for pages in seen}
    outcome.show("runs on one engine", len(runs), shown=len(runs) > 1)
    outcome.show("page tables used again", len(runs) - len(slots))
    anew = [Stage([job], reopen=True) for job in bench.jobs]
    outcome.run(bench, Trial("on a new engine", Setting(), anew))


def batch_size(bench: Bench, outcome: Outcome) -> None:
    """All requests at once, in steps of two sizes of batch, and fewer at a time."""
    jobs = bench.jobs if len(bench.jobs) > 1 else [*bench.jobs, *copies(bench.jobs, 1)]
    origin = origins(jobs, bench.jobs)
    seen = []
    for seqs in sorted({2, 3, len(jobs)}):
        if 1 < seqs <= len(jobs):
            (run,) = outcome.run(bench, Trial(f"{seqs} at once", Setting(seqs=seqs),
                                              [Stage(jobs, origin=origin)]))
            seen.append(run.requests)
            outcome.show(f"most requests in a step, {seqs} allowed", run.requests,
                         shown=run.requests >= min(seqs, 2))
            outcome.show(f"most rows in a step, {seqs} allowed", run.rows,
                         shown=run.rows > run.requests)
    outcome.show("sizes of batch", sorted(set(seen)), shown=max(seen) >= 2)


def batch_order(bench: Bench, outcome: Outcome) -> None:
    """The same requests together, in three orders and arriving one by one."""
    jobs = [*bench.jobs, *copies(bench.jobs, max(0, 3 - len(bench.jobs)))]
    origin, half = origins(jobs, bench.jobs), len(jobs) // 2
    places: dict[str, set[int]] = {}
    setting = Setting(seqs=len(jobs))
    orders = {"as given": jobs, "reversed": jobs[::-1], "rotated": [*jobs[half:], *jobs[:half]]}
    trials = [Trial(name, setting, [Stage(order, origin=origin)]) for name, order in orders.items()]
    late = Stage(jobs[:1], later=jobs[1:], between=lambda: one_by_one(jobs[1:]), origin=origin)
    for trial in (*trials, Trial("one by one", setting, [late])):
        (run,) = outcome.run(bench, trial)
        for name, seen in run.places.items():
            places.setdefault(name, set()).update(seen)
    moved = {name: sorted(seen) for name, seen in places.items() if len(seen) > 1}
    outcome.show("places in the batch", moved, shown=len(moved) == len(jobs))


def neighbours(bench: Bench, outcome: Outcome) -> None:
    """Beside requests whose rows are NaN, and beside some that are aborted at every stage; then in
    the slots and pages that those have left (cases D4, D7)."""
    with_nan(bench, outcome)
    with_aborts(bench, outcome)


def with_nan(bench: Bench, outcome: Outcome) -> None:
    jobs = bench.jobs
    used = {t for job in jobs for t in bench.alone(job).sequence}
    bad = next(t for t in draw_ids(bench.facts, 10_000, bench.seed + 5) if t not in used)
    page = int(bench.facts["page_size"])
    ill = [Job(f"nan{n}", (bad,) * length, AWAY) for n, length in enumerate((page + 2, 2, page))]
    setting = Setting(seqs=len(jobs) + len(ill), nan_token=bad, chunk=max(2, page // 2))
    stage = Stage([ill[0], *jobs, *ill[1:]], untested=frozenset(j.name for j in ill))
    (run,) = outcome.run(bench, Trial("NaN rows beside", setting, [stage]))
    failed = [j.name for j in ill if run.served[j.name].finish_reason == "error"]
    outcome.show("requests that were NaN", len(failed), shown=len(failed) == len(ill))
    met = {name for name, others in run.beside.items() if others & {j.name for j in ill}}
    outcome.show("requests beside them", len(met & {j.name for j in jobs}))
    outcome.show("steps with NaN logits", run.bad_steps)
    after = replace(stage, jobs=ill, between=None)
    runs = outcome.run(bench, Trial("after NaN rows", setting, [after, Stage(jobs)]))
    outcome.show("pages taken over from NaN", len(_pages(runs[0].pages) & _pages(runs[1].pages)))


def _pages(tables: dict[str, set[tuple[int, ...]]]) -> set[int]:
    return {page for seen in tables.values() for table in seen for page in table}


def with_aborts(bench: Bench, outcome: Outcome) -> None:
    page = int(bench.facts["page_size"])
    gone = [new_job(bench.facts, f"gone{n}", 2 * page, bench.seed + 50 + n, AWAY)
            for n in range(5)]
    # The first is aborted unseen, the others after 1, 2, 3 chunks and while they generate.
    at = dict(zip((j.name for j in gone), (0, 1, 2, 3, 8), strict=True))
    setting = Setting(seqs=len(bench.jobs) + 2, chunk=max(2, page // 2))
    names = frozenset(at)
    for label, prefix_cache in (("aborts beside", "off"), ("aborts beside, cache", "exact")):
        trial = Trial(label, replace(setting, prefix_cache=prefix_cache), [
            Stage([*gone[:2], *bench.jobs, *gone[2:]], untested=names,
                  between=lambda: aborts(at)),
            Stage([replace(gone[0], name="again")])])
        run, _ = outcome.run(bench, trial)
        outcome.show(f"requests aborted, cache {prefix_cache}", run.aborted)
        outcome.show(f"aborted while running, cache {prefix_cache}",
                     sum(name in run.beside for name in names))


def aborts(at: dict[str, int]) -> Between:
    def between(live: Live, call: int) -> bool:
        for name, when in at.items():
            if call == when:
                live.abort(name)
        return call < max(at.values())
    return between


def one_by_one(jobs: list[Job]) -> Between:
    def between(live: Live, call: int) -> bool:
        if call < len(jobs):
            live.add(jobs[call])
        return call < len(jobs) - 1
    return between


def copies(jobs: list[Job], count: int) -> list[Job]:
    """More requests like these, under other names."""
    return [replace(jobs[i % len(jobs)], name=f"copy{i}") for i in range(count)]


def origins(jobs: list[Job], known: list[Job]) -> dict[str, Job]:
    """Of each copy, the request it is a copy of."""
    by_key = {(j.prompt, repr(j.params)): j for j in reversed(known)}
    return {j.name: by_key[j.prompt, repr(j.params)] for j in jobs}


Vary = Callable[[Bench, Outcome], None]
AXES = (
    Axis("repeat", "the same request again", repeat, "used_slot", requests=2),
    Axis("batch_size", "how many requests share a step", batch_size, "kernel_by_rows"),
    Axis("batch_order", "a request's place in the batch", batch_order, "order_by_place"),
    Axis("neighbours", "what the others are: NaN rows, aborted ones", neighbours, "shared_scale"),
)
