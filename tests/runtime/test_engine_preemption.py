"""Preemption: a request that lost its state goes on with the same bits."""

from __future__ import annotations

import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.request import SamplingParams
from tests.runtime.engine_cases import (
    GREEDY,
    collect,
    drain,
    outcome,
    require_all_free,
    solo,
    watch,
)
from tests.runtime.fake_device import by_hash, expected_tokens, fake_engine, fake_program
from tests.runtime.fake_grammar import allowed_at, grammar_of, with_fake_grammars
from tests.runtime.fake_sampler import solo_tokens
from tests.runtime.test_text import TEXT

PROGRAM = fake_program(page_size=16, max_model_len=128)
PROMPT = [3 + i * i % 400 for i in range(34)]
COUNT = 35
KINDS = [
    dict(temperature=0),
    dict(temperature=0.8, seed=5, top_p=0.9),
    dict(temperature=0, repetition_penalty=1.5, frequency_penalty=1, presence_penalty=0.5),
    dict(temperature=0.5, structured=grammar_of(1, 35), min_tokens=3),
]


def params_of(kind: int) -> SamplingParams:
    return SamplingParams(**{"max_tokens": COUNT, "ignore_eos": True, "logprobs": 1, **KINDS[kind]})


@pytest.fixture(scope="module")
def alone() -> list[dict]:
    """The outcomes without pressure, which are what prompt and params alone say."""
    found = []
    for kind in range(len(KINDS)):
        out = solo(PROGRAM, PROMPT, params_of(kind), max_model_len=128, text=TEXT)
        grammar = (lambda made: allowed_at(1, made)) if kind == 3 else None
        assert out.token_ids == solo_tokens(PROMPT, params_of(kind), grammar=grammar)
        assert len(out.token_ids) == COUNT
        found.append(outcome(out))
    return found


def engine_of(**given):
    engine, device = fake_engine(PROGRAM, max_model_len=128, text=TEXT, **given)
    with_fake_grammars(engine)
    return engine, device


@pytest.mark.parametrize("prefix", ["off", "exact"])
@pytest.mark.parametrize("draft", ["off", "fixed", "adaptive"])
def test_two_requests_that_do_not_fit_together(alone, draft, prefix):
    """Case D5: prompt 34, 35 tokens, pages of 16, 7 pages of the 10 that both want."""
    for kind in range(len(KINDS)):
        engine, _ = engine_of(num_pages=7, draft=draft, prefix_cache=prefix)
        names = [engine.add_request(PROMPT, params_of(kind)) for _ in range(2)]
        done = drain(engine)
        assert [outcome(done[n]) for n in names] == [alone[kind]] * 2
        assert engine.stats().preemptions >= 1
        assert done[names[0]].metrics.preemptions == 0 < done[names[1]].metrics.preemptions
        require_all_free(engine)


@pytest.mark.parametrize("draft", ["off", "fixed"])
@pytest.mark.parametrize("at", [1, 2, 3, 17, 34, pytest.param(0, marks=pytest.mark.full)])
def test_a_preemption_at_any_step(alone, draft, at):
    """Case D5: tokens, noise, counts and grammar go on where they were; 0: at every step number,
    each in a run of its own."""
    for step in [at] if at else range(1, COUNT + 3):
        engine, _ = engine_of(draft=draft, max_num_batched_tokens=64)
        names = [engine.add_request(PROMPT, params_of(kind)) for kind in range(len(KINDS))]
        done = {}
        for _ in range(step):
            collect(engine, done)
        lost = [name for name in names if engine.preempt(name)]
        assert engine.stats().running == 0 and (lost or done)
        done |= drain(engine)
        assert [outcome(done[n]) for n in names] == alone, step
        assert engine.stats().preemptions == len(lost)


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_a_preemption_after_every_step(alone, draft):
    """Case D5: each step that ends a recompute gives a token, so everybody still finishes."""
    engine, _ = engine_of(draft=draft, max_num_batched_tokens=100, prefill_chunk=76)
    names = [engine.add_request(PROMPT, params_of(kind)) for kind in range(len(KINDS))]
    done, lost = {}, 0
    while engine.has_unfinished():
        collect(engine, done)
        lost += sum(engine.preempt(name) for name in names)
        assert lost < 1000
    assert [outcome(done[n]) for n in names] == alone and lost > 3 * COUNT


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_a_stop_text_split_by_a_preemption(draft):
    """Case D5: its first half was generated before, its second half after."""
    text = TEXT.decode(expected_tokens(PROMPT, COUNT))
    tokens = expected_tokens(PROMPT, COUNT)
    ascii_at = next(k for k in range(2, COUNT - 3) if all(
        len(TEXT.decode([t])) == 1 and TEXT.decode([t]) != "\ufffd" for t in tokens[k:k + 3]))
    stop = TEXT.decode(tokens[ascii_at:ascii_at + 3])
    assert stop in text
    params = SamplingParams(max_tokens=COUNT, stop=stop, **GREEDY)
    wanted = outcome(solo(PROGRAM, PROMPT, params, max_model_len=128, text=TEXT))
    assert wanted["reason"] == "stop" and wanted["stop"] == stop
    split = 0
    for step in range(1, 1 + ascii_at + 4):
        engine, _ = engine_of(draft=draft)
        name = engine.add_request(PROMPT, params)
        done, made = {}, 0
        for _ in range(step):
            made = max([made, *(len(out.token_ids) for out in collect(engine, done))])
        if not engine.preempt(name):
            break
        split += ascii_at < made < ascii_at + 3
        assert outcome(drain(engine)[name]) == wanted
    assert split or draft == "fixed"


def test_who_is_preempted_and_what_is_told(program):
    engine, _ = fake_engine(program, num_pages=9, prefill_chunk=8, draft="off")
    records = watch(engine)
    names = [engine.add_request([60 + n] * 10, SamplingParams(max_tokens=30, **GREEDY))
             for n in range(3)]
    done = drain(engine)
    told = [name for r in records for name in r.preempted]
    assert told and names[0] not in told and engine.stats().preemptions == len(told)
    for n, name in enumerate(names):
        assert done[name].metrics.preemptions == told.count(name)
        assert done[name].token_ids == expected_tokens([60 + n] * 10, 30)
    assert not engine.preempt(names[0]) and not engine.preempt("nobody")


def test_what_can_never_fit_is_refused_and_keeps_nobody_waiting():
    """Case D1: prompts too long for the pool, and ones that would outgrow it, at once and with the
    numbers; a small one behind them runs; one that needs all of the pool runs as well."""
    engine, _ = fake_engine(PROGRAM, max_model_len=128, num_pages=5)
    for length, count, need, positions in [(81, 1, 6, 81), (100, 9, 7, 108), (40, 60, 7, 99)]:
        with pytest.raises(RequestError, match=rf"needs {need} pages for {positions} positions, "
                                               r"expected at most 5"):
            engine.add_request([5] * length, SamplingParams(max_tokens=count, **GREEDY))
    small = engine.add_request([5] * 3, SamplingParams(max_tokens=4, **GREEDY))
    whole = engine.add_request([6] * 40, SamplingParams(max_tokens=41, **GREEDY))
    done = drain(engine, most=200)
    assert done[small].token_ids == expected_tokens([5] * 3, 4)
    assert done[whole].token_ids == expected_tokens([6] * 40, 41)
    nothing, _ = fake_engine(PROGRAM, max_model_len=128, num_pages=0)
    with pytest.raises(RequestError, match="needs 1 pages for 1 positions, expected at most 0"):
        nothing.add_request([5], SamplingParams(max_tokens=1))
    assert not nothing.has_unfinished()


@pytest.mark.parametrize("draft", ["off", "fixed"])
def test_a_pool_that_shrinks_and_grows(draft):
    """Requests that fit no longer wait, and go on when they fit again."""
    engine, _ = engine_of(draft=draft)
    prompts = [[70 + n] * (9 + n) for n in range(4)]
    names = [engine.add_request(p, SamplingParams(max_tokens=40, **GREEDY)) for p in prompts]
    done = {}
    for pages in (32, 2, 5, 0, 9, 32):
        engine.pool.resize(pages)
        for _ in range(6):
            collect(engine, done)
    done |= drain(engine)
    for name, prompt in zip(names, prompts, strict=True):
        assert done[name].token_ids == expected_tokens(prompt, 40)
    assert engine.stats().preemptions > 0
    require_all_free(engine)


def test_the_oracle_is_no_constant():
    """What the tests above compare with depends on noise, counts, grammar and every token."""
    outputs = [tuple(solo_tokens(PROMPT, params_of(k), grammar=(
        (lambda made: allowed_at(1, made)) if k == 3 else None))) for k in range(len(KINDS))]
    assert len(set(outputs)) == len(KINDS) and by_hash((1, 2)) != by_hash((2, 1))
    assert expected_tokens(PROMPT, 5) != expected_tokens([4, *PROMPT[1:]], 5)


def test_a_request_that_is_computed_again_says_nothing_new_meanwhile():
    """Chunks computed again are no outputs: a stream gets each token once."""
    engine, _ = fake_engine(PROGRAM, max_model_len=128, prefill_chunk=8, prefix_cache="off",
                            max_num_batched_tokens=40, draft="off", overlap=False)
    name = engine.add_request(PROMPT, SamplingParams(max_tokens=6, **GREEDY))
    shown: list[int] = []
    again = 0
    while engine.has_unfinished():
        before = engine.steps
        outputs = engine.step()
        shown += [len(out.token_ids) for out in outputs]
        again += engine.steps > before and bool(shown) and not outputs
        if shown == [1, 2, 3]:
            assert engine.preempt(name)
            shown.append(0)  # once
    assert [n for n in shown if n] == [1, 2, 3, 4, 5, 6] and again == len(PROMPT) // 8
