"""Inputs of a step: every array by hand for one mixed batch, and the edges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from deepinfer.errors import ProgramError
from deepinfer.runtime.batch import Rows, build_inputs
from deepinfer.runtime.request import Request, SamplingParams


def request(name: str, tokens: list[int], slot: int, pages: list[int], **params) -> Request:
    made = Request(name, SamplingParams(**params), tokens, len(tokens), 64)
    made.slot, made.pages = slot, pages
    return made


def build(program, batch, phase="prefill"):
    return build_inputs(program.phases[phase], batch, pages_per_seq=4, max_ngram=4)


def test_a_mixed_step(program):
    a = request("a", [10, 11, 12, 13, 14], 2, [7], temperature=0.5, top_k=-1, seed=2**64 - 1)
    b = request("b", [20, 21, 22, 23, 24, 25, 26], 0, [3, 5], top_p=0.25, min_p=0.125, top_k=2**40)
    c = request("c", [30, 31], 1, [1, 2])
    got = build(program, [Rows(a, 4, 5, "last"), Rows(c, 0, 1, "none"), Rows(b, 3, 7, "all")])
    expected = {
        "tokens": [14, 30, 23, 24, 25, 26],
        "positions": [4, 0, 3, 4, 5, 6],
        "request": [0, 1, 2, 2, 2, 2],
        "spans": [[2, 0, 1], [1, 1, 2], [0, 2, 6]],
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
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].tolist() == value, name


def test_a_decode_step_has_no_sample_rows(program):
    a = request("a", [10, 11], 0, [0])
    got = build(program, [Rows(a, 1, 2, "last")], "decode")
    assert "sample_rows" not in got and got["sample_position"].tolist() == [2]
    assert got["group_rows"].tolist() == [0] and got["group_positions"].tolist() == [0]


@pytest.mark.parametrize("start", range(6))
def test_lookback_does_not_depend_on_the_cut(program, start):
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
    got = build_inputs(less, [Rows(request("a", [10], 0, [0]), 0, 1)], pages_per_seq=4,
                       max_ngram=0)
    assert not got.keys() & {"group_rows", "group_request", "lookback", "pages"}
    assert got["tokens"].tolist() == [10]


def test_an_unknown_input_is_refused(program):
    with pytest.raises(ProgramError, match="phase 'draft' declares inputs .*'hidden'"):
        build(program, [Rows(request("a", [10], 0, [0]), 0, 1)], "draft")
