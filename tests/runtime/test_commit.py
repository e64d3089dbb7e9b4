"""Commit: stop rules over runs of accepted drafts give what plain decode gives."""

from __future__ import annotations

import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from deepinfer.errors import RequestError
from deepinfer.runtime.commit import commit, fail
from deepinfer.runtime.request import Request, SamplingParams
from deepinfer.runtime.sampler import Sampled
from tests.runtime.toy_target import BYTES, EOS, V, by_hash, ids_of, make, prefill, run, script

PROMPT = [7, 7, 7]


def outcome(request: Request) -> tuple[object, ...]:
    out = request.result()
    return (out.token_ids, out.text, out.finish_reason, out.stop_reason, out.usage, out.logprobs)


def at_once(params: SamplingParams, tokens: list[int], prompt: list[int] | None = None) -> Request:
    """All tokens as one accepted run."""
    request = make(prompt or [5], params)
    size = len(tokens)
    sampled = Sampled(np.array(tokens, np.int32), np.full(size, -1, np.float32),
                      np.zeros((size, 20), np.int32), np.zeros((size, 20), np.float32))
    request.drafts = tokens[:-1]
    count = commit(request, tokens, sampled, 0, step=3)
    assert count == request.made and (count == size or request.finished)
    return request


@pytest.mark.parametrize("cap", [2, 3, 4, 5, 6, 100])
def test_stop_inside_an_accepted_run_and_the_length_cap(cap):
    """Case C4: one step commits ids 31 32 9 40 41 42, with 9 = end."""
    run_of_ids = [31, 32, 9, 40, 41, 42]
    request = at_once(SamplingParams(max_tokens=cap, stop_token_ids=[9]), run_of_ids)
    wanted = ([31, 32], "length", None) if cap == 2 else ([31, 32, 9], "stop", 9)
    assert (request.output, request.finish_reason, request.stop_reason) == wanted
    assert request.result().usage.completion_tokens == len(wanted[0]) and not request.drafts
    for width in range(1, 6):
        drafted, accepted = run(
            make([5], SamplingParams(max_tokens=cap, stop_token_ids=[9], temperature=0)),
            script([5], run_of_ids), run_of_ids, width, right=5)
        assert outcome(drafted)[:5] == outcome(request)[:5]
        assert accepted[0] == min(width, cap - 1)


def test_the_end_first_and_last_in_a_run():
    """Case C4: the end as the very first and the very last id of the run."""
    params = SamplingParams(max_tokens=3)
    for tokens, made in (([1, 40, 41], 1), ([40, 41, 1], 3), ([1, 1, 1], 1)):
        request = at_once(params, tokens)
        assert (request.made, request.finish_reason, request.stop_reason) == (made, "stop", 1)
    request = at_once(SamplingParams(max_tokens=3, ignore_eos=True), [1, 1, 41])
    assert (request.made, request.finish_reason, request.stop_reason) == (3, "length", None)


def test_a_stop_text_over_two_ids_of_a_run():
    """Case C4: a stop text across two ids comes before an end id later in the run."""
    tokens = ids_of("abENDc") + [1]
    request = at_once(SamplingParams(stop=["END", "zzz"], max_tokens=7), tokens)
    assert outcome(request)[1:4] == ("ab", "stop", "END") and request.made == 5
    ended = at_once(SamplingParams(stop=["cx"], max_tokens=7), tokens)
    assert outcome(ended)[1:4] == ("abENDc", "stop", 1)


PARAMS = [
    dict(), dict(temperature=0), dict(temperature=0.7, top_p=0.8, min_p=0.01, top_k=5),
    dict(repetition_penalty=1.5, temperature=0), dict(presence_penalty=2, temperature=0),
    dict(frequency_penalty=1.5, temperature=0),
    dict(frequency_penalty=-1, presence_penalty=1, repetition_penalty=0.8, logit_bias={7: 3, 9: -9},
         allowed_token_ids=list(range(2, 20)), logprobs=3),
    dict(min_tokens=9, stop_token_ids=[3, 4, 5, 6, 7, 8], logprobs=0, logit_bias={1: 8}),
    dict(min_tokens=4, stop=[chr(33 + i) for i in range(0, 22, 2)], temperature=1.5),
]


@pytest.mark.parametrize("given", PARAMS, ids=[str(i) for i in range(len(PARAMS))])
def test_drafts_change_nothing(given):
    """Case B10 and the promise: ids, text, reason, usage, logprobs with any drafts and any accept
    length equal plain decode, also with a preemption after token 3."""
    params = SamplingParams(**{"max_tokens": 14, "seed": 5, **given})
    plain, _ = run(make(PROMPT, params))
    truth, lengths = plain.output, set()
    for width, right in [(1, 1), (3, 0), (4, 4), (5, 2), (5, 5)]:
        for preempt_at in (-1, 3):
            drafted, accepted = run(make(PROMPT, params), by_hash, truth, width, right, preempt_at)
            lengths.update(accepted)
            assert outcome(drafted) == outcome(plain)
    assert {0, 1, 2} <= lengths and max(lengths) >= 3


def test_penalties_count_what_they_say():
    """Case B10: prompt [7,7,7], head biased to 7, temperature 0, penalties one at a time."""
    def biased(history: tuple[int, ...]) -> np.ndarray:
        logits = np.full(V, -5, np.float32)
        logits[7], logits[8] = 2.0, 1.25
        return logits

    def first(count: int, **given) -> list[int]:
        return run(make(PROMPT, SamplingParams(temperature=0, max_tokens=count, **given)),
                   biased)[0].output

    assert first(4) == [7] * 4
    # The prompt counts for repetition (2 / 2 < 1.25 at once), and only for it.
    assert first(3, repetition_penalty=2) == [8, 7, 7]
    assert first(4, presence_penalty=1) == [7, 8, 7, 7]
    assert first(4, frequency_penalty=0.5) == [7, 7, 8, 7]
    wide, accepted = run(make(PROMPT, SamplingParams(temperature=0, max_tokens=4,
                                                     frequency_penalty=0.5)),
                         biased, [7, 7, 8, 7], 4, 4)
    assert wide.output == [7, 7, 8, 7] and accepted == [3]


def test_min_tokens_masks_the_ends():
    """EOS and stop ids cannot be chosen before; the chosen ids are not merely ignored."""
    likes_the_end = script([5], [1])
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=3, stop_token_ids=[0])
    request, _ = run(make([5], params), likes_the_end)
    assert request.output == [2, 2, 2, 1] and request.stop_reason == 1
    ignoring, _ = run(make([5], SamplingParams(temperature=0, max_tokens=4, min_tokens=3,
                                               ignore_eos=True)), likes_the_end)
    assert ignoring.output == [1] * 4
    # A stop text that is complete too early does not count, neither then nor later.
    text, _ = run(make([5], SamplingParams(temperature=0, max_tokens=7, min_tokens=2, stop="ab")),
                  script([5], ids_of("abcab")))
    assert (text.made, text.result().text, text.stop_reason) == (5, "abc", "ab")


def test_a_stop_that_spells_a_special_token():
    """Case B7: such a token has no text, so it ends the output by its id."""
    from tests.runtime.toy_target import TEXT
    user = TEXT.special_id("<｜User｜>")
    request = at_once(SamplingParams(stop=["<｜User｜>"]), [*ids_of("ab"), user, *ids_of("c")])
    assert outcome(request)[1:4] == ("ab", "stop", "<｜User｜>") and request.made == 3
    unnamed = at_once(SamplingParams(max_tokens=4), [*ids_of("ab"), user, *ids_of("c")])
    assert outcome(unnamed)[1:3] == ("abc", "length")


def test_not_finite_logits_end_that_request():
    """Case B8: a row of NaN names the step; the tokens before it stay."""
    def logits(history: tuple[int, ...]) -> np.ndarray:
        return by_hash(history) * (np.nan if len(history) == 6 else 1)

    plain, _ = run(make(PROMPT, SamplingParams(max_tokens=9)), logits)
    drafted, accepted = run(make(PROMPT, SamplingParams(max_tokens=9)), logits, plain.output, 5, 5)
    for request in (plain, drafted):
        assert request.made == 3 and request.finish_reason == "error"
        assert "the logits at position 5 are not finite" in str(request.error)
        json.dumps(request.result().to_json(), allow_nan=False)
    assert "step 4" in plain.error.where and "step 1" in drafted.error.where


def test_prompt_logprobs():
    """Case B9: as many as the prompt has tokens, the first empty, whatever the chunks, also when a
    preemption computes some of them again."""
    prompt = list(np.random.default_rng(1).integers(2, 24, 33))
    lists = []
    for chunks in ([33], [8], [16, 5]):
        request = make(prompt, SamplingParams(prompt_logprobs=1, echo=True, max_tokens=2))
        for chunk in chunks:
            prefill(request, chunk)
        lists.append(run(request)[0].result().prompt_logprobs)
    first = lists[0]
    assert lists[1] == lists[2] == first and len(first) == 33 and first[0] is None
    row = by_hash(tuple(prompt[:5])).astype(np.float64)
    exact = row[prompt[5]] - math.log(np.exp(row).sum())
    assert first[5].chosen == pytest.approx(exact, rel=1e-5)
    assert first[5].top[0][0] == int(row.argmax()) and len(first[5].top) == 1


def test_a_nan_in_the_prompt():
    request = make(PROMPT, SamplingParams(prompt_logprobs=0))
    prefill(request, 2, lambda history: np.full(V, np.nan, np.float32))
    assert request.finish_reason == "error" and "position 0 are not" in request.error.what
    assert request.prompt_logprobs == [None]


class Digits:
    """A grammar of three digits."""

    def __init__(self) -> None:
        self.seen = 0

    def accept(self, token: int) -> bool:
        if token in EOS:
            raise RequestError("not the end yet")
        self.seen += 1
        return bytes([48]) <= {v: k for k, v in BYTES.items()}[token] <= bytes([57])

    @property
    def finished(self) -> bool:
        return self.seen == 3


def with_grammar(tokens: list[int], **given) -> Request:
    request = make([5], SamplingParams(max_tokens=9, **given))
    request.matcher = Digits()
    sampled = Sampled(np.array(tokens), np.zeros(len(tokens)), np.zeros((9, 1)), np.zeros((9, 1)))
    commit(request, tokens, sampled, 0, step=8)
    return request


def test_grammars():
    """Case J4: a finished grammar ends the request within the run; one that refuses fails it."""
    done = with_grammar(ids_of("1234"))
    assert (done.result().text, done.finish_reason, done.stop_reason) == ("123", "stop", None)
    refused = with_grammar(ids_of("1x2"))
    assert refused.made == 2 and refused.finish_reason == "error"
    assert "does not fit the grammar" in refused.error.what and "step 8" in refused.error.where
    ignoring = with_grammar([1], ignore_eos=True)
    assert ignoring.finish_reason == "error" and "not the end yet" in ignoring.error.what
    assert with_grammar([1]).finish_reason == "stop"


def test_fail_and_metrics():
    request, accepted = run(make(PROMPT, SamplingParams(max_tokens=6)), by_hash, [], 0)
    request.metrics.drafts.add(3, 2)
    request.metrics.drafts.add(1, 0)
    out = request.result()
    fail(request, RequestError("no"))
    assert request.finish_reason == "error" and out.finish_reason == "length"
    assert out.metrics.drafts.drafted == [2, 1, 1] and out.metrics.drafts.accepted == [1, 1, 0]
    assert out.metrics.inter_token_seconds == 1 and out.metrics.first_token_seconds == 1


@hypothesis.given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 4),
                  st.integers(4, 8), st.sets(st.integers(1, 6), max_size=2))
def test_the_short_way_commits_what_the_long_one_does(tokens, low, high, stops):
    """A plain request, by whether the step's logits are known to be finite."""
    def committed(finite: bool) -> tuple[object, ...]:
        request = make([5], SamplingParams(max_tokens=high, min_tokens=low,
                                           stop_token_ids=sorted(stops)))
        assert request.plain
        size = len(tokens)
        sampled = Sampled(np.array(tokens, np.int32), np.full(size, -1, np.float32),
                          np.zeros((size, 20), np.int32), np.zeros((size, 20), np.float32), finite)
        counts = []
        while len(counts) < 2 and not request.finished:
            counts.append(commit(request, tokens, sampled, 0, step=1))
        return counts, outcome(request), request.metrics.tokens

    assert committed(True) == committed(False)
