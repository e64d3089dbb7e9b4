"""Inputs of the compiled sampler: counts, masks, sharing, and their names and types."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.runtime.counts import TokenCounts
from deepinfer.runtime.masks import TokenMasks, mask_words, pack_mask, token_mask
from deepinfer.runtime.request import Request, SamplingParams
from deepinfer.runtime.sampler import (
    Sampled,
    SampleRow,
    draft_sampling_inputs,
    sampling_inputs,
)
from tests.runtime.toy_target import V, choose, make, run

TYPES = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32",
         "seed": "uint64", "repetition": "float32", "presence": "float32", "frequency": "float32",
         "adjust_spans": "int32", "adjust_ids": "int32", "adjust_counts": "int32",
         "adjust_seen": "uint8", "adjust_bias": "float32", "masks": "int32"}


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def check_types(inputs: dict[str, np.ndarray], extra: dict[str, str]) -> None:
    assert {name: x.dtype.name for name, x in inputs.items()} == {**TYPES, **extra}
    assert all(x.flags.c_contiguous for x in inputs.values())


def test_a_mixed_step():
    """Every array by hand: a verify block with penalties, a plain row, forced rows, masks."""
    a = make([9, 4, 4], SamplingParams(repetition_penalty=2, frequency_penalty=0.5, min_tokens=2,
                                       logit_bias={"300": -1.5, 4: 2}, seed=2**64 - 1, top_k=-1))
    b = make([5], SamplingParams(temperature=0.25, top_p=0.5, min_p=0.125, top_k=2**40))
    c = make([5, 6, 7], SamplingParams(presence_penalty=1, logit_bias={2: 1}))
    a.tokens.append(6)
    a.sampling.add([6])
    grammar = pack_mask(np.arange(V) == 400)
    rows = [SampleRow(a, 4), SampleRow(a, 5, (8,)), SampleRow(b, 1, mask=grammar),
            SampleRow(c, 1, forced=6), SampleRow(c, 2, forced=7), SampleRow(c, 3, (3,)),
            SampleRow(b, 2, (11,))]
    got = sampling_inputs(rows, V, 3)
    check_types(got, {"recent": "int32", "forced": "int32", "mask_row": "int32",
                      "sample_position": "int32"})
    f = np.float32
    wanted = {
        "temperature": [1, 1, 0.25, 0, 0, 1, 0.25], "top_k": [0, 0, 2**31 - 1, 0, 0, 0, 2**31 - 1],
        "top_p": [1, 1, 0.5, 1, 1, 1, 0.5], "min_p": [0, 0, 0.125, 0, 0, 0, 0.125],
        "seed": [2**64 - 1] * 2 + [0] * 5, "sample_position": [4, 5, 1, 1, 2, 3, 2],
        "repetition": [2, 2, 1, 1, 1, 1, 1], "frequency": [0.5, 0.5, 0, 0, 0, 0, 0],
        "presence": [0, 0, 0, 0, 0, 1, 0],
        "adjust_spans": [[0, 4], [0, 4], [4, 4], [4, 4], [4, 4], [4, 5], [4, 4]],
        "adjust_ids": [4, 6, 9, 300, 2], "adjust_counts": [0, 1, 0, 0, 0],
        "adjust_seen": [1, 1, 1, 0, 0], "adjust_bias": [2, 0, 0, f(-1.5), 1],
        "recent": [[-1] * 3, [8, -1, -1], [-1] * 3, [-1] * 3, [-1] * 3, [3, -1, -1], [-1] * 3],
        "mask_row": [0, -1, 1, -1, -1, -1, -1], "forced": [-1, -1, -1, 6, 7, -1, -1],
    }
    assert {name: got[name].tolist() for name in wanted} == wanted
    assert got["masks"].shape == (2, V // 32)
    assert allowed(got["masks"][0]) == [0, *range(2, V)] and allowed(got["masks"][1]) == [400]


def test_the_draft_phase():
    """Masks by draft position: min_tokens ends within the block; a grammar knows the first."""
    a = make([9, 4], SamplingParams(min_tokens=3, seed=8, repetition_penalty=2))
    b = make([5], SamplingParams(allowed_token_ids=[7, 3, 3]))
    a.tokens += [6, 6]
    a.sampling.add([6, 6])
    got = draft_sampling_inputs([a, b], np.array([4, 1], np.int32), 3,
                                {1: token_mask(V, (3,), ())}, V)
    check_types(got, {f"{name}.{k}": "int32" for k in range(3)
                      for name in ("sample_position", "mask_row")})
    assert [got[f"sample_position.{k}"].tolist() for k in range(3)] == [[4, 1], [5, 2], [6, 3]]
    assert [got[f"mask_row.{k}"].tolist() for k in range(3)] == [[0, 1], [-1, 2], [-1, 2]]
    assert [allowed(m)[:3] for m in got["masks"]] == [[0, 2, 3], [3], [3, 7]]
    assert got["adjust_spans"].tolist() == [[0, 3], [3, 3]]
    assert got["adjust_counts"].tolist() == [0, 2, 0] and got["seed"].tolist() == [8, 0]


def test_nothing_to_adjust():
    got = sampling_inputs([SampleRow(make([5], SamplingParams()), 1, (4,))], V, 0)
    assert got["recent"].tolist() == [[-1]] and got["masks"].shape == (0, V // 32)
    assert got["adjust_ids"].size == 0 and got["adjust_spans"].tolist() == [[0, 0]]
    assert make([5], SamplingParams()).sampling.counts is None


@settings(max_examples=60)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40),
       st.lists(st.lists(st.integers(0, 300), max_size=60), max_size=4),
       st.dictionaries(st.integers(0, 300), st.sampled_from([-1.0, 0.5]), max_size=5),
       st.booleans(), st.booleans())
def test_counts(prompt, steps, bias, repetition, output):
    """Kept step by step they equal a count of everything."""
    counts = TokenCounts(prompt, bias, repetition=repetition, output=output)
    for tokens in steps:
        counts.add(tokens)
    made = Counter(t for tokens in steps for t in tokens) if repetition or output else Counter()
    seen = {*made, *(prompt if repetition else ())}
    ids, times, was_seen, biases = counts.entries()
    assert ids.tolist() == sorted({*seen, *bias})
    assert times.tolist() == [made[i] for i in ids]
    assert was_seen.tolist() == [i in seen for i in ids]
    assert biases.tolist() == [bias.get(i, 0) for i in ids]


def test_counts_keep_their_place_in_a_long_prompt():
    counts = TokenCounts(range(0, 20000, 2), {}, repetition=True, output=False)
    counts.add([19999, 1, 19999, 4])
    ids, times, seen, _ = counts.entries()
    assert len(ids) == 10002 and (np.diff(ids) > 0).all() and seen.all()
    assert {int(i): int(n) for i, n in zip(ids, times, strict=True) if n} == {19999: 2, 1: 1, 4: 1}


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 70])
def test_masks(size):
    """Bits past the vocabulary are 0: padded ids are never allowed."""
    assert mask_words(size) == (size + 31) // 32
    assert allowed(token_mask(size, None, (0, 500))) == list(range(1, size))
    assert allowed(token_mask(size, (0, size - 1, 500), ())) == sorted({0, size - 1})
    assert token_mask(size, None, ()).shape == (mask_words(size),)


def test_masks_of_a_request():
    masks = TokenMasks(64, (3, 4, 9), {4, 1}, 2)
    assert [allowed(masks.at(n)) for n in (0, 1, 2)] == [[3, 9], [3, 9], [3, 4, 9]]
    assert masks.at(0) is TokenMasks(64, (3, 4, 9), {1, 4}, 7).at(0)  # shared, and so sent once
    free = TokenMasks(64, None, {1}, 0)
    assert free.at(0) is None and not free.any and free.rows(0, 3, where="") == []
    grammar = [token_mask(64, (4, 5), ()), None, token_mask(64, (4,), ())]
    got = masks.rows(2, 3, grammar, where="here")
    assert [allowed(m) for m in got] == [[4], [3, 4, 9], [4]]


def test_an_empty_mask_names_the_step():
    request = make([5], SamplingParams(allowed_token_ids=[3, 4], min_tokens=1, stop_token_ids=[4]))
    assert allowed(request.mask_at(1, None, 7)) == [3]
    assert allowed(request.mask_at(2, token_mask(V, (4, 8), ()), 7)) == [4]
    with pytest.raises(RequestError, match="output token 0 has no allowed id") as caught:
        request.mask_at(1, token_mask(V, (4, 8), ()), 7)
    assert caught.value.where == "request r, step 7"
    with pytest.raises(RequestError, match="min_tokens .* leave together"):
        make([5], SamplingParams(allowed_token_ids=[1], min_tokens=1))
    assert make([5], SamplingParams(allowed_token_ids=[1])).mask_at(0, None, 1) is not None


@pytest.mark.parametrize(("params", "token"), [
    (dict(temperature=0), 0), (dict(temperature=0.7, top_k=1), 0), (dict(top_p=1e-9), 0),
    (dict(temperature=0.7, top_k=-1), None), (dict(temperature=0.7, top_k=0), None),
    (dict(temperature=0.7, top_k=V), None), (dict(temperature=0.7, top_k=V + 1), None),
])
def test_sentinels(params, token):
    """Case B2: no sentinel for greedy or off reaches the arithmetic; -inf logits make no NaN."""
    logits = np.full((2, V), -np.inf, np.float32)
    logits[:, :3] = [1, -np.inf, 0.5]
    rows = [SampleRow(make([5], SamplingParams(**params, seed=s)), 1) for s in range(2)]
    rows += [SampleRow(make([5], SamplingParams(temperature=0)), 1)]
    got = choose(rows, np.concatenate([logits, logits[:1]]), 0)
    assert got.tokens[-1] == 0 and not any(got.not_finite(row) for row in range(3))
    assert set(got.tokens[:2].tolist()) <= ({0, 2} if token is None else {token})
    off = choose([SampleRow(make([5], SamplingParams(temperature=0.7, seed=s)), 1)
                  for s in range(2)], logits, 0)
    assert token is not None or off.tokens.tolist() == got.tokens[:2].tolist()


def test_neighbours_do_not_matter():
    """Case B1: a seeded row is the same alone, beside unseeded, greedy and penalised rows, and at
    any place in the batch."""
    x = make([5, 9], SamplingParams(seed=42, temperature=0.8))
    others = [make([5, 9], SamplingParams(**p)) for p in (
        {}, {"seed": 7}, {"temperature": 0}, {"repetition_penalty": 2, "logit_bias": {3: 9}})]
    logits = np.random.default_rng(0).normal(0, 2, (1, V)).astype(np.float32)
    tokens = []
    for place in range(5):
        batch = [*others[:place], x, *others[place:]]
        got = choose([SampleRow(r, 2) for r in batch], np.repeat(logits, 5, 0), 0)
        tokens.append(int(got.tokens[place]))
    assert tokens == [int(choose([SampleRow(x, 2)], logits, 0).tokens[0])] * 5
    outputs = [run(make([5], SamplingParams(seed=s, temperature=0.8)))[0].output
               for s in (42, 43, 43)]
    assert outputs[0] != outputs[1] == outputs[2]


def test_completions():
    """Case B5: 4 completions of one seed differ, child 0 is the run with n = 1, greedy ones agree;
    that child 0 stops at its second token takes nothing from the others."""
    alone = SamplingParams(seed=5, max_tokens=24, ignore_eos=True)
    params = replace(alone, n=4)
    outputs = [run(make([5], params.child(i)))[0].output for i in range(4)]
    assert len(set(map(tuple, outputs))) == 4
    assert outputs[0] == run(make([5], alone))[0].output
    stopping = replace(params, stop_token_ids=[outputs[0][1]])
    first, *others = (run(make([5], stopping.child(i)))[0].output for i in range(4))
    assert first == outputs[0][:2] and any(len(o) > 2 for o in others)
    assert all(o == whole[:len(o)] for o, whole in zip(others, outputs[1:], strict=True))
    greedy = SamplingParams(n=4, temperature=0)
    assert len({tuple(run(make([5], greedy.child(i)))[0].output) for i in range(4)}) == 1


def test_logprobs_of_masked_tokens_are_raw():
    """Case B8: an allow-list of 2 with 5 logprobs, and top_k 1 with 5: finite, of the model."""
    logits = np.random.default_rng(0).normal(0, 2, (1, V)).astype(np.float32)
    for params in (SamplingParams(allowed_token_ids=[3, 8]), SamplingParams(top_k=1)):
        got = choose([SampleRow(make([5], params), 1)], logits, 0)
        entry = got.logprobs(0, 5)
        assert len(entry.top) == 5 and all(np.isfinite(x) for _, x in entry.top)
        assert entry.top[0][0] == int(logits.argmax())


def test_not_finite_rows():
    got = Sampled(np.zeros(3), np.array([-1, np.nan, -np.inf], np.float32), np.zeros((3, 1)),
                  np.zeros((3, 1)))
    assert [got.not_finite(row) for row in range(3)] == [False, True, True]


def test_a_request_made_by_hand_has_its_output_counted():
    request = Request("r", SamplingParams(presence_penalty=1), [5, 6, 6], 1, 9, vocab_size=V)
    assert request.sampling.counts.entries()[1].tolist() == [2] and request.output == [6, 6]
