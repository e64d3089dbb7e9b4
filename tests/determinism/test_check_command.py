"""`deepinfer check`: its table, its JSON, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.checkpoint import write_checkpoint
from deepinfer.cli import main
from deepinfer.testing.invariance import AXES
from tests.determinism.subjects import HashSubject
from tests.determinism.test_locate import Faulty


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with weights; the subject that the command makes of it is another one."""
    write_checkpoint(tmp_path, {"w": np.zeros(1, np.float32)})
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, subject: HashSubject) -> None:
    monkeypatch.setattr("deepinfer.testing.invariance.model.ModelSubject",
                        lambda model, program: subject)
    monkeypatch.setattr("deepinfer.commands.check._program", lambda args: None)


def test_a_clean_check(model: Path, subject: HashSubject, monkeypatch: pytest.MonkeyPatch,
                       capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, subject)
    out = model / "certificate.json"
    assert main(["check", str(model), "--axis", "threads", "isa", "--requests", "1", "--seed", "1",
                 "--certificate", str(out)]) == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["axis", "verdict", "conditions", "requests", "tokens", "bits", "control",
                        "seconds"]
    assert lines[1][:5] == ["threads", "equal", "3", "3", "36"] and lines[1][6] == "caught"
    assert lines[2][:2] == ["isa", "equal"]
    assert shown.err.splitlines() == ["check: threads (0/2)", "check: isa (1/2)",
                                      "check: done (2/2)", "clean"]
    assert json.loads(out.read_text())["clean"] is True


def test_a_difference_is_exit_code_1(model: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, Faulty())
    asked = ["check", str(model), "--axis", "batch_size", "--requests", "1", "--no-controls"]
    assert main(asked) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == "not clean: batch_size"
    *_, what, cause = shown.out.splitlines()
    assert what.startswith("batch_size: request r0 under 2 at once: logits at position ")
    assert cause.startswith("batch_size: first value that differs: request r0, step ")
    assert " ulp; " in cause and "op linear at head" in cause
    assert main([*asked, "--json"]) == 1
    (axis,) = json.loads(capsys.readouterr().out)["axes"]
    assert axis["verdict"] == "different" and axis["origin"]["value"] == "head.logits"


def test_skipped_and_approximate(model: Path, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, HashSubject(levels=["generic"]))
    assert main(["check", str(model), "--axis", "isa", "--axis", "replay", "--requests", "1"]) == 0
    out = capsys.readouterr().out
    assert "isa: skipped: this machine runs one ISA level, generic" in out
    assert "replay: compact: {'rows': 12, 'argmax_agreement': 1.0" in out


@pytest.mark.parametrize(("given", "message"), [
    (["--axis", "speed"], "axis 'speed' is not known or empty"),
    (["--requests", "0"], "requests is 0, expected an int in 1..512"),
    (["--seed", "-1"], "seed is -1"),
    (["--certificate", "/nowhere/x.json"], "its directory does not exist"),
])
def test_what_is_refused(model: Path, given: list[str], message: str,
                         capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(model), *given]) == 2
    assert message in capsys.readouterr().err


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none")]) == 2
    assert "no checkpoint directory at" in capsys.readouterr().err


def test_the_help_names_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    text: Any = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in AXES)
