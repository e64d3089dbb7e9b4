"""Steady steps: what the draft reads is the same, whether tokens are committed before it or beside
it."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.runtime.batch import Rows
from deepinfer.runtime.request import Request, SamplingParams
from deepinfer.runtime.steady import Steady
from tests.runtime.engine_cases import GREEDY, drain, require_all_free, watch
from tests.runtime.fake_device import expected_tokens, fake_engine
from tests.runtime.test_engine_drafts import LONG, right

END = 9


def request(name: str, tokens: list[int], slot: int, max_len: int = 40, **given) -> Request:
    made = Request(name, SamplingParams(temperature=0, **given), tokens, 1, max_len,
                   eos=frozenset((END,)))
    made.slot, made.computed = slot, len(tokens) - 1
    return made


def rows(r: Request, *drafts: int) -> Rows:
    return Rows(r, r.computed, len(r.tokens) + len(drafts), "all", drafts)


def judge(batch: list[Rows], chosen: list[list[int]], window: int = 128):
    steady = Steady.of(batch, window)
    tokens = np.array([[r.request.tokens[-1], *r.drafts] for r in batch], np.int32)
    return steady and steady.judge(np.array(chosen, np.int32).reshape(-1), tokens.reshape(-1))


def test_context_and_anchors_follow_from_the_chosen_tokens():
    a, b, c = request("a", [1, 2, 3], 4), request("b", [5], 0), request("c", [6, 7], 2)
    batch = [rows(a, 20, 21), rows(b, 30, 31), rows(c, 50, 51)]
    context, anchors = judge(batch, [[20, 21, 22], [30, 77, END], [99, 51, 52]])
    assert context.slots.tolist() == [4, 0, 2] and context.starts.tolist() == [2, 0, 1]
    assert context.counts.tolist() == [3, 2, 1]  # a draft after a wrong one does not count
    assert context.rows.tolist() == [0, 3, 6]
    assert anchors.tokens.tolist() == [22, 77, 99] and anchors.lengths.tolist() == [6, 3, 3]
    assert [r.tokens for r in (a, b, c)] == [[1, 2, 3], [5], [6, 7]]  # nothing is committed


@pytest.mark.parametrize(("max_len", "chosen", "steady"), [
    (40, [20, 21, END], False), (40, [20, END, 21], False), (40, [77, END, 21], True),
    (7, [20, 21, 22], False), (8, [20, 21, 22], True), (7, [20, 77, 22], True)])
def test_a_step_in_which_a_request_may_end_is_not_steady(max_len, chosen, steady):
    """Of an end or the last token only those count that are made; the token that fills a request
    up to one before its last leaves nothing to draft for."""
    found = judge([rows(request("a", [1, 2, 3], 0, max_len), 20, 21)], [chosen])
    assert (found is not None) is steady


def test_what_is_not_plain_is_not_steady():
    plain = request("a", [1, 2], 0)
    assert Steady.of([rows(plain, 5)], 128) is not None
    assert Steady.of([rows(plain, 5, 6, 7)], 3) is None  # more rows than the rings need
    assert Steady.of([rows(plain)], 128) is None
    assert Steady.of([rows(plain, 5), rows(request("b", [3], 1), 5, 6)], 128) is None
    for given in ({"logprobs": 1}, {"presence_penalty": 1.0}):
        assert Steady.of([rows(plain, 5), rows(request("b", [3], 1, **given), 5)], 128) is None


@pytest.mark.parametrize("accepted", range(6))
def test_tokens_are_those_of_plain_decode(accepted, monkeypatch):
    """Most steps of plain requests are steady, and nobody can tell."""
    seen: list[bool] = []
    judged = Steady.judge

    def counting(self, *arrays):
        found = judged(self, *arrays)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(Steady, "judge", counting)
    engine, _ = fake_engine(LONG, drafts=right(accepted), max_model_len=128)
    records = watch(engine)
    prompts = [[60 + n] * n for n in (1, 2, 7)]
    names = [engine.add_request(p, SamplingParams(max_tokens=60, **GREEDY)) for p in prompts]
    done = drain(engine)
    for name, prompt in zip(names, prompts, strict=True):
        assert done[name].token_ids == expected_tokens(prompt, 60)
    assert seen.count(True) > len(records) // 2 > seen.count(False)
    require_all_free(engine)
