"""The axes of company: they pass on a sound engine, prove their conditions, and catch a fault."""

from __future__ import annotations

import pytest

from deepinfer.testing.certificate import AxisReport
from deepinfer.testing.invariance import AXES, Bench
from deepinfer.testing.invariance.harness import check_axis


def good(bench: Bench, name: str) -> AxisReport:
    """The report of an axis that must be clean, with its control caught and silent alone."""
    report = check_axis(bench, AXES[name], controls=True)
    assert report.good, report.summary
    assert report.control is not None and report.control.caught and report.control.silent
    assert report.counts["rows"] and report.counts["bits"] >= 32 * report.counts["tokens"]
    return report


def test_repeat(bench: Bench) -> None:
    """Case A3's lesson: runs that could not have met each other prove nothing."""
    report = good(bench, "repeat")
    assert report.evidence["runs on one engine"] == 6
    assert report.evidence["page tables used again"] > 0
    assert report.counts["requests"] == 9 and report.counts["tokens"] == 9 * 12


@pytest.mark.parametrize("requests", [1, 3])
def test_batch_size(bench: Bench, requests: int) -> None:
    """A single request gets a copy of itself for company."""
    one = Bench(bench.subject, requests=requests, seed=1, share=bench)
    assert max(good(one, "batch_size").evidence["sizes of batch"]) == max(2, requests)


def test_batch_order(bench: Bench) -> None:
    places = good(bench, "batch_order").evidence["places in the batch"]
    assert {"r0", "r1", "r2"} == places.keys() and all(len(p) > 1 for p in places.values())


def test_neighbours(bench: Bench) -> None:
    """Cases D4 and D7: NaN rows, aborts at any stage, and what both leave behind."""
    evidence = good(bench, "neighbours").evidence
    assert evidence["requests that were NaN"] == 3 and evidence["requests beside them"] == 3
    assert evidence["pages taken over from NaN"] > 0 and evidence["steps with NaN logits"] > 0
    for cache in ("off", "exact"):
        assert evidence[f"requests aborted, cache {cache}"] == 5
        assert 0 < evidence[f"aborted while running, cache {cache}"] < 5


def test_together(bench: Bench) -> None:
    evidence = good(bench, "together").evidence
    assert min(evidence[x] for x in ("cached tokens", "preemptions", "aborts", "drafted")) > 0
