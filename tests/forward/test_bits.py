"""Compiled = evaluator of the lowered graph = evaluator of the source graph, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer.codegen.emit import lower_graph
from deepinfer.compiler import build_graphs, compile
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.targets.base import load_target
from deepinfer.testing.reference import EvaluatorDevice
from tests.forward.cases import (
    SLOTS,
    Case,
    draft_inputs,
    inputs,
    make_case,
    only,
    same_bits,
    tokens_for,
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("tiny"))


def test_every_value_of_the_whole_forward_and_draft(case: Case, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    """Op by op, on every ISA level of this machine: prefill, mixed steps, decode, a verify step of
    two requests, and a draft of two."""
    program = case.program()
    lowered = {n: lower_graph(g, load_target("cpu"))
               for n, g in build_graphs(case.cfg, case.limits).items()}
    reference = EvaluatorDevice(lowered, case.cfg, case.path, case.sizes)
    a, b = tokens_for(case, 50, 1), tokens_for(case, 34, 2)
    steps = [inputs(case, rows) for rows in (
        [(0, a, 0, 41)], [(2, b, 0, 17), (0, a, 41, 42)], [(0, a, 42, 43), (2, b, 17, 29)])]
    # A prompt that leaves rows behind at the replay cut, and a request that keeps none.
    steps.append(inputs(case, [(3, b, 0, 20), (1, a, 0, 5)], floor=9, keep_from=9))
    expected = []
    for given in steps:
        expected.append(reference.run("prefill", given,
                                      trace=[v.name for n in lowered["prefill"].nodes
                                             for v in n.outputs]))
    decode = only("decode", inputs(case, [(0, a, 43, 44), (2, b, 29, 30)]))
    expected.append(reference.run("decode", decode, trace=[
        v.name for n in lowered["decode"].nodes for v in n.outputs]))
    verify = only("verify", inputs(case, [(2, b, 30, 34), (0, a, 44, 50)]))
    expected.append(reference.run("verify", verify, trace=[
        v.name for n in lowered["verify"].nodes for v in n.outputs]))
    hidden = np.concatenate([expected[0]["taps.hidden.1"], expected[1]["taps.hidden.1"][17:],
                             expected[1]["taps.hidden.1"][:17]])
    committed = draft_inputs(case, [(0, 0, 42), (2, 0, 17)], hidden, [int(a[42]), int(b[17])])
    expected.append(reference.run("draft", committed, trace=[
        v.name for n in lowered["draft"].nodes for v in n.outputs]))
    plan = [("prefill", given) for given in steps] + [
        ("decode", decode), ("verify", verify), ("draft", committed)]
    assert {phase for phase, _ in plan} == set(program.phases), "a phase is not run"
    assert host_levels()[0] == "generic"
    for level in host_levels():
        monkeypatch.setenv("DEEPINFER_CPU_ISA", level)
        device = case.native(program=program)
        assert device.isa == level
        for (phase, given), want in zip(plan, expected, strict=True):
            watched = [v.name for v in program.phases[phase].values if v.kind == "temp"]
            got = device.run(phase, given, trace=watched)
            for name in watched:
                assert same_bits(got[name], want[name]), f"{level} {phase} {name}"
        for name, state in device.state.items():
            assert same_bits(state, reference.state[name]), f"{level} state {name}"
        device.close()


def test_lowering_is_exact(case: Case) -> None:
    """The source graph gives the bits of the lowered one, outputs and state alike."""
    source = case.source()
    lowered = EvaluatorDevice({n: lower_graph(g, load_target("cpu")) for n, g in
                               build_graphs(case.cfg, case.limits).items()},
                              case.cfg, case.path, case.sizes)
    a = tokens_for(case, 40)
    for rows in ([(1, a, 0, 35)], [(1, a, 35, 40)]):
        given = inputs(case, rows)
        want = source.run("prefill", given, trace=["head.logits"])
        got = lowered.run("prefill", given, trace=["head.logits"])
        for name in want:
            assert same_bits(got[name], want[name]), name
    for name, state in source.state.items():
        assert same_bits(state, lowered.state[name]), name
    committed = draft_inputs(case, [(1, 35, 40)], want["taps.hidden.1"], [7])
    want, got = source.run("draft", committed), lowered.run("draft", committed)
    assert all(same_bits(got[n], want[n]) for n in want)


CONFIGS = {
    "window 5, top-k 4": {"sliding_window": 5, "index_topk": 4},
    "window 64": {"sliding_window": 64},
    "window 130, top-k 16": {"sliding_window": 130, "index_topk": 16, "candidate_topk_blocks": 3},
    "one of everything": {
        "num_hidden_layers": 4, "compress_ratios": (1, 0, 1, 1, 0), "kv_source_layer_ids": (0, 2),
        "index_source_layer_ids": (0, 2, 3), "candidate_source_layer_id": 2,
        "candidate_block_size": 1, "sliding_window": 1, "index_topk": 1, "index_n_heads": 1,
        "hc_mult": 1, "num_attention_heads": 1, "o_groups": 1, "num_experts_per_tok": 1,
        "num_nextn_predict_layers": 1, "dspark_block_size": 1, "dspark_target_layer_ids": (3,),
        "dspark_n_routed_experts": 1, "dspark_num_experts_per_tok": 1, "engram_layer_ids": (),
        "engram_num_embeddings": ()},
    "no drafts": {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": (),
                  "compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)},
    "no engram": {"engram_layer_ids": (), "engram_num_embeddings": ()},
    "8 layers": {"num_hidden_layers": 8, "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
                 "kv_source_layer_ids": (2, 4), "index_source_layer_ids": (2, 4, 6),
                 "candidate_source_layer_id": 4, "dspark_target_layer_ids": (5, 6, 7)},
}


QUICK = ("window 5, top-k 4", "window 130, top-k 16", "one of everything", "8 layers")


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS])
def test_other_configs(name: str, tmp_path: Path) -> None:
    """Prompt lengths around every edge: compiled logits = source evaluator's, bitwise."""
    case = make_case(tmp_path / "m", seed=len(name), **CONFIGS[name])
    native = case.native(threads=2, program=compile(case.path, limits=case.limits))
    source, window = case.source(), case.cfg.sliding_window
    capacity = case.cfg.candidate_topk_blocks * case.cfg.candidate_block_size
    lengths = {1, 2, 3, capacity, capacity + 1}
    # Rows up to a long prompt's end cover the edges before it; the evaluator is slow on long ones.
    lengths |= {window - 1, window, window + 1} if window < 100 else {window + 2}
    for n in sorted(lengths):
        given = inputs(case, [(n % SLOTS, tokens_for(case, n, n), 0, n)])
        got = native.run("prefill", given, trace=["head.logits"])
        want = source.run("prefill", given, trace=["head.logits"])
        for output in want:
            assert same_bits(got[output], want[output]), f"{n} tokens: {output}"
    native.close()
