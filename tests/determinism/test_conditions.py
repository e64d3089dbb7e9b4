"""A condition that does not occur is not a pass: engines that ignore a setting are found out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepinfer.runtime.engine import Engine
from deepinfer.testing.invariance import AXES, Bench, NotInvariant, Setting, check
from deepinfer.testing.invariance.harness import check_axis
from deepinfer.testing.invariance.subject import Wrap
from tests.determinism.subjects import HashSubject


class Deaf:
    """A subject that ignores these settings, as a flag that does nothing would."""

    def __init__(self, inner: HashSubject, **ignored: Any) -> None:
        self.inner, self.ignored = inner, ignored

    def engine(self, setting: Setting, wrap: Wrap) -> Engine:
        return self.inner.engine(replace(setting, **self.ignored), wrap)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize(("axis", "ignored", "missing"), [
    ("prefix_hit", {"prefix_cache": "off"}, "cached tokens, same prompt is 0"),
    ("draft_width", {"draft": "off"}, "most drafts verified at once, width 5 is 0"),
    ("acceptance", {"draft": "off"}, "times 5 of 5 were accepted is 0"),
    ("overlap", {"overlap": False}, "times that another thread did host work, overlap is 0"),
    ("chunking", {"chunk": None}, "prompts cut in chunks of 3 is 0"),
    ("batch_size", {"seqs": 1}, "most requests in a step, 2 allowed is 1"),
    ("neighbours", {"nan_token": None}, "requests that were NaN is 0"),
    ("threads", {"threads": 2}, "threads is [2]"),
    ("isa", {"isa": None}, "levels is ['avx2']"),
])
def test_a_deaf_engine_is_found_out(subject: HashSubject, bench: Bench, axis: str,
                                    ignored: dict[str, Any], missing: str) -> None:
    """Case A3: a test that passes without a hit has tested nothing."""
    deaf = Bench(Deaf(subject, **ignored), requests=2, seed=1, share=bench)
    report = check_axis(deaf, AXES[axis], controls=False)
    assert report.verdict == "not shown" and not report.good
    assert report.reason is not None and missing in report.reason


def test_preempt_that_does_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "preempt", lambda self, name: False)
    report = check_axis(bench, AXES["preemption"], controls=False)
    assert report.verdict == "not shown" and "preemptions, cache off is 0" in str(report.reason)


def test_an_engine_that_fails_is_no_pass(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leak of state is found by the engine's own check after every step."""
    monkeypatch.setattr("deepinfer.runtime.pages.PagePool.release", lambda self, owner: None)
    deaf = Bench(bench.subject, requests=1, seed=1, share=bench)
    report = check_axis(deaf, AXES["repeat"], controls=False)
    assert report.verdict == "failed" and not report.good
    assert str(report.reason).startswith("DeepInferError: state is held by ['r0']")


def test_a_control_that_is_missed_is_no_pass(subject: HashSubject, bench: Bench) -> None:
    blind = replace(AXES["batch_size"], control="sum_by_threads")
    report = check_axis(Bench(subject, requests=2, seed=1, share=bench), blind, controls=True)
    assert report.verdict == "equal" and not report.good
    assert report.summary == "the control sum_by_threads was not caught"


def test_a_control_that_shows_alone_is_no_pass(subject: HashSubject, bench: Bench,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.testing.faults import KernelByRows, owners

    monkeypatch.setattr(KernelByRows, "after", lambda self, phase, inputs, out: self.nudge(
        phase, out, range(len(owners(inputs)))))
    report = check_axis(Bench(subject, requests=2, seed=1, share=bench), AXES["batch_size"],
                        controls=True)
    assert report.summary == "the control kernel_by_rows shows in the reference itself"


def test_a_condition_not_shown_raises(subject: HashSubject) -> None:
    with pytest.raises(NotInvariant, match="1 of 1 axes are not clean") as caught:
        check(Deaf(subject, isa=None), axes=["isa"], requests=1, controls=False)
    assert "levels is" in caught.value.what
    assert caught.value.certificate.axes[0].verdict == "not shown"
