"""Where outputs end, what text and logprobs they have: with drafts and without."""

from __future__ import annotations

import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.request import SamplingParams
from tests.runtime.engine_cases import GREEDY, STEPWISE, drain
from tests.runtime.fake_device import History, expected_tokens, fake_engine
from tests.runtime.fake_sampler import solo_tokens
from tests.runtime.test_text import TEXT, ids_of


def test_end_of_text_and_stop_ids(program):
    script = [10, 11, 1, 12, 13, 14]

    def choose(history: History) -> int:
        return script[min(len(history) - 2, 5)]

    cases = [(dict(), 3, "stop", 1), (dict(ignore_eos=True), 6, "length", None),
             (dict(stop_token_ids=[11, 10]), 1, "stop", 10),
             (dict(max_tokens=2), 2, "length", None), (dict(max_tokens=3), 3, "stop", 1),
             (dict(stop_token_ids=[11], min_tokens=1), 2, "stop", 11),
             (dict(stop_token_ids=[12], min_tokens=3), 4, "stop", 12)]
    for draft in ("off", "fixed"):
        engine, _ = fake_engine(program, choose=choose, draft=draft)
        names = [engine.add_request([8, 9], SamplingParams(**{
            "max_tokens": 6, "temperature": 0, **params})) for params, *_ in cases]
        done = drain(engine)
        for name, (_, *wanted) in zip(names, cases, strict=True):
            out = done[name]
            assert [len(out.token_ids), out.finish_reason, out.stop_reason] == wanted


def test_no_end_of_text_among_the_first_min_tokens(program):
    """The end is masked there, so that another token stands in its place."""
    params = SamplingParams(max_tokens=6, min_tokens=3, temperature=0, stop_token_ids=[10])

    def choose(history: History) -> int:
        return [10, 1, 1, 10][min(len(history) - 2, 3)]

    for draft in ("off", "fixed"):
        engine, _ = fake_engine(program, choose=choose, draft=draft)
        engine.add_request([8, 9], params)
        out = drain(engine)["0"]
        assert out.token_ids == solo_tokens([8, 9], params, choose) and len(out.token_ids) == 4
        assert out.token_ids[3] == 10 and not {1, 10} & set(out.token_ids[:3])
        assert (out.finish_reason, out.stop_reason) == ("stop", 10)


def test_stop_texts_and_text_while_streaming(program):
    script = ids_of("ab€ENDc".encode())

    def choose(history: History) -> int:
        return script[min(len(history) - 1, 8)]

    engine, _ = fake_engine(program, choose=choose, text=TEXT, **STEPWISE)
    stopping = engine.add_request([8], SamplingParams(max_tokens=9, stop=["END", "zz"],
                                                      temperature=0))
    cut = engine.add_request([8], SamplingParams(max_tokens=4, temperature=0))
    shown: dict[str, list[str]] = {stopping: [], cut: []}
    last = {}
    while engine.has_unfinished():
        for out in engine.step():
            shown[out.request_id].append(out.text)
            last[out.request_id] = out
    assert shown[stopping] == ["a", "ab", "ab", "ab", "ab€", "ab€", "ab€", "ab€"]
    assert last[stopping].stop_reason == "END" and last[stopping].finish_reason == "stop"
    assert last[stopping].token_ids == script[:8]
    assert shown[cut] == ["a", "ab", "ab", "ab\ufffd"] and last[cut].finish_reason == "length"


def test_without_a_tokenizer(program):
    engine, _ = fake_engine(program)
    for params in (dict(stop="x"), dict(echo=True), dict(structured={"regex": "a*"})):
        with pytest.raises(RequestError, match="has no tokenizer.json"):
            engine.add_request([8], SamplingParams(**params))
    assert not engine.has_unfinished()
    name = engine.add_request([8], SamplingParams(max_tokens=1))
    assert drain(engine)[name].text == ""


def test_logprobs(program):
    engine, _ = fake_engine(program)
    two = engine.add_request([8, 9], SamplingParams(max_tokens=2, logprobs=2, **GREEDY))
    zero = engine.add_request([8, 9], SamplingParams(max_tokens=1, logprobs=0, **GREEDY))
    done = drain(engine)
    first, second = done[two].logprobs
    token = done[two].token_ids[0]
    assert first.chosen == -2 and first.top == [(token, -2), ((token + 1) % 512, -3)]
    assert second.chosen == -3 and done[zero].logprobs[0].top == []


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_logits_that_are_not_finite_end_that_request_only(program, draft):
    sick = [40, 41]
    engine, _ = fake_engine(program, nan=lambda h: h[:2] == (40, 41) and len(h) == 4,
                            draft=draft)
    a = engine.add_request(sick, SamplingParams(max_tokens=5, **GREEDY))
    b = engine.add_request([42], SamplingParams(max_tokens=5, **GREEDY))
    done = drain(engine)
    assert done[a].finish_reason == "error" and done[a].token_ids == expected_tokens(sick, 2)
    assert "logits at position 3 are not finite" in done[a].error.what
    assert "step" in done[a].error.where
    assert done[b].token_ids == expected_tokens([42], 5)


def test_the_end_of_the_context(program):
    engine, _ = fake_engine(program, max_model_len=20)
    edge = engine.add_request([9] * 19, SamplingParams(max_tokens=5, **GREEDY))
    near = engine.add_request([9] * 17, SamplingParams(max_tokens=5, **GREEDY))
    with pytest.raises(RequestError, match="the prompt has 20 tokens, expected at most 19"):
        engine.add_request([9] * 20)
    done = drain(engine)
    assert done[edge].token_ids == expected_tokens([9] * 19, 1)
    assert done[near].token_ids == expected_tokens([9] * 17, 3)
    assert done[near].finish_reason == "length"
