"""compare.py's verdicts and exit codes on made-up samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare
import pytest

MACHINE = {"cpu": "some CPU", "isa": "avx2", "threads": 2, "versions": {"torch": "2"}}
STEADY = [100.0, 100.1, 99.9, 100.05, 99.95]
NOISY = [100.0, 160.0, 60.0, 130.0, 90.0, 75.0, 140.0]


def line(samples: list[float], name: str = "decode", unit: str = "us", better: str = "lower",
         machine: dict[str, Any] = MACHINE, **params: Any) -> str:
    return json.dumps({"format": 1, "name": name, "params": params, "samples": samples,
                       "unit": unit, "better": better, "more": {}, "machine": machine,
                       "source": {"commit": "c", "digest": "d"}})


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def go(old: list[str], new: list[str], *options: str) -> tuple[int, dict[str, str], str]:
        for name, lines in (("old", old), ("new", new)):
            (tmp_path / name).write_text("\n".join(lines) + "\n")
        code = compare.main([str(tmp_path / "old"), str(tmp_path / "new"), "--json", *options])
        out, err = capsys.readouterr()
        verdicts = {c["name"]: c["verdict"] for c in json.loads(out)["changes"]} if out else {}
        return code, verdicts, err
    return go


def scaled(samples: list[float], factor: float) -> list[float]:
    return [factor * s for s in samples]


def test_a_slower_time_and_a_lower_rate_are_regressions(run):
    old = [line(STEADY), line(STEADY, "rate", "tokens/s", "higher")]
    new = [line(scaled(STEADY, 1.1)), line(scaled(STEADY, 0.9), "rate", "tokens/s", "higher")]
    assert run(old, new)[:2] == (1, {"decode": "regression", "rate": "regression"})
    assert run(new, old)[:2] == (0, {"decode": "faster", "rate": "faster"})


def test_a_change_inside_the_noise_is_none(run):
    """The same factor decides where samples are steady, and not where they scatter."""
    assert run([line(NOISY)], [line(scaled(NOISY, 1.1))])[:2] == (0, {"decode": "same"})
    assert run([line(STEADY)], [line(scaled(STEADY, 1.02))])[:2] == (0, {"decode": "same"})
    assert run([line(STEADY)], [line(scaled(STEADY, 1.02))], "--tolerance", "0.001")[0] == 1


def test_records_of_one_quantity_are_visits_whose_spread_counts(run):
    """Three visits that disagree by more than a new value differs from them."""
    old = [line(scaled(STEADY, f)) for f in (0.8, 1.0, 1.2)]
    assert run(old, [line(scaled(STEADY, 1.15))])[:2] == (0, {"decode": "same"})
    assert run([line(STEADY)] * 3, [line(scaled(STEADY, 1.15))])[0] == 1


def test_two_samples_decide_nothing(run):
    assert run([line([100.0, 100.0])], [line([300.0, 300.0])])[:2] == (0, {"decode": "undecided"})


def test_a_missing_record_fails_unless_told(run):
    old = [line(STEADY), line(STEADY, "gone")]
    new = [line(STEADY), line(STEADY, "fresh")]
    expected = {"decode": "same", "gone": "missing", "fresh": "new"}
    assert run(old, new)[:2] == (1, expected)
    assert run(old, new, "--partial")[:2] == (0, expected)


def test_parameters_are_part_of_the_identity(run):
    code, _, _ = run([line(STEADY, batch=1)], [line(scaled(STEADY, 2), batch=16)])
    assert code == 1  # batch=1 is missing
    assert run([line(STEADY, a=1, b=2)], [line(STEADY, b=2, a=1)])[:2] == (0, {"decode": "same"})


@pytest.mark.parametrize("change, told", [
    ({"cpu": "another"}, "cpu is 'some CPU' and 'another'"),
    ({"versions": {"torch": "3"}}, "versions.torch is '2' and '3'")])
def test_another_machine_or_tool_is_refused_unless_told(run, change, told):
    old, new = [line(STEADY)], [line(scaled(STEADY, 2), machine=MACHINE | change)]
    code, verdicts, err = run(old, new)
    assert code == 2 and not verdicts and told in err and "--any-machine" in err
    assert run(old, new, "--any-machine")[:2] == (1, {"decode": "regression"})


@pytest.mark.parametrize("bad, told", [
    ("{", "line 2 is no record: JSONDecodeError"),
    ("{}", "line 2 is no record: KeyError: 'format'"),
    (line(STEADY).replace('"format": 1', '"format": 9'), "format is 9, expected 1"),
    (line([]), "line 2 is no record: AssertionError")])
def test_what_is_no_record_is_named(run, bad, told):
    code, _, err = run([line(STEADY), bad], [line(STEADY)])
    assert code == 2 and told in err and "next:" in err


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "the records cannot be read" in capsys.readouterr().err


def test_the_table_shows_ratio_and_verdict(tmp_path, capsys):
    (tmp_path / "old").write_text(line(STEADY, batch=1))
    (tmp_path / "new").write_text(line(scaled(STEADY, 1.5), batch=1))
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    out = capsys.readouterr().out
    assert "decode: batch=1" in out and "1.500" in out and "1 regression" in out
