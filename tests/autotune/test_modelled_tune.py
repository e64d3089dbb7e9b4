"""`deepinfer-tune tune` for a target that has no device here: ranked, and labelled so."""

from __future__ import annotations

import json

import pytest

from autotune.cli import main
from autotune.model import LABEL


@pytest.mark.parametrize("target", ["sm100", "ascend950"])
def test_ranks_are_labelled_modelled_and_never_applied(target, tmp_path, capsys):
    base = ["--db", str(tmp_path / "tuning.sqlite3")]
    asked = ["tune", "tiny", "--target", target, "--op", "norm_quant", "--rows", "16"]
    assert main([*asked, *base, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events and {e["event"] for e in events} == {LABEL}
    assert {e["target"] for e in events} == {target} and all(e["ns"] > 0 for e in events)
    schedules = {e["schedule"] for e in events}
    assert len(schedules) > 1

    assert main(["report", *base]) == 0
    out = capsys.readouterr().out
    assert f"{LABEL}, not measured" in out and all(s in out for s in schedules)

    # A model decides nothing: there is no machine whose winners could be applied.
    file = tmp_path / "schedules.json"
    assert main(["apply", "--target", target, "--out", str(file), *base]) == 3
    assert "0 machines fit" in capsys.readouterr().err and not file.exists()


def test_the_table_says_what_there_is_no_device_for(tmp_path, capsys):
    assert main(["tune", "tiny", "--target", "sm100", "--op", "norm_quant", "--rows", "16",
                 "--db", str(tmp_path / "db")]) == 0
    assert "modelled, not measured: there is no sm100 device" in capsys.readouterr().out
