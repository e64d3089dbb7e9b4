"""Axes of speculation and noise: how much is drafted, what is accepted, whose seed it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from deepinfer.runtime.request import child_seed
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.bench import Bench, Drafter, Stage, Trial
from deepinfer.testing.invariance.jobs import Job
from deepinfer.testing.invariance.record import Run
from deepinfer.testing.invariance.state_axes import preempts
from deepinfer.testing.invariance.subject import Setting

NO_DRAFTS = "the model has no draft stages"


def draft_width(bench: Bench, outcome: Outcome) -> None:
    """Every fixed width and the adaptive one, with the model's own drafts."""
    widest = int(bench.facts["draft_width"])
    if not widest:
        outcome.skipped = NO_DRAFTS
        return
    base = Setting(seqs=len(bench.jobs))
    for width in range(widest + 1):
        setting = replace(base, draft="fixed", draft_width=width)
        (run,) = outcome.run(bench, Trial(f"width {width}", setting, [Stage(bench.jobs)]))
        seen = max(run.widths, default=0)
        outcome.show(f"most drafts verified at once, width {width}", seen, shown=seen == width)
    (run,) = outcome.run(bench, Trial("adaptive width", replace(base, draft="adaptive"),
                                      [Stage(bench.jobs)]))
    outcome.show("drafts verified, adaptive", run.drafted)
    outcome.show("widths, adaptive", sorted(run.widths))


def acceptance(bench: Bench, outcome: Outcome) -> None:
    """Drafts that are right for the first j tokens and wrong after: for each j, and in each width
    for a j that changes (cases C1, C3)."""
    widest = int(bench.facts["draft_width"])
    if not widest:
        outcome.skipped = NO_DRAFTS
        return
    for j in range(widest + 1):
        run = _scripted_run(bench, outcome, f"{j} of {widest} right", widest, lambda n, j=j: j)
        outcome.show(f"times {j} of {widest} were accepted", run.lengths[j])
        if j < widest:
            outcome.show(f"drafts refused, {j} right", run.drafted - run.accepted)
    for width in range(1, widest + 1):
        run = _scripted_run(bench, outcome, f"any of {width} right", width,
                            lambda n, width=width: (n // 2 + n // 7) % (width + 1))
        outcome.show(f"accepted lengths, width {width}", dict(sorted(run.lengths.items())),
                     shown=len(run.lengths) > 1)


def _scripted_run(bench: Bench, outcome: Outcome, label: str, width: int,
                  right: Callable[..., int]) -> Run:
    setting = Setting(seqs=len(bench.jobs), draft="fixed", draft_width=width)
    (run,) = outcome.run(bench, Trial(label, setting, [Stage(bench.jobs)],
                                      drafter=lambda b: scripted(b, b.jobs, right)))
    return run


def scripted(bench: Bench, jobs: Sequence[Job], right: Callable[[int], int]) -> Drafter:
    """A drafter that knows each request's tokens: the first ``right(n)`` after n tokens are the
    target's own, the others are wrong."""
    known = {job.name: bench.alone(job).sequence for job in jobs}
    vocab = int(bench.facts["vocab_size"])

    def draft(request_id: str, tokens: Sequence[int], width: int) -> list[int]:
        n = len(tokens)
        truth = known[request_id][n:n + width]
        truth += [0] * (width - len(truth))
        return [t if i < right(n) else (t + 1 + i) % vocab for i, t in enumerate(truth)]

    return draft


def sampling_seed(bench: Bench, outcome: Outcome) -> None:
    """One prompt with many seeds in one batch, in two orders, beside the default seed, a greedy
    one, one that ends early; preempted. Two of the seeds are those of a request's further
    completions (cases B1, B5)."""
    job = next(j for j in bench.jobs if j.params.temperature > 0)
    params = replace(job.params, temperature=max(1.0, job.params.temperature))
    seeds = (0, 42, child_seed(42, 1), child_seed(42, 2))
    seeded = [Job(f"seed{s}", job.prompt, replace(params, seed=s)) for s in seeds]
    others = [Job("greedy", job.prompt, replace(params, temperature=0.0)),
              Job("short", job.prompt, replace(params, seed=5, max_tokens=1, min_tokens=0))]
    jobs = [*seeded, *others]
    setting = Setting(seqs=len(jobs))
    runs: list[Run] = []
    for label, order in (("seeds together", jobs), ("seeds reversed", jobs[::-1])):
        runs += outcome.run(bench, Trial(label, setting, [Stage(order)]))
    names = [j.name for j in seeded]
    drafted = replace(setting, draft="fixed") if bench.facts["draft_width"] else setting
    (run,) = outcome.run(bench, Trial("seeds preempted", drafted, [
        Stage(jobs, between=lambda: preempts(names))]))
    outcome.show("preemptions", run.asked)
    several = {tuple(bench.alone(j).tokens) for j in seeded}
    outcome.show("different outputs of 4 seeds", len(several), shown=len(several) > 1)
    outcome.show("requests in a step", min(r.requests for r in runs),
                 shown=min(r.requests for r in runs) > 1)


def together(bench: Bench, outcome: Outcome) -> None:
    """Everything at once: cached prefixes, forced preemptions, aborts, adaptive drafts, overlap."""
    jobs, page = bench.jobs, int(bench.facts["page_size"])
    warm = [replace(j, name=f"warm{i}") for i, j in enumerate(jobs)]
    gone = [replace(j, name=f"gone{i}") for i, j in enumerate(jobs[:2])]
    long = [j for j in jobs if len(j.prompt) > page]
    setting = Setting(prefix_cache="exact", overlap=True, chunk=max(2, page // 2),
                      seqs=max(2, len(jobs) // 2 + 1),
                      draft="adaptive" if bench.facts["draft_width"] else "off")
    order = np.random.default_rng(bench.seed).permutation(len(jobs)).tolist()
    mixed = [jobs[i] for i in order]

    def between() -> Callable[..., bool]:
        preempt = preempts([j.name for j in jobs])

        def act(live: object, call: int) -> bool:
            preempt(live, call)  # type: ignore[arg-type]
            if call in (2, 6):
                live.abort(gone[call // 6].name)  # type: ignore[attr-defined]
            return call < 6
        return act

    stages = [Stage(warm, origin=dict(zip((w.name for w in warm), jobs, strict=True))),
              Stage([*gone, *mixed], between=between, untested=frozenset(g.name for g in gone))]
    runs = outcome.run(bench, Trial("together", setting, stages))
    outcome.show("cached tokens", sum(runs[1].hits.values()), shown=bool(
        sum(runs[1].hits.values())) or not long)
    outcome.show("preemptions", runs[1].asked)
    outcome.show("aborts", runs[1].aborted)
    outcome.show("requests in a step", runs[1].requests, shown=runs[1].requests > 1)
    if bench.facts["draft_width"]:
        outcome.show("drafted", sum(r.drafted for r in runs))


AXES = (
    Axis("draft_width", "how many drafts are verified", draft_width, "verify_kernel", requests=2),
    Axis("acceptance", "which drafts turn out right", acceptance, "wrong_draft_accepted",
         requests=2),
    Axis("sampling_seed", "seeds of the others", sampling_seed, "first_seed"),
    Axis("together", "all of it at once", together, "kernel_by_rows", requests=6),
)
