"""In the declared order of additions the PyTorch reading of the spec gives DeepInfer's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from deepinfer.graph.make_model import make_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_model"


def run(*command: str) -> Any:
    """What a program of the example, with its folder first on the path, prints as JSON."""
    env = os.environ | {"OMP_NUM_THREADS": "1",
                        "PYTHONPATH": f"{EXAMPLE}{os.pathsep}{EXAMPLE.parents[1]}"}
    done = subprocess.run([sys.executable, *command], text=True, env=env, timeout=300,
                          capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


SUMS = """
import json
import numpy as np, torch
from declared import Declared
from deepinfer.numerics.formats import to_bf16
from deepinfer.numerics.sums import gemm

def bf16(*shape, low=0):
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(low, 1, shape)
    return to_bf16(values).astype(np.float32)

def same(x, y):
    return bool(np.array_equal(x.numpy().view(np.int32), y.view(np.int32)))

def declared(*given):
    return Declared().matmul(*map(torch.from_numpy, given))

rng, found = np.random.default_rng(0), {}
for name, k, low in (("plain", 160, 0), ("ragged", 75, -8), ("tiny", 64, -140)):
    a, b, start = bf16(70, k, low=low), bf16(33, k, low=low // 2), bf16(70, 33, low=low)
    expected = gemm(a, b)
    found[name] = same(declared(a, b), expected)
    found[name + ", started"] = same(declared(a, b, start), gemm(a, b, start))
    found[name + ", PyTorch"] = same(torch.from_numpy(a) @ torch.from_numpy(b).T, expected)
    found[name + ", products below the normal range"] = bool(
        ((a[:, None] * b != 0) & (np.abs(a[:, None] * b) < 2.0**-126)).any())
a, keys = bf16(1, 9, 4, 64), bf16(1, 9, 50, 64)
each = np.stack([gemm(x, y) for x, y in zip(a[0], keys[0])])[None]
found["batch"] = same(declared(a, keys), each)
each = np.stack([gemm(x, keys[0, 0]) for x in a[0]])[None]
found["shared"] = same(declared(a, keys[:, :1]), each)
print(json.dumps(found))
"""


def test_its_matrix_products_have_the_bits_of_the_declared_sum() -> None:
    found = run("-c", SUMS)
    assert found.pop("tiny, products below the normal range")
    other = [found.pop(name) for name in list(found) if "PyTorch" in name or "below" in name]
    assert not any(other)  # else equal bits would say nothing
    assert len(found) == 8 and all(found.values()), found


def test_each_layer_and_the_whole_forward_give_the_evaluators_bits(tmp_path: Path) -> None:
    make_model("tiny", tmp_path, seed=3)
    given = (str(EXAMPLE / "compare.py"), str(tmp_path), "--tokens", "16")
    found = run(*given)
    ones = {"rows_equal", "taps_equal", "draft_tokens_equal"}
    ones |= {f"{what}_{how}" for what in ("argmax", "logits_equal")
             for how in ("free", "with_their_picks")}
    assert {name: found[name] for name in ones} == dict.fromkeys(ones, 1.0)
    assert found["logit_error"] == found["worst_layer"] == found["confidence_error"] == 0
    # In PyTorch's order hardly a row of logits is the same: they are not equal by themselves.
    assert run(*given, "--order", "native")["logits_equal_free"] < 0.5


AGREEMENT = """
import json, sys
from pathlib import Path
import numpy as np
from agreement import agreement
from deepinfer import LLM, compile

path = Path(sys.argv[1])
with LLM(path, program=compile(path), max_num_seqs=4, num_threads=1, progress=False) as llm:
    ids = llm.encode(Path(sys.argv[2]).read_text())[:150]
    print(json.dumps(agreement(llm, path, [np.array(ids)])))
"""


def test_logits_of_the_bundled_models_program_are_the_modules_bits() -> None:
    model = EXAMPLE.parents[1] / "deepinfer" / "models" / "v41_tiny"
    found = run("-c", AGREEMENT, str(model), str(EXAMPLE / "agreement.py"))
    assert found["tokens"] == 150
    same = found.pop("with_the_declared_order")
    assert same["rows_equal"] == same["argmax"] == 1.0 and same["median_error"] == 0
    for other in ("free", "with_the_programs_picks", "of_the_module_with_itself"):
        assert found[other]["rows_equal"] < 0.5
        assert found[other]["differing"] == found[other]["of_them_near_ties"]
