"""SamplingParams and prompts: what is refused, and by which field."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.request import RequestOutput, SamplingParams, check_prompt


def test_defaults():
    p = SamplingParams()
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (16, 1, 0, 1, 0, 0)
    assert (p.stop, p.stop_token_ids, p.logprobs, p.min_tokens) == ((), (), None, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan), ("temperature", -0.5), ("temperature", math.inf),
        ("temperature", 1e39), ("temperature", "1"), ("temperature", True), ("temperature", None),
        ("top_p", 0), ("top_p", 1.0001), ("top_p", -1), ("top_p", math.nan),
        ("min_p", -0.1), ("min_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("top_k", True),
        ("seed", -1), ("seed", 2**64), ("seed", None), ("max_tokens", 0), ("max_tokens", 2.0),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -1), ("logprobs", 21),
        ("logprobs", True), ("stop", ""), ("stop", ["a", ""]), ("stop", 3), ("stop", b"a"),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
        ("ignore_eos", 1), ("temperature", 10**400), ("top_p", 10**400), ("min_p", -(10**400)),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    assert caught.value.what.startswith(f"{field} is {shown}, expected ")
    assert caught.value.where == "SamplingParams"


def test_an_int_too_long_to_print():
    """Python's repr refuses ints of more than 4300 digits."""
    with pytest.raises(RequestError, match="seed is an int too long to show, expected an int in 0"):
        SamplingParams(seed=10**5000)
    with pytest.raises(RequestError, match="token id an int too long to show is outside"):
        check_prompt([10**5000], 10, 5)


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(RequestError, match="unknown field 'temprature'") as caught:
        SamplingParams(temprature=1.0)
    assert "'temperature'" in caught.value.next
    with pytest.raises(RequestError, match="unknown field 'zzz'"):
        SamplingParams.of({"zzz": 1})
    with pytest.raises(RequestError, match="params is 5"):
        SamplingParams.of(5)


def test_values_are_normalised():
    p = SamplingParams(stop="end", stop_token_ids=[np.int64(4)], top_k=np.int32(3), temperature=1,
                       seed=2**64 - 1)
    assert p.stop == ("end",) and p.stop_token_ids == (4,) and type(p.stop_token_ids[0]) is int
    assert type(p.top_k) is int and type(p.temperature) is float and p.seed == 2**64 - 1
    assert SamplingParams.of({"stop": ["end"], "top_k": 3}).stop == ("end",)


def test_params_are_values():
    p = SamplingParams(seed=3, stop=["a", "b"])
    assert p == SamplingParams(seed=3, stop=("a", "b")) and hash(p) == hash(copy.copy(p))
    assert pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p
    assert dataclasses.replace(p, seed=4).seed == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.seed = 5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty, expected at least 1 token"),
        ([1, 10], "token id 10 is outside the vocabulary, expected 0..9"),
        ([-1], "token id -1 is outside"),
        ([1] * 6, "the prompt has 6 tokens, expected at most 5"),
        ([1.0], "prompt is [1.0], expected a text or a list of token ids"),
        ([True], "expected a text or a list of token ids"),
        (None, "prompt is None"), (7, "prompt is 7"), (b"ab", "prompt is b'ab'"),
        (np.zeros((1, 2), np.int32), "expected a text or a list of token ids"),
    ],
)
def test_bad_prompts(prompt, message):
    with pytest.raises(RequestError) as caught:
        check_prompt(prompt, 10, 5)
    assert message in str(caught.value)


def test_good_prompts():
    assert check_prompt((0, 9), 10, 5) == check_prompt(np.array([0, 9]), 10, 5) == [0, 9]


def test_a_refused_request_has_an_output():
    out = RequestOutput.failed("7", RequestError("no"))
    assert out.finished and out.finish_reason == "error" and out.usage.total_tokens == 0
