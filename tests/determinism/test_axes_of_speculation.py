"""The axes of speculation and noise: sound engines pass, conditions are proven, faults caught."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer.testing.invariance import Bench, Outcome, Setting, Stage, Trial
from deepinfer.testing.invariance.draft_axes import scripted
from deepinfer.testing.invariance.jobs import Job, draw_ids
from tests.determinism.test_axes_of_company import good


def test_draft_width(bench: Bench) -> None:
    report = good(bench, "draft_width")
    assert [report.evidence[f"most drafts verified at once, width {w}"] for w in range(6)] == [
        0, 1, 2, 3, 4, 5]
    assert "adaptive width" in report.conditions


def test_acceptance(bench: Bench) -> None:
    """Case C1: every number of accepted drafts in the widest block, several in each width."""
    evidence = good(bench, "acceptance").evidence
    for j in range(6):
        assert evidence[f"times {j} of 5 were accepted"] > 0
    assert all(len(evidence[f"accepted lengths, width {w}"]) > 1 for w in range(1, 6))


@pytest.mark.parametrize("right", [5, 2, 0, None])
def test_long_runs_of_drafts(bench: Bench, right: int | None) -> None:
    """Case C3: S(5), S(2), S(0) and a j that changes, over many greedy tokens."""
    params = dataclasses.replace(bench.jobs[1].params, max_tokens=90)
    job = Job("long", draw_ids(bench.facts, 7, 3), params)
    trial = Trial("long", Setting(draft="fixed"), [Stage([job])], drafter=lambda b: scripted(
        b, [job], lambda n: (n // 2 + n // 7) % 6 if right is None else right))
    outcome = Outcome()
    (run,) = outcome.run(bench, trial)
    assert not outcome.differences and outcome.counts.tokens == 90
    if right is None:
        assert set(run.lengths) == set(range(6))
    else:
        assert run.lengths[right] > 10 and run.lengths.total() - run.lengths[right] <= 1


def test_sampling_seed(bench: Bench) -> None:
    """Case B1: a seed counts whatever the neighbours' are; B5: children have their own."""
    evidence = good(bench, "sampling_seed").evidence
    assert evidence["different outputs of 4 seeds"] > 1 and evidence["preemptions"] > 0
