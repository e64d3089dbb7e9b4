"""The axes of the machine: sound engines pass, conditions are proven, faults are caught."""

from __future__ import annotations

import os

import numpy as np
import pytest

from deepinfer.settings import usable_cpus
from deepinfer.testing.invariance import AXES, Bench, Outcome
from deepinfer.testing.invariance.harness import check_axis
from deepinfer.testing.invariance.machine_axes import rebuild
from deepinfer.testing.invariance.replay import drift
from tests.determinism.subjects import HashSubject
from tests.determinism.test_axes_of_company import good


def test_overlap(bench: Bench) -> None:
    evidence = good(bench, "overlap").evidence
    assert evidence.keys() == {f"times that another thread did host work, {how}"
                               for how in ("overlap", "overlap, cache", "overlap, drafts")}
    assert all(times > 5 for times in evidence.values())


def test_threads(bench: Bench) -> None:
    evidence = good(bench, "threads").evidence
    cores = usable_cpus()
    assert evidence["threads"] == sorted({1, cores + 1, 2 * cores + 1})


def test_isa(bench: Bench) -> None:
    assert good(bench, "isa").evidence == {"level of the reference": "avx2", "levels": ["generic"]}


def test_one_level_is_skipped_with_the_reason() -> None:
    report = check_axis(Bench(HashSubject(levels=["generic"]), requests=1, seed=1), AXES["isa"],
                        controls=True)
    assert report.verdict == "skipped" and report.good and report.control is None
    assert report.reason == "this machine runs one ISA level, generic"


def test_restart(bench: Bench) -> None:
    report = good(Bench(bench.subject, requests=2, seed=1, share=bench), "restart")
    assert report.evidence["another process"] != os.getpid()
    assert report.evidence["another hash seed"] and report.counts["requests"] == 2
    assert report.evidence["Program compiled again"] == "d0"


def test_another_program_is_seen(bench: Bench) -> None:
    """Compiled again, it has another digest; or it cannot be compared, which is no difference."""
    changed, unknown = Outcome(), Outcome()
    rebuild(Bench(HashSubject(rebuilt="d1"), requests=1, seed=1, share=bench), changed)
    assert "its digest is d1, expected d0" in str(changed.differences[0][0])
    rebuild(Bench(HashSubject(rebuilt=None), requests=1, seed=1, share=bench), unknown)
    assert not unknown.differences and not unknown.missing
    assert unknown.evidence["Program compiled again"] == "not compared: it is not there"


def test_replay_reports_its_drift(bench: Bench) -> None:
    report = check_axis(bench, AXES["replay"], controls=True)
    assert report.verdict == "approximate" and report.good and report.control is None
    assert report.drift is not None and report.drift["mask and compact differ in"] == 0
    for mode in ("mask", "compact", "encoder replay after a hit"):
        found = report.drift[mode]
        assert found["rows"] == report.evidence[f"rows compared, {mode}"] >= 3
        # Layers that read no other layer forget nothing that replay leaves out.
        assert found["argmax_agreement"] == 1 and found["kl"] == found["max_dlogit"] == 0


def test_drift_is_measured() -> None:
    """Against the formula: p = (1/2, 1/2), q = (1/4, 3/4), KL = ln 2 - ln(3)/2."""
    p, q = np.zeros(2, np.float32), np.log(np.array([1, 3], np.float32))
    found = drift([(p, q), (q, q)])
    assert found["rows"] == 2 and found["argmax_agreement"] == 0.5
    assert found["kl"] == pytest.approx((np.log(2) - np.log(3) / 2) / 2, rel=1e-6)
    assert found["max_dlogit"] == pytest.approx(np.log(3), rel=1e-6)
    assert drift([]) == {"rows": 0}
