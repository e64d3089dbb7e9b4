"""Records, goals and options that all benchmarks share."""

from __future__ import annotations

import json

import pytest
from pairs import Ratio
from records import Goal, Record, Report, arguments, ratio_record, settle, shown

STEADY = Ratio((1.0, 1.1, 0.9), 2.0, 2.0)  # one-sided 90 % bounds: 1 -+ 1.886 * 0.1/sqrt(3)


@pytest.mark.parametrize("goal, holds", [
    (Goal(0.89), True), (Goal(0.90), False), (Goal(most=1.11), True), (Goal(most=1.10), False)])
def test_a_goal_holds_if_the_bound_does(goal, holds):
    assert STEADY.lower == pytest.approx(0.8911, abs=1e-4)
    record = ratio_record("r", {}, STEADY, goal)
    assert record.more["holds"] is holds and record.samples == STEADY.ratios
    assert ("ok" if holds else "MISSED") in shown(record.more)
    assert ("[1.11]" if goal.most else "[0.891]") in shown(record.more)


def test_records_are_appended_with_machine_and_source(tmp_path):
    out = tmp_path / "records.jsonl"
    args = settle(arguments("").parse_args(["--smoke", "--out", str(out), "--threads", "1"]))
    report = Report(args)
    report.add(Record("a", {"rows": 1}, (1.0, 2.0), "us"))
    report.add(Record("b", {}, (3.0,), "tokens/s"))
    a, b = map(json.loads, out.read_text().splitlines())
    assert (a["better"], b["better"]) == ("lower", "higher")
    assert a["samples"] == [1.0, 2.0] and a["params"] == {"rows": 1}
    assert a["machine"]["isa"] == args.isa and a["machine"]["versions"]["compiler"]
    assert len(a["source"]["digest"]) == 16


def test_a_plot_is_written_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    args = settle(arguments("").parse_args(["--plot", str(path)]))
    Report(args).plot(["a", "b"], [1.0, 2.0], "us", line=1.5)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_pair_is_refused(capsys):
    with pytest.raises(SystemExit):
        arguments("").parse_args(["--pairs", "1"])
    assert "'1' is no number of pairs, expected an int >= 2" in capsys.readouterr().err
