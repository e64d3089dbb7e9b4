"""The model that ships: whole, small, described, and trained."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams, compile
from deepinfer.checkpoint import CheckpointReader, check_closed
from deepinfer.commands.make_model import default_model
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.weights import checkpoint_tensors

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_model"
CARD = (default_model() / "README.md").read_text(encoding="utf-8")
PROMPT = "def fibonacci(n):\n"
MEMBER = "class Stack:\n    def __len__(self):"
SKIP = 4  # as in examples/tiny_model/evaluate.py


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = default_model()
    with LLM(path, program=compile(path), max_num_seqs=4, progress=False) as made:
        yield made


def stated(row: str) -> float:
    """The bits per byte that a row of the card gives."""
    found = re.search(rf"^\| {re.escape(row)}[^|]*\| ([0-9.]+) \|$", CARD, re.MULTILINE)
    assert found is not None, row
    return float(found[1])


def test_it_is_whole_and_small(capsys: pytest.CaptureFixture[str]) -> None:
    path = default_model()
    assert "v41-tiny" in capsys.readouterr().err
    assert {f.name for f in path.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json"}
    assert sum(f.stat().st_size for f in path.iterdir()) <= 12_000_000
    cfg = ModelConfig.from_dir(path)
    assert (cfg.n_stages, cfg.sliding_window, cfg.vocab_size) == (3, 128, 4096)
    declared = {name: shape for name, _, shape in checkpoint_tensors(cfg)}
    with CheckpointReader(path) as reader:
        check_closed(reader, declared, ())


def test_its_card_states_what_was_measured() -> None:
    program, module = stated("compiled CPU Program"), stated("PyTorch module")
    assert abs(program / module - 1) <= 0.01
    assert program < stated("5-gram model")
    assert 1 < float(re.findall(r"\*\*([0-9.]+) tokens per step\*\*", CARD)[0]) <= 6
    for mechanism in ("Engram", "compressed entries", "sinks", "hyper-connection mixing",
                      "shared expert", "half of the window"):
        assert re.search(rf"^\| {mechanism} \| -?[0-9.]+ ± [0-9.]+ \|$", CARD, re.MULTILINE)
    for other in ("PSF License", "minutes", "calibration error", "well-formed"):
        assert other in CARD, other


def test_no_bound_of_its_measurement_is_missed() -> None:
    assert "No bound of `measure.py` is missed." in CARD


def test_a_prompt_may_end_before_or_behind_a_line_end(llm: LLM) -> None:
    """Cut there, a text has the tokens that it has as a whole."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "queue.py").read_text(encoding="utf-8")
    whole, cuts = list(llm.encode(text)), 0
    for match in re.finditer(r"\n+", text):
        for at in match.span():
            begin = list(llm.encode(text[:at]))
            assert whole[:len(begin)] == begin, text[at - 20:at + 20]
            cuts += 1
    assert cuts > 200


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:-1], MEMBER + "\n", MEMBER])
def test_it_writes_the_body_of_a_function(llm: LLM, prompt: str) -> None:
    text = llm.generate(prompt, SamplingParams(max_tokens=64, temperature=0))[0].text
    lines = (prompt + text).splitlines()
    trees = [tree for n in range(len(lines), len(lines) - 3, -1)  # but for a line cut short
             if (tree := parsed("\n".join(lines[:n]))) is not None]
    assert trees, text
    functions = [f for f in ast.walk(trees[0]) if isinstance(f, ast.FunctionDef)]
    assert functions[0].name in ("fibonacci", "__len__")  # without a body it would not parse


def parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def test_it_predicts_files_it_never_saw_better_than_the_5_gram_model(llm: LLM) -> None:
    names = [line.split(" ", 1)[1] for line in (EXAMPLE / "corpus.txt").read_text().splitlines()]
    files = [Path(sysconfig.get_paths()["stdlib"]) / name for name in names
             if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 12 == 0]
    bits = size = 0.0
    for file in [f for f in files if f.exists()][::10]:
        ids = list(llm.encode(file.read_text(encoding="utf-8", errors="replace")))[:512]
        logits = llm.score(ids[:-1]).astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        bits -= log_p[np.arange(len(logits)), ids[1:]][SKIP - 1:].sum() / np.log(2)
        assert llm.engine.text is not None
        size += len(llm.engine.text.tokenizer.decode(ids[SKIP:]).encode())
    assert size > 3000 and bits / size < stated("5-gram model")
