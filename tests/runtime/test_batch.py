"""Inputs of a step: every array by hand for one mixed batch, and the edges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from deepinfer.errors import ProgramError
from deepinfer.runtime.batch import Rows, build_inputs
from deepinfer.runtime.draft_batch import Anchors, Committed, Context, build_draft_inputs
from deepinfer.runtime.masks import token_mask
from deepinfer.runtime.request import Request, SamplingParams


def request(name: str, tokens: list[int], slot: int, pages: list[int], prompt_len=None, **params
            ) -> Request:
    made = Request(name, SamplingParams(**params), tokens, prompt_len or len(tokens), 64,
                   vocab_size=512)
    made.slot, made.pages = slot, pages
    return made


def build(program, batch, phase="prefill", **given):
    return build_inputs(program.phases[phase], batch, program.manifest["facts"], pages_per_seq=4,
                        **given)


def require(got, expected) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].tolist() == value, name


def test_a_mixed_step(program):
    a = request("a", [10, 11, 12, 13, 14], 2, [7], temperature=0.5, top_k=-1, seed=2**64 - 1)
    b = request("b", [20, 21, 22, 23, 24, 25, 26], 0, [3, 5], top_p=0.25, min_p=0.125, top_k=2**40)
    c = request("c", [30, 31], 1, [1, 2])
    got = build(program, [Rows(a, 4, 5, "last"), Rows(c, 0, 1, "none"), Rows(b, 3, 7, "all")])
    expected = {
        "tokens": [14, 30, 23, 24, 25, 26],
        "positions": [4, 0, 3, 4, 5, 6],
        "request": [0, 1, 2, 2, 2, 2],
        "spans": [[2, 0, 1, 0], [1, 1, 2, 0], [0, 2, 6, 0]],
        "entry_positions": [4, 0, 3, 4, 5, 6], "kept_rows": [0, 1, 2, 3, 4, 5],
        "kept_positions": [4, 0, 3, 4, 5, 6], "kept_request": [0, 1, 2, 2, 2, 2],
        "kept_spans": [[2, 0, 1, 0], [1, 1, 2, 0], [0, 2, 6, 0]], "kept_is_image": [0] * 6,
        "adjust_spans": [[0, 0]] * 5, "adjust_ids": [], "adjust_counts": [], "adjust_seen": [],
        "adjust_bias": [], "repetition": [1] * 5, "frequency": [0] * 5, "presence": [0] * 5,
        "recent": [[-1] * 5] * 5, "mask_row": [-1] * 5, "masks": [], "forced": [-1] * 5,
        "pages": [[7, 0, 0, 0], [1, 2, 0, 0], [3, 5, 0, 0]],
        "group_rows": [2, 4], "group_positions": [2, 4], "group_request": [2, 2],
        "lookback": [[14, 13, 12, 11], [30, -1, -1, -1], [23, 22, 21, 20], [24, 23, 22, 21],
                     [25, 24, 23, 22], [26, 25, 24, 23]],
        "is_image": [0] * 6,
        "sample_rows": [0, 2, 3, 4, 5],
        "temperature": [0.5, 1, 1, 1, 1], "top_k": [0] + [2**31 - 1] * 4,
        "top_p": [1] + [0.25] * 4, "min_p": [0] + [0.125] * 4, "seed": [2**64 - 1, 0, 0, 0, 0],
        "sample_position": [5, 4, 5, 6, 7],
    }
    require(got, expected)
    assert got["masks"].shape == (0, 16) and got["adjust_ids"].shape == (0,)


def test_a_verify_step_with_penalties_and_masks(program):
    """Cases B10, E3: draft j is scored with the drafts before it, which are no committed output,
    and looks back at them; two requests never see each other."""
    a = request("a", [10, 11, 12], 1, [4], prompt_len=2, temperature=0, frequency_penalty=0.5,
                repetition_penalty=2, logit_bias={11: 3}, seed=9)
    b = request("b", [20, 21], 0, [2], prompt_len=1, presence_penalty=1, allowed_token_ids=[20, 33],
                temperature=0)
    mask = token_mask(512, (7,), ())
    got = build(program, [Rows(b, 1, 2, "all"), Rows(a, 2, 5, "all", (13, 14))], "verify",
                masks={("a", 3): mask})
    require(got, {
        "tokens": [21, 12, 13, 14], "positions": [1, 2, 3, 4], "request": [0, 1, 1, 1],
        "spans": [[0, 0, 1, 0], [1, 1, 4, 0]], "entry_positions": [1, 2, 3, 4],
        "pages": [[2, 0, 0, 0], [4, 0, 0, 0]], "is_image": [0] * 4,
        "group_rows": [0, 2], "group_positions": [0, 2], "group_request": [0, 1],
        "lookback": [[21, 20, -1, -1], [12, 11, 10, -1], [13, 12, 11, 10], [14, 13, 12, 11]],
        "adjust_spans": [[0, 1], [1, 4], [1, 4], [1, 4]], "adjust_ids": [21, 10, 11, 12],
        "adjust_counts": [1, 0, 0, 1], "adjust_seen": [1, 1, 1, 1], "adjust_bias": [0, 0, 3, 0],
        "repetition": [1, 2, 2, 2], "frequency": [0, 0.5, 0.5, 0.5], "presence": [1, 0, 0, 0],
        "recent": [[-1] * 5, [-1] * 5, [13, -1, -1, -1, -1], [13, 14, -1, -1, -1]],
        "mask_row": [0, -1, 1, -1],
        "masks": [token_mask(512, (20, 33), ()).tolist(), mask.tolist()],
        "temperature": [0] * 4, "top_k": [0] * 4, "top_p": [1] * 4, "min_p": [0] * 4,
        "seed": [0, 9, 9, 9], "sample_position": [2, 3, 4, 5], "forced": [-1] * 4,
    })


def test_rows_that_end_at_the_replay_cut(program):
    """Whose floors are where; sample_rows count kept rows."""
    a, b = request("a", [5] * 12, 0, [0]), request("b", [6] * 9, 1, [1])
    a.replay_floor, a.keep_from = 7, 7  # compact
    b.replay_floor, b.window_floor, b.write_from = 5, 2, 4  # mask, after a hit in mode "replay"
    got = build(program, [Rows(a, 4, 7), Rows(b, 2, 6, "none")])
    assert got["spans"].tolist() == [[0, 0, 3, 0], [1, 3, 7, 2]]
    assert got["kept_spans"].tolist() == [[0, 0, 0, 7], [1, 0, 4, 5]]
    assert got["kept_rows"].tolist() == [3, 4, 5, 6] and got["sample_rows"].shape == (0,)
    assert got["entry_positions"].tolist() == [4, 5, 6, -1, -1, 4, 5]
    assert got["group_positions"].tolist() == [4, 4] and got["group_rows"].tolist() == [1, 6]
    got = build(program, [Rows(b, 6, 9, "last"), Rows(a, 4, 12, "last")])
    assert got["kept_rows"].tolist() == [0, 1, 2, 6, 7, 8, 9, 10]
    assert got["kept_positions"].tolist() == [6, 7, 8, 7, 8, 9, 10, 11]
    assert got["kept_request"].tolist() == [0] * 3 + [1] * 5
    assert got["kept_spans"].tolist() == [[1, 0, 3, 5], [0, 3, 8, 7]]
    assert got["sample_rows"].tolist() == [2, 7] and got["kept_is_image"].tolist() == [0] * 8


def test_forced_rows_choose_the_known_token(program):
    """Prompt logprobs: no penalty or mask of the request reaches a forced row."""
    a = request("a", [10, 11, 12, 13], 0, [0], allowed_token_ids=[9], frequency_penalty=1,
                temperature=0.5)
    got = build(program, [Rows(a, 0, 4, "all", forced=True)])
    assert got["forced"].tolist() == [11, 12, 13, -1]
    assert got["mask_row"].tolist() == [-1, -1, -1, 0]
    assert got["frequency"].tolist() == [0, 0, 0, 1] and got["sample_rows"].tolist() == [0, 1, 2, 3]
    assert got["temperature"].tolist() == [0, 0, 0, 0.5]
    assert got["sample_position"].tolist() == [1, 2, 3, 4]


def test_a_draft_step(program):
    """Context rows are those committed, wherever they lay in the target's step; the mask is for
    the first draft alone."""
    a = request("a", [10, 11, 12], 2, [4], prompt_len=2, temperature=0.5, seed=9,
                presence_penalty=1)
    b = request("b", [20, 21, 22], 0, [2], prompt_len=2, temperature=0)
    c = request("c", [30, 31], 3, [7])
    facts = program.manifest["facts"]
    width = program.phases["draft"].values
    columns = next(int(v.shape[1]) for v in width if v.name == "hidden")
    hidden = np.repeat(np.arange(9, dtype=np.float32)[:, None], columns, 1)
    mask = token_mask(512, (7,), ())
    got = build_draft_inputs(
        program.phases["draft"], Context.of([Committed(b, 0, 2, 1), Committed(c, 0, 1, 4),
                                             Committed(a, 1, 2, 8)]),
        hidden, Anchors.of([b, a]), facts, calibration=np.array([1, 0.5, 2, 1, 1], np.float32),
        masks={1: mask})
    block, noise = facts["block"], facts["noise_token"]
    expected = {
        "hidden": hidden[[1, 2, 4, 8]].tolist(), "positions": [0, 1, 0, 1],
        "request": [0, 0, 1, 2], "spans": [[0, 0, 2, 0], [3, 2, 3, 0], [2, 3, 4, 0]],
        "block_tokens": [22] + [noise] * 4 + [12] + [noise] * 4,
        "block_positions": [2, 3, 4, 5, 6] * 2, "block_request": [0] * block + [1] * block,
        "block_spans": [[0, 0, 5, 0], [2, 5, 10, 0]], "is_image": [0] * 10, "anchor": [22, 12],
        "calibration": [1, 0.5, 2, 1, 1], "temperature": [0, 0.5], "top_k": [0, 0],
        "top_p": [1, 1], "min_p": [0, 0], "seed": [0, 9], "adjust_spans": [[0, 0], [0, 1]],
        "adjust_ids": [12], "adjust_counts": [1], "adjust_seen": [1], "adjust_bias": [0],
        "repetition": [1, 1], "frequency": [0, 0], "presence": [0, 1], "masks": [mask.tolist()],
    }
    for k in range(block):
        expected[f"sample_position.{k}"] = [3 + k, 3 + k]
        expected[f"mask_row.{k}"] = [-1, 0] if k == 0 else [-1, -1]
    require(got, expected)


def test_a_decode_step_has_no_sample_rows(program):
    a = request("a", [10, 11], 0, [0])
    got = build(program, [Rows(a, 1, 2, "last")], "decode")
    assert "sample_rows" not in got and got["sample_position"].tolist() == [2]
    assert got["group_rows"].tolist() == [0] and got["group_positions"].tolist() == [0]


@pytest.mark.parametrize("start", range(6))
def test_lookback_does_not_depend_on_the_cut(program, start):
    """Case E3: the history of a row is its request's, however its chunks are cut."""
    a = request("a", list(range(10, 16)), 0, [0])
    whole = build(program, [Rows(a, 0, 6)])["lookback"]
    assert (build(program, [Rows(a, start, 6)])["lookback"] == whole[start:]).all()


def test_nothing_sampled_and_no_group(program):
    got = build(program, [Rows(request("a", [10, 11], 0, [0]), 0, 1)])
    for name in ("sample_rows", "temperature", "seed", "group_rows", "group_positions"):
        assert got[name].shape == (0,)
    assert got["sample_rows"].dtype == np.int32 and got["seed"].dtype == np.uint64


def test_only_what_is_declared(program):
    phase = program.phases["prefill"]
    less = dataclasses.replace(phase, values=tuple(
        v for v in phase.values if not v.name.startswith(("group", "lookback", "pages"))))
    facts = {**program.manifest["facts"], "max_ngram": 0}
    got = build_inputs(less, [Rows(request("a", [10], 0, [0]), 0, 1)], facts, pages_per_seq=4)
    assert not got.keys() & {"group_rows", "group_request", "lookback", "pages"}
    assert got["tokens"].tolist() == [10]


def test_an_unknown_input_is_refused(program):
    with pytest.raises(ProgramError, match="phase 'draft' declares inputs .*'hidden'"):
        build(program, [Rows(request("a", [10], 0, [0]), 0, 1)], "draft")
