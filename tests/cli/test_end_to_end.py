"""The commands that compile and run: make-model, compile, run, score, inspect on a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from deepinfer.cli import main
from deepinfer.commands import make_model, run
from deepinfer.program import Program
from deepinfer.runtime.devices.isa import host_levels

TOKENS = "0,17,5,300,42,8,8,8,99,1,250,3"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model"
    assert main(["make-model", "tiny", str(path), "--seed", "7"]) == 0
    return path


@pytest.fixture(scope="module")
def program(model) -> Path:
    path = model.parent / "program"
    assert main(["compile", str(model), "--out", str(path)]) == 0
    return path


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    """What a command prints with --json; only that is on stdout."""
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_compile_writes_a_program_and_says_which(model, program, capsys):
    found = answer(capsys, "compile", str(model / "config.json"), "--out", str(program))
    assert found["path"] == str(program) and found["isa"] == [host_levels()[-1]]
    loaded = Program.load(program)
    assert found["digest"] == loaded.digest
    assert found["launches"] == {n: len(p.launches) for n, p in loaded.phases.items()}
    assert set(loaded.phases) == {"prefill", "decode", "verify", "draft"}


def test_run_on_the_program_and_on_the_cached_one_agree(model, program, capsys):
    argv = ["run", str(model), "--tokens", TOKENS, "--max-tokens", "6", "--temperature", "1",
            "--seed", "3"]
    first = answer(capsys, *argv, "--program", str(program))
    second = answer(capsys, *argv, "--threads", "1")
    assert first == second
    assert len(first["token_ids"]) == first["usage"]["completion_tokens"] <= 6
    assert first["prompt_token_ids"] == json.loads(f"[{TOKENS}]")
    assert answer(capsys, *argv[:-1], "4")["token_ids"] != first["token_ids"]


def test_profile_of_kernels(model, program, capsys):
    argv = ["profile", str(model), "--kernels", "--tokens", "9", "--batch", "2", "--program",
            str(program)]
    found = answer(capsys, *argv)
    assert list(found) == ["prefill of 9 tokens", "decode of 2 requests"]
    phases = Program.load(program).phases
    for ops, phase in zip(found.values(), ("prefill", "decode"), strict=True):
        assert {op: s["launches"] for op, s in ops.items()} == Counter(
            op for op, _, _ in phases[phase].launches)
        times = [s["ns"] for s in ops.values()]
        assert times == sorted(times, reverse=True) and times[0] > 0
        assert ops["packed_linear_fp8"]["flops"] > ops["packed_linear_fp8"]["bytes"] > 0
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("prefill of 9 tokens: ") and "\ndecode of 2 requests: " in out
    assert out.splitlines()[1].split() == ["op", "launches", "time", "share", "GB/s", "GFLOP/s"]
    for wrong in ("--tokens", "--batch"):
        assert main([*argv, wrong, "100000"]) == 2
        err = capsys.readouterr().err
        assert f"{wrong[2:]} is 100000, expected 1.." in err and f"where: {wrong}" in err


def test_run_prints_the_text_and_nothing_else(model, program, capsys):
    argv = ["run", str(model), "--prompt", "Once", "--max-tokens", "8", "--program", str(program)]
    text = answer(capsys, *argv)["text"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.removesuffix("\n") == text.removesuffix("\n")
    assert "8 generated in" in err and err.rstrip().endswith("ended by length")


def test_score_writes_the_logits_and_chunks_change_no_bit(model, program, tmp_path, capsys):
    found = []
    ids = tmp_path / "ids.json"
    ids.write_text(f"[{TOKENS}]")
    for name, tokens, more in (("a.npz", TOKENS, []), ("b.npz", f"@{ids}", ["--chunk", "5"]),
                               ("c", TOKENS, ["--chunk", "1"])):
        out = tmp_path / name
        said = answer(capsys, "score", str(model), "--tokens", tokens, "--out", str(out),
                      "--program", str(program), *more)
        with np.load(out) as arrays:
            assert arrays.files == ["logits"]
            found.append(arrays["logits"])
        assert said["shape"] == [12, 512] and said["path"] == str(out)
    assert found[0].dtype == np.float32 and found[0].shape == (12, 512)
    assert np.isfinite(found[0]).all() and np.ptp(found[0]) > 0
    assert all(np.array_equal(found[0].view(np.uint32), x.view(np.uint32)) for x in found[1:])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz", "c", "ids.json"]


def test_greedy_run_picks_the_best_score(model, program, tmp_path, capsys):
    out = tmp_path / "logits.npz"
    answer(capsys, "score", str(model), "--tokens", TOKENS, "--out", str(out),
           "--program", str(program))
    best = int(np.load(out)["logits"][-1].argmax())
    said = answer(capsys, "run", str(model), "--tokens", TOKENS, "--max-tokens", "1",
                  "--program", str(program))
    assert said["token_ids"] == [best]


def test_inspect_program_checks_and_describes(program, capsys):
    found = answer(capsys, "inspect", "program", str(program), "--phase", "decode")
    loaded = Program.load(program)
    assert found["digest"] == loaded.digest and found["files"] == loaded.manifest["files"]
    launches = [(x["op"], x["kernel"], x["at"]) for x in found["launches"]]
    assert launches == list(loaded.phases["decode"].launches)
    assert main(["inspect", "program", str(program)]) == 0
    text = capsys.readouterr().out
    assert loaded.digest in text and "12 layers, hidden 128, vocabulary 512" in text


def test_a_damaged_program_is_refused(program, tmp_path, capsys):
    copy = tmp_path / "copy"
    for name in ("manifest.json", *Program.load(program).manifest["files"]):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((program / name).read_bytes())
    assert main(["inspect", "program", str(copy)]) == 0
    victim = next(copy.glob("bin/*.so"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert main(["inspect", "program", str(copy)]) == 2
    assert victim.name in capsys.readouterr().err


def test_kernels_are_native_only_with_a_program(program, capsys, monkeypatch, tmp_path):
    found = answer(capsys, "inspect", "kernels", "--program", str(program))["kernels"]["cpu"]
    assert found["rms_norm"] == "native" and found["sample"] == "native"
    assert found["linear_fp8"] == "rewritten by widen_activations"
    assert found["candidate_mask"] == "rewritten by stream_index"
    assert "missing" not in found.values()
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    bare = answer(capsys, "inspect", "kernels")["kernels"]["cpu"]
    assert bare["rms_norm"] == "declared" and "native" not in bare.values()
    assert bare["linear_fp8"] == found["linear_fp8"]


def test_graphs_after_passes(capsys):
    argv = ["inspect", "graph", "v4.1-flash", "--layer", "20"]
    assert main([*argv, "--print-after", "widen_activations", "--lowered"]) == 0
    out = capsys.readouterr().out
    widened, lowered = out.split("decode, lowered for cpu", 1)
    assert widened.startswith("decode, after pass widen_activations, layers.20")
    assert "wide_linear_fp8(" in widened and "packed_linear_fp8(" not in widened
    assert "packed_linear_fp8(" in lowered and "as tile16_e4m3" in lowered


def test_the_default_model_comes_with_the_package_and_is_announced(capsys):
    path = make_model.default_model()
    assert "v41-tiny" in capsys.readouterr().err
    assert {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"} <= {
        p.name for p in path.iterdir()}
    assert sum(p.stat().st_size for p in path.iterdir()) <= 12_000_000


@pytest.mark.parametrize(("argv", "message"), [
    (["run", "--prompt", "x", "--temperature", "nan"], "temperature is nan"),
    (["run", "--prompt", "x", "--top-p", "0"], "top_p is 0.0"),
    (["run", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
    (["run", "--prompt", "x", "--threads", "0"], "threads is 0"),
    (["run", "none", "--prompt", "x"], "no checkpoint directory at 'none'"),
    (["run", "v4.1-flash", "--prompt", "x"], "no checkpoint directory at 'v4.1-flash'"),
    (["score", "none", "--tokens", "1", "--out", "x.npz"], "no checkpoint directory"),
    (["score", "none", "--tokens", "1", "--out", "no/x.npz"], "its directory does not exist"),
    (["score", "none", "--tokens", "1", "--out", "x.npz", "--chunk", "0"], "chunk is 0"),
    (["compile", "none", "--out", "x"], "no model at 'none'"),
    (["compile", "v4.1-flash", "--out", "x", "--jobs", "0"], "jobs is 0"),
    (["compile", "v4.1-flash", "--out", "x", "--max-num-seqs", "0"], "max_num_seqs is 0"),
    (["compile", "v4.1-flash", "--out", "x", "--max-model-len", "9999999"],
     "max_model_len is 9999999, the model has 1048576 positions"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_arguments_are_found_before_anything_is_compiled(
        argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tokens", "message"), [
    ("512", "token id 512 is outside the vocabulary, expected 0..511"),
    (",".join(["1"] * 300), "300 tokens"),
])
def test_bad_prompts_exit_with_2(tokens, message, model, program, capsys, tmp_path):
    for command in (["run", str(model)], ["score", str(model), "--out", str(tmp_path / "x.npz")]):
        assert main([*command, "--tokens", tokens, "--program", str(program)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err


def test_a_program_for_another_model_names_the_field(program, tmp_path, capsys):
    other = tmp_path / "other"
    assert main(["make-model", "tiny", str(other)]) == 0
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["sliding_window"] = 16
    (other / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["run", str(other), "--tokens", "1", "--program", str(program)]) == 2
    assert "model.text_config.sliding_window is 8, expected 16" in capsys.readouterr().err


def test_control_characters_do_not_reach_a_terminal():
    assert run.printable("a\x1b[31mb\nc\td\x00é") == "a\\x1b[31mb\nc\td\\x00é"
