"""The certificate: what is in it, when it is clean, and how it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import DeterminismError, RequestError
from deepinfer.testing.certificate import AxisReport, Certificate, Control, NotInvariant
from deepinfer.testing.invariance import AXES, check
from tests.determinism.subjects import HashSubject


def report(**changes: Any) -> AxisReport:
    given: dict[str, Any] = {
        "name": "repeat", "text": "again", "verdict": "equal", "reason": None, "conditions": ["x"],
        "counts": {"bits": 1}, "evidence": {}, "differences": [], "origin": None,
        "control": Control("f", "breaks it", True, True, "seen"), "drift": None, "seconds": 0.0}
    return AxisReport(**{**given, **changes})


def made(*axes: AxisReport) -> Certificate:
    return Certificate({"program": "d0"}, axes, {}, {}, {}, "now")


@pytest.mark.parametrize(("changes", "good", "summary"), [
    ({}, True, "equal"),
    ({"control": None}, True, "equal"),
    ({"verdict": "skipped", "reason": "one level"}, True, "skipped: one level"),
    ({"verdict": "approximate", "control": None}, True, "approximate"),
    ({"verdict": "different", "differences": ["it differs"]}, False, "it differs"),
    ({"verdict": "not shown", "reason": "no hit"}, False, "not shown: no hit"),
    ({"verdict": "failed", "reason": "leak"}, False, "failed: leak"),
    ({"control": Control("f", "", False, True, None)}, False, "the control f was not caught"),
    ({"control": Control("f", "", True, False, "x")}, False,
     "the control f shows in the reference itself"),
])
def test_when_an_axis_is_good(changes: dict[str, Any], good: bool, summary: str) -> None:
    axis = report(**changes)
    assert axis.good is good and axis.summary == summary
    assert made(report(), axis).clean is good


def test_the_error_of_a_certificate() -> None:
    error = NotInvariant(made(report(), report(name="isa", verdict="not shown", reason="no level")))
    assert isinstance(error, DeterminismError)
    assert error.what == ("1 of 2 axes are not clean, expected all; isa: not shown: no level")
    assert error.where == "axis isa" and "--axis isa" in error.next


def test_a_check_makes_a_certificate(subject: HashSubject, tmp_path: Path) -> None:
    told = []
    got = check(subject, axes=["threads", "isa"], requests=1, seed=1,
                report=lambda *args: told.append(args))
    assert got.clean and told == [("threads", 0, 2), ("isa", 1, 2), ("done", 2, 2)]
    path = tmp_path / "certificate.json"
    got.write(path)
    read = json.loads(path.read_text())
    assert read["clean"] is True and read["format"] == 1 and read["subject"] == {"program": "d0"}
    assert read["settings"] == {"requests": 1, "seed": 1, "controls": True, "texts": 0,
                                "axes": ["threads", "isa"]}
    assert {"cpu", "isa", "threads", "system", "architecture"} == read["machine"].keys()
    assert read["versions"]["numpy"] and read["date"].endswith("+00:00")
    threads, isa = read["axes"]
    assert threads["good"] and threads["counts"]["requests"] == 3 and threads["counts"]["bits"] > 0
    assert isa["control"] == {"fault": "order_by_isa", "text": "another ISA level gives other "
                              "logits", "caught": True, "silent": True,
                              "first": isa["control"]["first"]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_certificate_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the certificate cannot be written"):
        made(report()).write(tmp_path / "nowhere" / "x.json")


@pytest.mark.parametrize(("given", "message"), [
    ({"axes": ["repeat", "speed"]}, "axis 'speed' is not known or empty, expected some of repeat"),
    ({"axes": []}, "expected some of repeat, batch_size"),
    ({"requests": 0}, "requests is 0, expected an int in 1..512"),
    ({"requests": True}, "requests is True"),
    ({"seed": -1}, "seed is -1, expected an int in 0..4294967295"),
])
def test_what_cannot_be_checked(subject: HashSubject, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check(subject, **given)


def test_the_table_of_axes() -> None:
    """Every axis of the issue, each with a control of its own but for the approximate one."""
    assert set(AXES) == {
        "repeat", "batch_size", "batch_order", "neighbours", "chunking", "page_placement",
        "prefix_hit", "preemption", "prefill_vs_decode", "draft_width", "acceptance",
        "sampling_seed", "together", "overlap", "threads", "isa", "restart", "replay"}
    assert [a.name for a in AXES.values() if a.control is None] == ["replay"]
    assert [a.name for a in AXES.values() if a.approximate] == ["replay"]
