"""`deepinfer compile --op`: kernels of a target that has no whole phase."""

from __future__ import annotations

import json

import pytest

from deepinfer.cli import main
from deepinfer.commands.inspect_kernels import config_for
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.make_model import mini_config, tiny_config
from deepinfer.targets.base import load_target
from deepinfer.targets.sm100.toolchain import find


def test_sources_launch_data_and_gates(capsys, tmp_path):
    out = tmp_path / "out"
    assert main(["compile", "v4.1-flash", "--target", "sm100", "--op", "norm_quant", "linear_fp4",
                 "rope_window_write", "--emit", "source", "--out", str(out), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["symbols"]) == {"norm_quant", "linear_fp4", "rope_window_write"}
    assert len(made["symbols"]["linear_fp4"]) == 2  # w1 and w2 of an expert
    for symbols in made["symbols"].values():
        for symbol in symbols:
            assert f"src/{symbol}.cu" in made["files"]
            assert symbol in (out / "src" / f"{symbol}.cu").read_text()
            assert json.loads((out / "src" / f"{symbol}.json").read_text())["launch"]
            states = {status for _, status, _ in made["gates"][symbol]}
            assert states <= {"passed", "not checked"}
    assert not (out / "bin").exists()


def test_sources_of_ascend950(capsys, tmp_path):
    out = tmp_path / "out"
    assert main(["compile", "v4.1-flash", "--target", "ascend950", "--op", "norm_quant", "--emit",
                 "source", "--out", str(out), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert list(made["symbols"]) == ["norm_quant"] and made["symbols"]["norm_quant"]
    files = {f"src/{s}.{kind}" for s in made["symbols"]["norm_quant"] for kind in ("asc", "json")}
    assert set(made["files"]) == files == {
        f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file()}
    for symbol, gates in made["gates"].items():
        assert symbol in (out / "src" / f"{symbol}.asc").read_text()
        assert ["compiles", "not checked", "only sources were asked for"] in gates
        assert {status for _, status, _ in gates} == {"passed", "not checked"}


def test_inspect_kernels_says_how_far_each_kernel_is(capsys, tmp_path, monkeypatch):
    """Each step is seen only after it was done: sources, then binaries; another op stays behind."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(mini_config().to_json()))

    def far() -> dict[str, str]:
        argv = ["inspect", "kernels", "--target", "sm100", "--config", str(config), "--json"]
        assert main(argv) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)["kernels"]["sm100"]
        waiting = " ".join(op for op, status in found.items() if status == "declared")
        assert f"compile {config} --target sm100 --out DIR --op {waiting}`" in err
        return {op: found[op] for op in ("norm_quant", "topk", "embed", "rms_norm")}

    def build(*options: str) -> None:
        assert main(["compile", str(config), "--target", "sm100", "--op", "norm_quant", *options,
                     "--out", str(tmp_path / "out")]) == 0
        capsys.readouterr()

    rest = {"topk": "declared", "embed": "missing", "rms_norm": "missing"}
    assert far() == {"norm_quant": "declared", **rest}
    build("--emit", "source")
    assert far() == {"norm_quant": "generated", **rest}
    if find("nvcc") is None:
        pytest.skip("no nvcc: nothing can be compiled")
    build()
    assert far() == {"norm_quant": "compiled", **rest}


def test_whose_kernels_are_inspected():
    assert config_for(load_target("cpu"), None) == ("MODEL", tiny_config())
    assert config_for(load_target("sm100"), None)[0] == "v4.1-flash"
    assert config_for(load_target("cpu"), "v4.1-flash")[1] == ModelConfig.release()


def test_ops_that_cannot_be_built(capsys, tmp_path):
    out = str(tmp_path / "out")
    assert main(["compile", "v4.1-flash", "--target", "sm100", "--op", "embed", "--out", out]) == 3
    err = capsys.readouterr().err
    assert "op 'embed' has no kernel on target 'sm100'" in err and "norm_quant" in err
    assert main(["compile", "v4.1-flash", "--emit", "source", "--out", out]) == 2
    assert "--emit source was given without --op" in capsys.readouterr().err
    assert main(["compile", "v4.1-flash", "--op", "embed", "--out", out]) == 2
    assert "cpu compiles whole Programs" in capsys.readouterr().err
