"""`deepinfer inspect`: the vocabulary, graphs and single layers, without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepinfer.cli import main
from deepinfer.commands.inspect import all_ops
from deepinfer.commands.inspect_graph import build, passes_to_print, which
from deepinfer.commands.layer_view import layer_text, ranges, role
from deepinfer.commands.output import size, table
from deepinfer.errors import RequestError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.make_model import tiny_config
from deepinfer.ir.text import graph_text
from deepinfer.ir.types import Kind


@pytest.fixture(scope="module")
def release() -> ModelConfig:
    return ModelConfig.release()


def test_ops_lists_every_op_and_shows_one(capsys):
    assert main(["inspect", "ops", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [op["name"] for op in listed] == list(all_ops()) and len(listed) > 40
    assert main(["inspect", "ops", "rms_norm"]) == 0
    out = capsys.readouterr().out
    op = all_ops()["rms_norm"]
    assert op.signature.text in out and op.doc in out and op.order.digest() in out


def test_an_unknown_op_is_refused(capsys):
    assert main(["inspect", "ops", "rms_nrom"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no op 'rms_nrom'" in err


# Spec §1.2, the table of layer roles.
@pytest.mark.parametrize(("layer", "text"), [
    (0, "SWA, window attention only"),
    (1, "SWA, window attention only, Engram"),
    (2, "Full, ratio 2, KV source, index source"),
    (3, "Reuse, ratio 2"),
    (14, "Full, ratio 2, KV source, index source, Engram"),
    (19, "Reuse, ratio 2, end of encoder"),
    (20, "Full, ratio 1, KV source, index source, candidate source, start of decoder"),
    (24, "Reindex, ratio 1, index source"),
    (39, "Reuse, ratio 1, DSpark tap 2"),
    (41, "DSpark stage 1, window attention only"),
])
def test_roles_of_the_release(release, layer, text):
    assert role(release, release.layer(layer)) == text


def test_layer_20_of_the_release_is_legible(capsys):
    assert main(["inspect", "graph", "--config", "v4.1-flash", "--layer", "20"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "Full, ratio 1, KV source, index source, candidate source, start of decoder" in lines[0]
    assert len(lines) < 130 and max(map(len, lines)) < 260
    for fact in ("read by layers 20-39", "read by layers 20-23", "layers 24, 28, 32, 36 select",
                 "base 160000, YaRN factor 16 from 65536",
                 "e4m3[32768,1280] + ue8m0[1024,40]", "written by kv_write",
                 "= linear_fp8(%.attn.quantize_fp8.1.{q, sf}, @.attn.wq_b.{weight, scale})"):
        assert fact in out
    assert "layers.21" not in out


@pytest.mark.parametrize(("phase", "layer"), [("prefill", 4), ("decode", 8), ("draft", 13)])
def test_a_layer_shows_each_of_its_nodes_and_values_once(phase, layer):
    cfg = tiny_config()
    graph, spec = build(cfg, phase), cfg.layer(layer)
    prefix = f"mtp.{layer - 12}" if phase == "draft" else f"layers.{layer}"
    nodes = [n for n in graph.nodes if n.loc.startswith(f"{prefix}.")]
    text = layer_text(cfg, graph, spec, "source graph")
    writes = tuple(f"  {n.op.name}(" for n in nodes if not n.outputs)
    listed = [x for x in text.splitlines() if x.startswith(("  %", *writes))]
    assert len(listed) == len(nodes) > 20
    for node, line in zip(nodes, listed, strict=True):
        assert f"{node.op.name}(" in line
    for value in {v for n in nodes for v in n.inputs if v.kind is Kind.STATE}:
        assert str(value.type) in text


def test_a_layer_says_what_enters_and_leaves():
    cfg = tiny_config()
    text = layer_text(cfg, build(cfg, "decode"), cfg.layer(8), "source graph")
    enters, = (x for x in text.splitlines() if x.startswith("  enters"))
    leaves, = (x for x in text.splitlines() if x.startswith("  leaves"))
    assert "%layers.7.ffn.hyper_post" in enters and "%.ffn.hyper_post" in leaves
    assert "topk" in leaves and "topk" not in enters  # layer 9 reads it
    assert "candidates  of layer 6" in text


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify", "draft"])
def test_every_phase_of_the_release_builds_and_prints(phase, capsys):
    assert main(["inspect", "graph", "v4.1-flash", "--phase", phase]) == 0
    out, err = capsys.readouterr()
    head, body = out.split("\n", 1)
    assert head == "# source graph" and body.startswith(f"graph {phase}\n")
    assert body == graph_text(build(ModelConfig.release(), phase))
    assert "nodes; --layer N" in err


@pytest.mark.parametrize(("given", "meant"), [
    ((None, None), ("decode", None)), ((None, 20), ("decode", 20)), ((None, 41), ("draft", 41)),
    (("prefill", 0), ("prefill", 0)), (("draft", 2), ("draft", 42)), (("draft", 42), ("draft", 42)),
])
def test_which_layer_is_meant(release, given, meant):
    assert which(release, *given) == meant


@pytest.mark.parametrize(("phase", "layer", "message"), [
    ("decode", 40, "phase 'decode' has no layer 40, it has 0..39"),
    (None, 43, "phase 'decode' has no layer 43"), (None, -1, "has no layer -1"),
    ("draft", 3, "phase 'draft' has no layer 3, it has 40..42"),
])
def test_layers_that_are_not_there(release, phase, layer, message):
    with pytest.raises(RequestError, match=message):
        which(release, phase, layer)


def test_a_model_without_stages_has_no_draft():
    cfg = replace(tiny_config(), num_nextn_predict_layers=0,
                  compress_ratios=tiny_config().compress_ratios[:12])
    with pytest.raises(RequestError, match="no DSpark stages, so no phase 'draft'"):
        build(cfg, "draft")


def test_passes_are_chosen_by_name():
    known = ["fuse_a", "drop_b"]
    assert passes_to_print(["drop_b"], known) == {"drop_b"}
    assert passes_to_print(["all"], known) == set(known)
    with pytest.raises(RequestError, match="no pass 'fuse_z', the target has fuse_a, drop_b"):
        passes_to_print(["fuse_z"], known)


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert main(["inspect", "graph", str(tmp_path / "none")]) == 2
    assert "no model at" in capsys.readouterr().err


def test_passes_and_targets_of_one_or_of_all(capsys):
    for what in ("passes", "targets"):
        assert main(["inspect", what, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(found) == ["cpu", "sm100", "ascend950"]
        assert main(["inspect", what, "--target", "sm100", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"sm100": found["sm100"]}
    assert "norm_quant" in found["ascend950"]["kernels"]


def test_a_target_whose_packages_are_missing(capsys, monkeypatch):
    def load(name):
        raise ModuleNotFoundError("No module named 'tilelang.language'", name="tilelang.language")

    monkeypatch.setattr("deepinfer.targets.base.importlib", SimpleNamespace(import_module=load))
    assert main(["inspect", "passes", "--target", "cpu"]) == 3
    err = capsys.readouterr().err
    assert "tilelang.language is not installed" in err and "deepinfer-compiler[compile]" in err


def test_small_things():
    assert ranges([2, 3, 4, 8, 10, 11]) == "2-4, 8, 10-11" and ranges([]) == "none"
    assert [size(n) for n in (0, 999, 1000, 123456, 7_402_000_000)] == [
        "0 B", "999 B", "1 KB", "123 KB", "7.4 GB"]
    assert table([("a", 1), ("bbb", "c")]) == "a    1\nbbb  c"
