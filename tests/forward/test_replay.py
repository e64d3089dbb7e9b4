"""Rows left behind, replayed, rejected or steered, on the evaluator of the source graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from deepinfer.compiler import build_graphs, facts
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.testing.reference import EvaluatorDevice
from tests.forward.cases import (
    Array,
    Case,
    draft_inputs,
    inputs,
    make_case,
    only,
    same_bits,
    tokens_for,
)

KEPT = ("head.logits", "taps.hidden")  # values of the kept rows
LENGTH, KEEP = 30, 13
SMALL = {"num_hidden_layers": 5, "compress_ratios": (0, 2, 1, 1, 1, 0),
         "kv_source_layer_ids": (1, 2), "index_source_layer_ids": (1, 2, 3),
         "candidate_source_layer_id": 2, "num_nextn_predict_layers": 1,
         "dspark_target_layer_ids": (3, 4), "engram_layer_ids": (1,),
         "engram_num_embeddings": tiny_config().engram_num_embeddings[:1]}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("small"), **SMALL)


@pytest.fixture
def device(case: Case) -> EvaluatorDevice:
    return case.source()


def prefill(device: EvaluatorDevice, case: Case, slot: int, cuts: tuple[int, ...], *,
            floor: int = 0, keep_from: int = 0) -> dict[str, Array]:
    """A prompt in chunks; the kept rows' values, and rows that the last layer ran on."""
    tokens, edges = tokens_for(case, LENGTH), (0, *cuts, LENGTH)
    parts = [device.run("prefill", inputs(case, [(slot, tokens, a, b)], floor=floor,
                                          keep_from=keep_from),
                        trace=(*KEPT, "layers.4.ffn.route.idx"))
             for a, b in zip(edges, edges[1:], strict=False)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_mask_equals_compact_and_neither_equals_off(device: EvaluatorDevice, case: Case) -> None:
    first = LENGTH - KEEP
    off = prefill(device, case, 0, ())
    mask = prefill(device, case, 1, (), floor=first)
    compact = prefill(device, case, 2, (), floor=first, keep_from=first)
    assert len(mask["layers.4.ffn.route.idx"]) == LENGTH
    assert len(compact["layers.4.ffn.route.idx"]) == KEEP, "the work was not skipped"
    for name in KEPT:
        assert compact[name].shape[0] == KEEP and np.isfinite(compact[name].astype(float)).all()
        assert same_bits(np.ascontiguousarray(mask[name][first:]), compact[name]), name
        assert not same_bits(np.ascontiguousarray(off[name][first:]), compact[name]), name
    # Caches of all rows are there: what is written before the cut is the same in all three.
    for name, state in device.state.items():
        if ".kv" in name or ".index_keys" in name or ".pending" in name:
            groups = state.reshape(4, -1) if ".pending" in name else state.reshape(
                4, len(state) // 4, *state.shape[1:])
            assert same_bits(groups[0], groups[1]) and same_bits(groups[0], groups[2]), name
    step = [inputs(case, [(slot, tokens_for(case, LENGTH + 1), LENGTH, LENGTH + 1)])
            for slot in (1, 2)]
    after = [device.run("decode", only("decode", given), trace=KEPT) for given in step]
    assert all(same_bits(after[0][name], after[1][name]) for name in KEPT)


@pytest.mark.parametrize("cuts", [(17, 18), (5, 20, 29), (10, 12)])
def test_compact_in_chunks(device: EvaluatorDevice, case: Case, cuts: tuple[int, ...]) -> None:
    """Chunks before the floor keep no row at all."""
    first = LENGTH - KEEP
    whole = prefill(device, case, 0, (), floor=first, keep_from=first)
    parts = prefill(device, case, 1, cuts, floor=first, keep_from=first)
    for name in KEPT:
        assert same_bits(parts[name], whole[name]), name


def test_the_floor_is_needed(device: EvaluatorDevice, case: Case) -> None:
    """Negative control: without it the first kept rows read ring slots that nobody wrote."""
    first = LENGTH - KEEP
    wrong = prefill(device, case, 0, (), keep_from=first)
    assert np.isnan(wrong["head.logits"]).any()


def test_replayed_rows_rewrite_no_entry(device: EvaluatorDevice, case: Case) -> None:
    """Encoder replay: another slot continues on shared pages after a window of replayed rows."""
    tokens, at, window = tokens_for(case, LENGTH), 22, case.cfg.sliding_window
    prefill(device, case, 0, ())
    before = {n: s.copy() for n, s in device.state.items() if ".kv" in n or ".index_keys" in n}
    given = inputs(case, [(1, tokens, at - window, LENGTH)])
    given["pages"] = inputs(case, [(0, tokens, 0, 1)])["pages"]
    given["spans"][0, 3] = given["kept_spans"][0, 3] = at - window
    entries = given["positions"].copy()
    entries[:window] = -1
    new = given["group_positions"] >= at
    given |= {"entry_positions": entries} | {
        n: given[n][new] for n in ("group_rows", "group_positions", "group_request")}
    got = device.run("prefill", given, trace=KEPT)
    assert np.isfinite(got["head.logits"]).all(), "stale state was read"
    changed = False
    for name, state in device.state.items():
        if name in before:
            pages = given["pages"][0]
            size = state.shape[1]
            entry = at * size // case.limits.page_size
            old, now = (x[pages].reshape(-1, x.shape[-1]) for x in (before[name], state))
            assert same_bits(old[:entry], now[:entry]), name
            changed |= not same_bits(old[entry:], now[entry:])
    assert changed, "the suffix wrote its own entries"
    for spans in (given["spans"], given["kept_spans"]):  # the control: a fresh slot, no floor
        spans[0, [0, 3]] = 2, 0
    assert np.isnan(device.run("prefill", given, trace=KEPT)["head.logits"]).any()


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_rejected_drafts_leave_no_trace(case: Case, width: int) -> None:
    """Case C1 on the whole model: verify steps with wrong drafts, from odd and even starts, then
    plain decode, against decode alone."""
    wide = dataclasses.replace(case, limits=dataclasses.replace(case.limits, draft_width=width))
    device, end = EvaluatorDevice(build_graphs(wide.cfg, wide.limits), wide.cfg, wide.path,
                                  wide.sizes), 17
    tokens = tokens_for(wide, end)
    expected = device.run("prefill", inputs(wide, [(0, tokens, 0, end)]), trace=KEPT)
    for slot, start in ((1, 5), (2, 6)):
        device.run("prefill", inputs(wide, [(slot, tokens, 0, start)]))
        at, accepted = start, width
        while at < end:
            drafted = np.append(tokens, np.zeros(width, np.int32))
            drafted[at + 1 + accepted:] = 77
            last = min(at + 1 + width, end)
            got = device.run("verify", only("verify", inputs(wide, [(slot, drafted, at, last)])),
                             trace=KEPT)
            for name in KEPT:
                rows = min(1 + accepted, last - at)
                assert same_bits(np.ascontiguousarray(got[name][:rows]),
                                 np.ascontiguousarray(expected[name][at:at + rows])), (at, name)
            at, accepted = at + 1 + accepted, max(0, accepted - 1)


def test_a_draft_counts_the_drafts_before_it_and_minds_its_mask(device: EvaluatorDevice, case: Case
                                                                ) -> None:
    """A frequency penalty that nothing survives keeps a block from repeating itself."""
    hidden = prefill(device, case, 0, ())["taps.hidden"]
    given = draft_inputs(case, [(0, 0, LENGTH)], hidden, [int(tokens_for(case, 5)[4])])
    block, vocab = case.cfg.dspark_block_size, case.cfg.vocab_size
    given["temperature"][:] = 0
    # Two tokens are allowed at every step; the third draft can only repeat one.
    words = np.zeros(vocab, bool)
    words[[40, 41]] = True
    given["masks"] = np.packbits(words, bitorder="little").view(np.int32)[None].copy()
    given |= {f"mask_row.{k}": np.zeros(1, np.int32) for k in range(block)}
    given |= {"adjust_spans": np.zeros((1, 2), np.int32), "repetition": np.ones(1, np.float32)}
    names = facts(case.cfg, case.limits)["outputs"]["draft"]["tokens"]

    def drafts(frequency: float) -> list[int]:
        given["frequency"], given["presence"] = np.float32([frequency]), np.zeros(1, np.float32)
        out = device.run("draft", given)
        return [int(out[name][0]) for name in names]

    assert set(drafts(0)) <= {40, 41}
    first = drafts(1e6)
    assert set(first[:2]) == set(first[2:4]) == {40, 41}


def test_configs_whose_taps_or_engrams_forbid_a_replay(tmp_path: Path) -> None:
    """They keep all rows, and their graphs are whole: a tap before the cut, an Engram behind it."""
    assert facts(tiny_config(), Limits.for_model(tiny_config()))["replay"]
    other = make_case(tmp_path / "m", **SMALL | {
        "dspark_target_layer_ids": (1, 4), "engram_layer_ids": (4,)})
    assert not facts(other.cfg, other.limits)["replay"]
    device, tokens = other.source(), tokens_for(other, 12)
    off = device.run("prefill", inputs(other, [(0, tokens, 0, 12)]), trace=KEPT)
    one = [device.run("decode", only("decode", inputs(other, [(1, tokens, p, p + 1)])), trace=KEPT)
           for p in range(12)]
    for name in KEPT:
        assert same_bits(np.concatenate([x[name] for x in one]), off[name])
