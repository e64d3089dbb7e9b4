"""`deepinfer compile --op`: kernels of a target that has no whole phase."""

from __future__ import annotations

import json

from deepinfer.cli import main


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


def test_ops_that_cannot_be_built(capsys, tmp_path):
    out = str(tmp_path / "out")
    assert main(["compile", "v4.1-flash", "--target", "sm100", "--op", "embed", "--out", out]) == 3
    err = capsys.readouterr().err
    assert "op 'embed' has no kernel on target 'sm100'" in err and "norm_quant" in err
    assert main(["compile", "v4.1-flash", "--op", "embed", "--out", out]) == 2
    assert "cpu compiles whole Programs" in capsys.readouterr().err
