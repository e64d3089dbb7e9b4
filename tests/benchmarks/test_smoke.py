"""Every benchmark runs at its smallest size, and writes records that compare with themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare
import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def records(tmp_path: Path, script: str, *options: str) -> list[dict[str, Any]]:
    """Runs a script with --smoke on one thread; its records."""
    out = tmp_path / "out.jsonl"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", "--threads", "1",
         "--out", str(out), *options], text=True, capture_output=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in out.read_text().splitlines()]
    for record in made:
        assert record["samples"] and record["source"]["digest"]
        assert {"cpu", "isa", "versions"} <= record["machine"].keys()
        assert record["machine"]["threads"] == 1
        assert record["params"].get("op", record["name"]) in " ".join(done.stdout.split())
    assert compare.main([str(out), str(out)]) == 0
    return made


def test_ceilings(tmp_path):
    made = records(tmp_path, "ceilings.py")
    assert {r["params"].get("what") for r in made} >= {"fma", "read", "launch"}
    assert {r["params"].get("dtype") for r in made} >= {"bf16", "fp32"}
    assert all(s > 0 for r in made for s in r["samples"])


def test_kernels_of_each_family(tmp_path):
    ops = ("packed_linear_fp8", "grouped_down", "window_attention", "index_topk",
           "silu_mul_fake_quant")
    made = records(tmp_path, "kernels.py", "--op", *ops)
    kernels = [r for r in made if r["name"] == "kernel"]
    assert {r["params"]["op"] for r in kernels} == set(ops)
    assert {r["params"]["family"] for r in kernels} == {"gemm", "experts", "attention", "index",
                                                        "fused"}
    assert all(r["more"]["bytes"] > 0 and r["more"]["flops"] > 0 for r in kernels)
    ratios = [r for r in made if r["name"] == "kernel ratio"]
    assert {r["params"]["over"] for r in ratios} == {"read", "torch bf16", "torch fp32"}
    small = [r for r in ratios if r["params"]["family"] == "gemm"]
    assert {r["params"]["over"]: r["more"].get("goal") for r in small} == {
        "read": ">= 0.8", "torch bf16": ">= 1.6", "torch fp32": None}


def test_compile(tmp_path):
    made = records(tmp_path, "compile.py")
    assert [r["name"] for r in made] == ["cold seconds", "warm seconds"]


def test_loading(tmp_path):
    made = records(tmp_path, "loading.py")
    assert [r["name"] for r in made] == [
        "cold load", "warm load", "to the first token", "uncached load", "resident memory",
        "share of two processes"]
    resident = made[4]["more"]
    assert 0 < resident["checkpoint"] < made[4]["samples"][0] == resident["rss"]
    assert all(0 < share <= resident["rss"] * 1.5 for share in made[5]["samples"])


def test_engine(tmp_path):
    made = records(tmp_path, "engine.py", "--case", "adaptive", "overlap")
    assert [r["name"] for r in made] == ["adaptive drafts"] * 2 + ["hidden host work"]


def test_serving(tmp_path):
    made = records(tmp_path, "serving.py")
    assert {r["name"] for r in made} == {
        "decode", "decode roofline", "prefill", "prefill roofline", "peer decode",
        "decode over peer", "prefill over peer", "overhead", "overhead share", "two threads"}
    met = [r["more"]["experts"] for r in made if r["name"] == "decode"]
    assert met[0] == 2 and 2 < met[1] <= 4  # one row meets its 2 of 8, two rows more
    assert all(r["more"]["agreement"] > 0.5 for r in made if r["name"] == "decode over peer")


def test_tuning(tmp_path):
    made = records(tmp_path, "tuning.py")
    rows = [r for r in made if r["name"] == "tuned over"]
    assert {r["params"]["over"] for r in rows} == {"exhaustive", "median", "default"}
    assert {tuple(r["params"]["rows"]) for r in rows} == {(1,), (65,)}  # a phase each
    assert all(set(r["samples"]) == {1.0} for r in rows if r["more"]["same"])
    totals = {r["params"]["over"]: r["more"] for r in made if r["name"] == "tuned over, all"}
    assert {n: t["goal"] for n, t in totals.items()} == {
        "exhaustive": ">= 0.97", "median": ">= 1.15", "default": ">= 1 but for noise"}
    assert totals["default"]["holds"] == (totals["default"]["upper"] >= 1)
    spent = {r["params"]["part"]: r for r in made if r["name"] == "halving's share of time"}
    assert set(spent) == {"all", "gate and time", "build", "gate", "time"}
    assert spent["all"]["more"]["goal"] == spent["gate and time"]["more"]["goal"] == "<= 0.25"
    for mode in ("halving", "exhaustive"):
        parts = [spent[p]["more"]["seconds"][mode] for p in ("build", "gate", "time")]
        assert min(parts) > 0 and sum(parts) <= spent["all"]["more"]["seconds"][mode]
