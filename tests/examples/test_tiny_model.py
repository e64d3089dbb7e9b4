"""The training example: all stages run, its export is a checkpoint, it reads the spec alike.

The example is a program of its own (plain imports of its folder), so tests run it as one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepseek_recipe", reason="renders the chats of the corpus")

from deepinfer.checkpoint import CheckpointReader, check_closed
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.weights import checkpoint_tensors

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_model"


def run(script: str, *args: str, timeout: float) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run([sys.executable, str(EXAMPLE / script), *args], text=True, env=env,
                          timeout=timeout, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    run("train.py", "--smoke", "--workers", "2", "--out", str(out), timeout=120)
    return out


def test_every_stage_runs_and_the_loss_falls(trained: Path) -> None:
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [e["stage"] for e in log if "done" in e] == ["target", "draft"]
    losses = [e["loss"] for e in log if e["stage"] == "target" and "loss" in e]
    assert losses and losses[-1] < 6.0  # ln 512 = 6.24 is where it starts
    assert log[-1]["stage"] == "export" and log[-1]["bytes"] < 12_000_000


def test_the_export_holds_exactly_the_declared_tensors(trained: Path) -> None:
    path = trained / "v41-tiny"
    cfg = ModelConfig.from_dir(path)
    declared = {name: shape for name, _, shape in checkpoint_tensors(cfg)}
    with CheckpointReader(path) as reader:
        check_closed(reader, declared, ())
        for name, shape in declared.items():
            assert reader.info(name).shape == tuple(shape), name


def test_a_finished_run_resumes_to_the_same_weights(trained: Path) -> None:
    before = CheckpointReader(trained / "v41-tiny").fingerprint()
    run("train.py", "--smoke", "--workers", "2", "--out", str(trained), timeout=120)
    assert CheckpointReader(trained / "v41-tiny").fingerprint() == before


def test_the_exported_model_evaluates_as_the_evaluator_does(trained: Path) -> None:
    """Two readings of the spec: in the same order of additions both give the same bits."""
    out = run("compare.py", str(trained / "v41-tiny"), "--tokens", "40", timeout=120)
    found = json.loads(out)
    assert found["rows_equal"] == found["logits_equal_free"] == 1.0
    assert found["draft_tokens_equal"] == 1.0


def test_real_speculation_pairs_each_confidence_with_its_outcome(trained: Path) -> None:
    """Of the engine's rounds, by what `speculation.py` watches; it fails if it sees none."""
    code = ("import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
            "from speculation import speculate; "
            "print(json.dumps(speculate(Path(sys.argv[2]), [[0, 40, 41, 42], [0, 50, 51]], 2)))")
    env = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run([sys.executable, "-c", code, str(EXAMPLE), str(trained / "v41-tiny")],
                          text=True, env=env, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] > 10 and len(found["ece"]) == 5 and max(found["ece"]) > 0
