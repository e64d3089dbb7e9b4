"""The axes of state: they pass on a sound engine, prove their conditions, and catch a fault."""

from __future__ import annotations

import pytest

from deepinfer.testing.invariance import Bench
from tests.determinism.subjects import HashSubject
from tests.determinism.test_axes_of_company import good


@pytest.fixture(scope="module")
def two_pages() -> Bench:
    """A model whose longest request is two pages long."""
    return Bench(HashSubject(page=40, length=80), requests=3, seed=1)


@pytest.mark.parametrize("axis", ["neighbours", "chunking", "page_placement", "prefix_hit",
                                  "preemption"])
def test_a_short_context(two_pages: Bench, axis: str) -> None:
    """Prompts are cut to what the model takes; the conditions occur all the same."""
    good(two_pages, axis)


def test_chunking(bench: Bench) -> None:
    """Case A4: a prompt is cut at 1, 3 and page-sized steps, alone and behind a longer one."""
    evidence = good(bench, "chunking").evidence
    assert evidence["prompts cut in chunks of 1"] == 3
    assert evidence["steps of 8 with prompt and generated rows"] > 0


def test_page_placement(bench: Bench) -> None:
    """Case D7: state full of zeros, NaN and large numbers, and pages among those of others."""
    evidence = good(bench, "page_placement").evidence
    assert evidence["fills"] == ["NaN", "large numbers", "zeros"]
    assert evidence["page tables that are not in a row"] > 0


def test_prefix_hit(bench: Bench) -> None:
    """Cases A3 and D2: nothing is cached at first and after a flush, something is in between."""
    report = good(bench, "prefix_hit")
    evidence = report.evidence
    assert evidence["cached tokens, cold"] == evidence["cached tokens, flushed"] == 0
    for warm in ("same prompt", "longer prompt", "shared start", "two at once", "with drafts",
                 "from disk"):
        assert evidence[f"cached tokens, {warm}"] > 0
    assert report.control is not None and "one window ring" in report.control.text


def test_preemption(bench: Bench) -> None:
    """Case D5: every request is preempted more than once, and some for want of pages."""
    evidence = good(bench, "preemption").evidence
    for how in ("off", "exact", "off, drafts"):
        assert evidence[f"requests preempted, cache {how}"] == 3
        assert evidence[f"preemptions, cache {how}"] > 3
    assert evidence["preemptions for want of pages"] > 0


def test_prefill_vs_decode(bench: Bench) -> None:
    report = good(bench, "prefill_vs_decode")
    assert report.evidence["rows of r0 that were decoded"] == 11
    assert report.evidence["phases of scoring"] == ["prefill"] and report.counts["rows"] > 70
