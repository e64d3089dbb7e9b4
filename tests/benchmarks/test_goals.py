"""goals.py's table on made-up records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import goals
import pytest

MACHINE = {"cpu": "some CPU", "isa": "avx2", "threads": 2}


def record(name: str, goal: str | None, holds: bool, samples: list[float], unit: str = "ratio",
           more: dict[str, Any] | None = None, **params: Any) -> str:
    return json.dumps({"format": 1, "name": name, "params": params, "samples": samples,
                       "unit": unit, "machine": MACHINE,
                       "more": (more or {}) | {"goal": goal, "holds": holds}})


def ratio(name: str, goal: str, holds: bool, lower: float, upper: float, **params: Any) -> str:
    return record(name, goal, holds, [lower, upper], more={
        "median": (lower + upper) / 2, "lower": lower, "upper": upper}, **params)


LINES = [
    record("decode", None, False, [30.0], "tokens/s", batch=1),
    ratio("decode roofline", ">= 0.7", False, 0.5, 0.6, model="mini", threads=2, batch=1),
    ratio("overhead share", "<= 0.05", True, 0.02, 0.04, model="mini"),
    record("warm load", "< 1", True, [0.5, 0.9, 0.7], "s", model="mini"),
    record("resident memory", "<= 200000000, 1.15 x (checkpoint + pool)", True, [1.5e8], "bytes"),
    ratio("kernel ratio", ">= 0.8", True, 0.9, 1.0, op="dot", shape="a", rows=1, over="read"),
    ratio("kernel ratio", ">= 0.8", False, 0.4, 1.0, op="dot", shape="b", rows=1, over="read"),
    ratio("tuned over", ">= 1 but for noise", True, 0.99, 1.1, op="dot", kernel="k",
          over="default"),
]


def run(monkeypatch: pytest.MonkeyPatch, *args: Path | str) -> int:
    monkeypatch.setattr(sys, "argv", ["goals.py", *map(str, args)])
    return goals.main()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_each_goal_is_a_line_and_what_has_none_is_not(file, monkeypatch, capsys):
    assert run(monkeypatch, file) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Machine: some CPU, avx2, 2 threads."
    assert out[4:] == [
        "| decode roofline, batch 1 | 0.5 | >= 0.7 | **no** |",
        "| overhead share | 0.04 | <= 0.05 | yes |",
        "| warm load | 0.9 s | < 1 s | yes |",
        "| resident memory | 150 MB | <= 200 MB | yes |",
        "| kernel ratio, op dot, rows 1, over read | 0.6 (2 kernels, worst 0.4) | >= 0.8 "
        "| 1 of 2 |",
        "| tuned over, over default | 0.99 | >= 1 | yes |"]


def test_a_repeated_record_counts_once_as_it_was_last(file, monkeypatch, capsys):
    with file.open("a") as f:
        f.write(ratio("decode roofline", ">= 0.7", True, 0.75, 0.8, model="mini", threads=2,
                      batch=1) + "\n")
    run(monkeypatch, file)
    assert "| decode roofline, batch 1 | 0.75 | >= 0.7 | yes |" in capsys.readouterr().out


def test_it_replaces_what_stands_between_its_marks(file, tmp_path, monkeypatch):
    readme, picture = tmp_path / "README.md", tmp_path / "goals.png"
    readme.write_text(f"before\n{goals.BEGIN}\nstale\n{goals.END}\nafter\n")
    pytest.importorskip("matplotlib")
    for _ in range(2):
        assert run(monkeypatch, file, "--readme", readme, "--plot", picture) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    assert text.count("decode roofline") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("text", "said"), [
    ("", "0 records, expected some, of format 1"), ("{", "JSONDecodeError"),
    ('{"format": 2}\n', "1 records, expected some, of format 1"), ("3\n", "TypeError")])
def test_it_refuses_what_is_no_file_of_records(tmp_path, monkeypatch, capsys, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert run(monkeypatch, path) == 2
    error = capsys.readouterr().err
    assert said in error and f"where: {path}" in error and "--out" in error


def test_it_writes_to_no_readme_without_its_marks(file, tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{goals.END} {goals.BEGIN}")
    assert run(monkeypatch, file, "--readme", readme) == 2
    assert "there is no place for the table" in capsys.readouterr().err
    assert readme.read_text() == f"{goals.END} {goals.BEGIN}"
