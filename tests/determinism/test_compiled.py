"""The check on a compiled Program of the tiny model: every axis clean, every control caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.compiler import compile, read_config
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import make_model
from deepinfer.testing.invariance import (
    AXES,
    Bench,
    ModelSubject,
    Outcome,
    Setting,
    Stage,
    Trial,
    check,
)
from deepinfer.testing.invariance.harness import check_axis
from deepinfer.testing.invariance.locate import locate
from deepinfer.testing.invariance.model import parse_nodes
from tests.determinism.test_axes_of_company import good

SLOW = {"restart"}  # it compiles the Program again


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Two requests on a random tiny model with pages of 16 tokens."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", path, seed=7)
    cfg = read_config(path)
    limits = Limits.for_model(cfg, page_size=16, max_num_seqs=8, max_num_batched_tokens=64)
    return Bench(ModelSubject(path, compile(cfg, limits=limits)), requests=2, seed=1)


@pytest.mark.parametrize("axis", [
    pytest.param(name, marks=[pytest.mark.full] if name in SLOW else [])
    for name, axis in AXES.items() if not axis.approximate])
def test_axis(compiled: Bench, axis: str) -> None:
    if axis == "isa" and len(compiled.subject.levels) == 1:
        pytest.skip(f"this machine runs one ISA level, {compiled.subject.levels[0]}")
    good(compiled, axis)


def test_replay_moves_the_logits_a_little(compiled: Bench) -> None:
    report = check_axis(compiled, AXES["replay"], controls=False)
    assert report.verdict == "approximate", report.reason
    assert report.drift is not None and report.drift["mask and compact differ in"] == 0
    assert report.drift["compact"]["rows"] > 0 and report.drift["compact"]["max_dlogit"] > 0


def test_the_layer_of_a_lost_ring_is_found(compiled: Bench) -> None:
    faulty, job = compiled.with_fault("ring_not_restored", 1), compiled.jobs[0]
    outcome, twice = Outcome(), [Stage([job]), Stage([job])]
    runs = outcome.run(faulty, Trial("again", Setting(prefix_cache="exact"), twice))
    assert runs[1].hits.total() == 16
    difference, trial = outcome.differences[0]
    assert trial is not None
    found = locate(faulty, trial, difference)
    assert found is not None and found.layer == 11 and "attention" in found.op
    assert found.loc.startswith("layers.11") and found.position >= 16


@pytest.mark.full
def test_many_requests_at_once(compiled: Bench) -> None:
    """64 mixed requests with stops, penalties, hits, aborts, preemptions and adaptive drafts."""
    many = Bench(compiled.subject, requests=64, seed=2)
    report = check_axis(many, AXES["together"], controls=False)
    assert report.good, report.summary
    assert report.counts["requests"] == 128


def test_from_a_directory(compiled: Bench) -> None:
    subject = compiled.subject
    assert isinstance(subject, ModelSubject)
    made = check(subject.model, program=subject.program.path, axes=["threads"], requests=1)
    assert made.clean and made.subject["program"] == subject.program.digest
    assert made.subject["weights"] == subject.fingerprint and len(subject.fingerprint) == 64


def test_nodes_are_read_from_the_graph_text(compiled: Bench) -> None:
    nodes = compiled.subject.made("prefill")
    launches = compiled.subject.program.phases["prefill"].launches
    assert [(n.op, n.loc) for n in nodes] == [(op, loc) for op, _, loc in launches]
    assert {n.layer for n in nodes} == {None, *range(12)}
    (node,) = parse_nodes("graph x\n  input %a: i32[n]\n"
                          "  %q: e4m3[n,32], %s: ue8m0[n,1] = f(%a, @w) k=1   # layers.3.attn\n")
    assert (node.op, node.layer, node.values) == ("f", 3, ("q", "s"))
