"""SamplingParams and prompts: what is refused, and by which field."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.outputs import RequestMetrics, RequestOutput, TokenLogprobs, Usage
from deepinfer.runtime.params import SamplingParams, child_seed
from deepinfer.runtime.request import Request, check_prompt
from deepinfer.runtime.values import Frozen
from tests.runtime.toy_target import EOS, TEXT, V, make, run


def test_defaults():
    p = SamplingParams()
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (16, 1, 0, 1, 0, 0)
    assert (p.stop, p.stop_token_ids, p.logprobs, p.min_tokens) == ((), (), None, 0)
    assert (p.n, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 1, 0, 0)
    assert (p.logit_bias, p.allowed_token_ids, p.prompt_logprobs, p.echo) == ({}, None, None, False)
    assert (p.structured, p.draft_width, p.cache_salt, p.cache_class) == (None, None, "", "chat")


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
        ("n", 0), ("n", 1025), ("n", None), ("repetition_penalty", 0), ("repetition_penalty", 101),
        ("repetition_penalty", math.nan), ("presence_penalty", 2.5), ("frequency_penalty", -3),
        ("frequency_penalty", "0"), ("logit_bias", [1]), ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: -math.inf}), ("logit_bias", {-1: 0}),
        ("logit_bias", {"x": 1}), ("logit_bias", {True: 1}), ("logit_bias", {1: None}),
        ("logit_bias", {"1": 1, 1: 2}), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 3), ("prompt_logprobs", 21), ("prompt_logprobs", True), ("echo", 1),
        ("draft_width", -1), ("draft_width", 1.5), ("cache_salt", None), ("cache_salt", "\ud800"),
        ("cache_class", "image"), ("stop", "\udc00"), ("structured", {}), ("structured", "a"),
        ("structured", {"regex": "a", "json": {}}), ("structured", {"xml": "a"}),
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


@pytest.mark.parametrize(("given", "message"), [
    ({"regex": ""}, "structured.regex is '', expected a text that is not empty"),
    ({"grammar": 5}, "structured.grammar is 5, expected a text"),
    ({"choice": []}, "structured.choice is [], expected a list of texts"),
    ({"choice": "ab"}, "structured.choice is 'ab', expected a list of texts"),
    ({"choice": ["a", ""]}, "structured.choice is ['a', ''], expected a list of texts"),
    ({"json": "{"}, "structured.json is '{', expected a JSON schema or its text (Expecting"),
    ({"json": {"minimum": math.nan}}, "structured.json is {'minimum': nan}, expected a JSON"),
    ({"json": {"enum": {1}}}, "expected a JSON schema or its text (Object of type set"),
])
def test_wrong_structured(given, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured=given)
    assert message in caught.value.what


def test_a_schema_too_deep_or_in_a_circle():
    """Case J5: refused with the reason, at once."""
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"items": deep}
    circle: dict[str, object] = {}
    circle["items"] = circle
    for schema in (deep, circle, "[" * 100_000):
        with pytest.raises(RequestError, match="expected a JSON schema or its text"):
            SamplingParams(structured={"json": schema})


def test_do_sample_does_not_exist():
    """Case A8: there is one rule for greedy, temperature 0, and nothing that could contradict."""
    with pytest.raises(RequestError, match="unknown field 'do_sample'"):
        SamplingParams.of({"do_sample": False, "temperature": 0.8})


FULL = dict(max_tokens=9, min_tokens=2, temperature=0.5, top_k=4, top_p=0.5, min_p=0.25,
            repetition_penalty=1.25, presence_penalty=-1, frequency_penalty=1,
            logit_bias={7: 1, 3: -2.5}, allowed_token_ids=[9, 3, 9], seed=2**64 - 1, n=3,
            stop=["a", "b"], stop_token_ids=[4], ignore_eos=True, logprobs=2, prompt_logprobs=0,
            echo=True, structured={"json": {"b": 1, "a": [1, (2, 3)]}}, draft_width=3,
            cache_salt="x", cache_class="agent")


def test_json_round_trip():
    p = SamplingParams(**FULL)
    assert set(FULL) == {f.name for f in dataclasses.fields(p)}
    text = json.dumps(p.to_json(), allow_nan=False)
    again = SamplingParams.of(json.loads(text))
    assert again == p and hash(again) == hash(p) and again.to_json() == p.to_json()
    assert list(p.logit_bias.items()) == [(3, -2.5), (7, 1)] and p.allowed_token_ids == (3, 9)
    assert p.structured == {"json": '{"b": 1, "a": [1, [2, 3]]}'}  # the schema's order is kept
    assert SamplingParams.of({"logit_bias": {"7": 1}}).logit_bias == {7: 1}
    assert pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p
    assert SamplingParams(structured={"choice": ["x", "y"]}).structured["choice"] == ("x", "y")
    assert SamplingParams().to_json()["structured"] is None


def test_params_do_not_follow_their_makers_dict():
    bias = {1: 2.0}
    p = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert p.logit_bias[1] == 2 and not hasattr(p.logit_bias, "__setitem__")
    assert Frozen({1: 2}) == {1: 2} and hash(Frozen({1: 2, 3: 4})) == hash(Frozen({3: 4, 1: 2}))
    assert repr(Frozen({1: 2})) == "{1: 2}" and len(Frozen({1: 2})) == 1


@pytest.mark.parametrize(("field", "value"), [
    ("stop_token_ids", [3, 10]), ("allowed_token_ids", [10]), ("logit_bias", {10: 1, 2: 1})])
def test_ids_outside_the_vocabulary(field, value):
    p = SamplingParams(**{field: value})
    p.check_vocab(11)
    with pytest.raises(RequestError, match=f"{field} holds id 10, expected ids of 0..9"):
        p.check_vocab(10)


def test_child_seeds():
    """The vectors pin the hash: seeds written down today give the same completions for ever."""
    assert child_seed(5, 0) == 5 and child_seed(2**64 - 1, 0) == 2**64 - 1
    assert [child_seed(0, 1), child_seed(5, 1), child_seed(5, 2), child_seed(2**64 - 1, 1023)] == [
        12908882390179188148, 12222303892469561598, 11550269515256273755, 2737261879194175563]
    many = {child_seed(seed, i) for seed in range(200) for i in range(50)}
    assert len(many) == 200 * 50
    p = SamplingParams(n=4, seed=5, top_k=3)
    assert p.child(0) == dataclasses.replace(p, n=1)
    assert (p.child(2).seed, p.child(2).n, p.child(2).top_k) == (child_seed(5, 2), 1, 3)


def test_make_checks_everything():
    def request(prompt=(5,), text=TEXT, **given) -> Request:
        return Request.make("r", prompt, SamplingParams(**given), vocab_size=V, eos=EOS,
                            max_model_len=8, text=text)

    assert (request().max_len, request(max_tokens=2).max_len) == (8, 3)
    for given, message in [
        (dict(prompt=[V]), "outside the vocabulary"), (dict(prompt=[1] * 8), "at most 7"),
        (dict(stop_token_ids=[V]), "stop_token_ids holds id 512"),
        (dict(text=None, stop="a"), r"stop is \('a',\), expected none: the model has no"),
        (dict(text=None, echo=True), "echo is True, expected none: the model has no"),
    ]:
        with pytest.raises(RequestError, match=message):
            request(**given)
    assert request(text=None).result().text == ""
    assert request(ignore_eos=True, stop_token_ids=[3]).enders == {3}
    assert request(stop_token_ids=[3]).enders == {1, 3}


def test_a_request_at_work():
    request = make([5, 6], SamplingParams(max_tokens=3))
    assert not request.decoding and request.positions == 4 and request.result().finished is False
    request.computed, request.drafts = 2, [4]
    request.tokens.append(9)
    assert request.decoding and (request.made, request.output) == (1, [9])
    request.restart()
    assert not request.decoding and request.computed == 0 and not request.drafts
    assert request.result().metrics.preemptions == 1
    request.end("abort")
    assert request.result().finish_reason == "abort" and request.result().finished


def test_outputs_as_json():
    """Case B8: what is not finite is null, so every output is valid JSON."""
    logprobs = [TokenLogprobs(-math.inf, [(3, -0.5), (4, -math.inf), (5, math.nan)])]
    out = RequestOutput("r", [1, 2], "a", [3], "error", None, RequestError("no", where="here"),
                        Usage(2, 1, 1), logprobs, [None])
    made = json.loads(json.dumps(out.to_json(), allow_nan=False))
    assert made["logprobs"] == [{"token_id": 3, "logprob": None,
                                 "top": [[3, -0.5], [4, None], [5, None]]}]
    assert made["prompt_logprobs"] == [None] and made["error"]["where"] == "here"
    assert made["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3,
                             "cached_tokens": 1}
    assert "logprobs" not in RequestOutput.failed("7", RequestError("no")).to_json()


def test_metrics_and_cached_tokens_are_not_part_of_the_result():
    a = RequestOutput("r", [1], "a", [3], None, None, None, Usage(1, 1, 1), None)
    b = dataclasses.replace(a, usage=Usage(1, 1, 0), metrics=RequestMetrics(arrival=9.0))
    assert a == b and a != dataclasses.replace(a, text="b")


def test_metrics():
    m = RequestMetrics(arrival=1.0)
    assert m.queue_seconds is m.first_token_seconds is m.inter_token_seconds is None
    m.admitted = 1.5
    m.add_tokens(0, 2.0)
    assert m.first_token is None
    m.add_tokens(2, 3.0)
    m.add_tokens(3, 5.0)
    assert (m.queue_seconds, m.first_token_seconds, m.inter_token_seconds) == (0.5, 2.0, 0.5)
    copied = m.copy()
    m.drafts.add(2, 1)
    assert copied.drafts.drafted == [] and m.to_json()["drafted"] == [1, 1]
    assert m.drafts.accepted == [1, 0]


def test_several_completions():
    """Case B5: by index, whatever order they come in; finished when all are."""
    params = SamplingParams(n=3, seed=1, max_tokens=4)
    children = []
    for index in (2, 0, 1):
        request, _ = run(make([5], params.child(index)))
        request.index = index
        children.append(request.result())
    out = RequestOutput.group("g", children)
    assert [o.index for o in out.outputs] == [0, 1, 2] and out.request_id == "g"
    assert out.token_ids == out.outputs[0].token_ids and out.finished
    assert out.usage == Usage(1, sum(len(o.token_ids) for o in children))
    assert len(out.to_json()["outputs"]) == 3 and "outputs" not in out.outputs[0].to_json()
    running = dataclasses.replace(children[2], finish_reason=None)
    assert not RequestOutput.group("g", [*children[:2], running]).finished
