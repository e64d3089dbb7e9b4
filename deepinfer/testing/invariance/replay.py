"""The approximate axis: how far bounded replay moves the logits. It reports and cannot fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from deepinfer.testing.bits import same_bits
from deepinfer.testing.invariance.axis import Axis, Outcome
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.jobs import Job, cut_prompt, draw_ids
from deepinfer.testing.invariance.record import Served
from deepinfer.testing.invariance.subject import Setting

Array = np.ndarray[Any, Any]


def replay(bench: Bench, outcome: Outcome) -> None:
    """Decoder replay (``mask`` and ``compact``) and encoder replay after a prefix hit, against off.

    Rows are compared while the tokens before them are equal, prompts first of all.
    """
    outcome.drift = {}
    if not bench.facts.get("replay"):
        outcome.skipped = "the model has no replay cut"
        return
    keep = int(bench.facts["replay_keep"])
    jobs = long_jobs(bench, keep)
    trial = {mode: Trial(f"replay {mode}", Setting(replay=mode, keep_tokens=keep, seqs=len(jobs)),
                         [Stage(jobs)]) for mode in ("mask", "compact")}
    served = {mode: bench.serve(t)[0].served for mode, t in trial.items()}
    warm = Trial("encoder replay", Setting(prefix_cache="replay", seqs=len(jobs)),
                 [Stage(jobs), Stage(jobs)])
    first, second = bench.serve(warm)
    served["encoder replay after a hit"] = second.served
    outcome.conditions += [*served]
    for mode, got in served.items():
        pairs = [pair for j in jobs for pair in matched(bench.alone(j), got[j.name])]
        outcome.drift[mode] = drift(pairs)
        outcome.counts.rows += len(pairs)
        outcome.show(f"rows compared, {mode}", len(pairs))
    outcome.show("tokens kept", keep)
    outcome.show("prompts longer than that", sum(len(j.prompt) > keep for j in jobs))
    outcome.show("cached tokens before encoder replay", sum(second.hits.values()),
                 shown=not first.hits.total() and second.hits.total() > 0)
    pairs = [pair for j in jobs
             for pair in matched(served["mask"][j.name], served["compact"][j.name])]
    outcome.drift["mask and compact differ in"] = sum(not same_bits(a, b) for a, b in pairs)


def long_jobs(bench: Bench, keep: int) -> list[Job]:
    """Greedy requests with prompts that replay leaves rows of behind."""
    page, longest = int(bench.facts["page_size"]), int(bench.facts["max_model_len"])
    jobs = []
    for i, job in enumerate(bench.jobs):
        length = min(keep + page + 1 + 3 * i, longest - job.params.max_tokens - 1)
        prompt = draw_ids(bench.facts, length, bench.seed + 90 + i)
        if bench.texts:
            prompt = cut_prompt(bench.texts, i, length) or prompt
        params = replace(bench.jobs[0].params, temperature=0.0)
        jobs.append(Job(f"long{i}", prompt, params))
    return jobs


def matched(expected: Served, found: Served) -> list[tuple[Array, Array]]:
    """Rows of logits at the same position, up to the first token that differs."""
    equal = next((i for i, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=False))
                  if a != b), min(len(expected.tokens), len(found.tokens)))
    last = len(expected.prompt) - 1 + equal
    known = {x.position: x.row for x in expected.logits}
    return [(known[x.position], x.row) for x in found.logits
            if x.position in known and x.position <= last]


def drift(pairs: Iterable[tuple[Array, Array]]) -> dict[str, float]:
    """How far rows of logits are apart.

    Args:
        pairs: (expected, found) f32[vocabulary] each.

    Returns:
        rows; argmax_agreement (share of rows); kl (mean over rows of sum p (log p - log q), p the
        expected softmax, in nats); max_dlogit (largest absolute difference of a logit).
    """
    rows = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    if not rows:
        return {"rows": 0}
    p, q = (_log_softmax(np.array([pair[k] for pair in rows])) for k in (0, 1))
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    return {"rows": len(rows),
            "argmax_agreement": float(np.mean(p.argmax(-1) == q.argmax(-1))),
            "kl": float(kl.mean()),
            "max_dlogit": float(max(np.abs(a - b).max() for a, b in rows))}


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


AXES = (Axis("replay", "bounded replay, approximate: its drift against off", replay, None,
             approximate=True),)
