"""Drafts: whatever is proposed, verified and accepted, outputs are those of plain decode."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.request import SamplingParams
from tests.runtime.engine_cases import (
    GREEDY,
    drain,
    outcome,
    require_all_free,
    rows_of,
    solo,
    watch,
)
from tests.runtime.fake_device import History, expected_tokens, fake_engine, fake_program
from tests.runtime.fake_rings import Pending
from tests.runtime.fake_sampler import by_hash, solo_tokens
from tests.runtime.test_text import TEXT, ids_of

LONG = fake_program(page_size=8, max_model_len=200)


def right(count: int, width: int = 5, choose=by_hash):
    """The drafter S(count): its first ``count`` drafts are the target's own tokens, then none."""
    def propose(history: History) -> list[int]:
        made: list[int] = []
        for k in range(width):
            token = choose((*history, *made))
            made.append(token if k < count else 3 + (token + 1) % 256)
        return made

    return propose


def copy_drafter(name: str, tokens: list[int], width: int) -> list[int]:
    return right(width, width)(tuple(tokens))


@pytest.mark.parametrize("width", range(6))
def test_acceptance_of_any_length_from_any_position(program, width):
    """Cases C1, C3: every width, every number of accepted drafts, from even and odd positions, and
    plain steps afterwards; the device checks rings and pending halves at each step."""
    for accepted in range(width + 1):
        engine, device = fake_engine(program, draft_width=width, drafts=right(accepted))
        records = watch(engine)
        prompts = [[60 + n] * n for n in (1, 2, 7)]
        names = [engine.add_request(p, SamplingParams(max_tokens=14, logprobs=0, **GREEDY))
                 for p in prompts]
        plain = engine.add_request([9], SamplingParams(max_tokens=14, draft_width=0, **GREEDY))
        done = drain(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert done[name].token_ids == expected_tokens(prompt, 14)
            assert [x.chosen for x in done[name].logprobs] == [-len(prompt) - k for k in range(14)]
        assert done[plain].metrics.drafts.drafted == [] and done[plain].metrics.steps == 14
        full = [(len(r.drafted[n]), r.accepted[n]) for r in records for n in r.drafted]
        assert all(a == min(accepted, d) for d, a in full) and bool(full) is (width > 0)
        if width:
            assert max(full) == (width, accepted)
            assert {start % 2 for name in names for start, end in rows_of(records, name)
                    if end - start == width + 1} == {0, 1}
        require_all_free(engine)


def test_a_pending_ring_that_is_too_short_would_be_noticed(program):
    """Case C1, the negative control: a ring made for fewer drafts loses first halves."""
    engine, device = fake_engine(program, drafts=right(0))
    device.pending = Pending(engine.sizes.num_slots, 1)
    engine.add_request([5] * 4, SamplingParams(max_tokens=14, **GREEDY))
    with pytest.raises(AssertionError):
        drain(engine)


@pytest.mark.parametrize("accepted", [5, 2, 0, None])
def test_a_long_output(accepted):
    """Case C3: nothing of a batched verify step stays behind; None: a random number."""
    drafts = None if accepted is None else right(accepted)
    engine, _ = fake_engine(LONG, max_model_len=200, drafts=drafts)
    engine.add_request([5, 6], SamplingParams(max_tokens=150, **GREEDY))
    out = drain(engine)["0"]
    assert out.token_ids == expected_tokens([5, 6], 150)
    assert out.metrics.steps == (26 if accepted == 5 else 51 if accepted == 2 else
                                 150 if accepted == 0 else out.metrics.steps)


@pytest.mark.parametrize("cap", [1, 2, 3, 4, 5, 6, 10])
@pytest.mark.parametrize("stop", [{"stop_token_ids": [9]}, {"stop": "bc"}, {"stop": "c'"}])
def test_a_stop_inside_an_accepted_run(program, cap, stop):
    """Case C4: a b c 9 ... come at once, by 9, by a text across tokens, or by the cap; ids, reason,
    text and usage are those of plain decode."""
    script = [*ids_of(b"abc"), 9, *ids_of(b"xyz"), 9, 40, 41]

    def choose(history: History) -> int:
        return script[min(len(history) - 1, 9)]

    params = SamplingParams(max_tokens=cap, temperature=0, logprobs=1, **stop)
    engine, _ = fake_engine(program, choose=choose, drafts=right(5, choose=choose), text=TEXT)
    name = engine.add_request([8], params)
    done = drain(engine)[name]
    assert outcome(done) == outcome(solo(program, [8], params, choose=choose, text=TEXT))
    ends = {"stop_token_ids": 4, "stop": 3 if stop.get("stop") == "bc" else 4}[next(iter(stop))]
    assert len(done.token_ids) == min(cap, ends)
    assert done.finish_reason == ("stop" if cap >= ends else "length")
    assert done.metrics.steps <= 2


def test_the_copy_drafter_is_always_right():
    """Case C6: its drafts are accepted at every depth, whatever the prompt's length."""
    engine, _ = fake_engine(LONG, max_model_len=200)
    engine.drafter = copy_drafter
    for n in (10, 130, 64):
        engine.add_request([n] * n, SamplingParams(max_tokens=31, **GREEDY))
    done = drain(engine)
    stats = engine.stats()
    assert engine.policy.width == 5
    assert stats.accepts.drafted == stats.accepts.accepted == [15] * 5
    assert (stats.verified, stats.accepted, stats.accepts.length) == (75, 75, 6)
    for out in done.values():
        assert out.metrics.drafts.accepted == out.metrics.drafts.drafted == [5] * 5
        assert out.token_ids == expected_tokens(out.prompt_token_ids, 31)


def test_widths(program):
    """Case C6: any width up to the block, whatever the number of stages; others are refused."""
    for width in (6, 7, -1, True, 2.5):
        with pytest.raises(RequestError, match=rf"draft_width is {width}, expected an int in 0..5: "
                                               r"the model drafts 5 at once"):
            fake_engine(program, draft_width=width)
    with pytest.raises(RequestError, match="draft is 'on', expected 'fixed', 'adaptive' or 'off'"):
        fake_engine(program, draft="on")
    with pytest.raises(RequestError, match="verification is 'exakt'"):
        fake_engine(program, verification="exakt")
    engine, _ = fake_engine(program)
    with pytest.raises(RequestError, match="draft_width is 6, expected"):
        engine.add_request([5], SamplingParams(draft_width=6))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("own", [3, 5])
def test_a_request_wider_than_its_engine(program, own):
    """Case C6: rows are reserved for the engine's width; a request that asks for more still runs,
    and verifies no more than there is room for."""
    engine, _ = fake_engine(program, max_num_seqs=1, max_num_batched_tokens=3, draft_width=2)
    engine.drafter = copy_drafter
    try:
        name = engine.add_request([5], SamplingParams(max_tokens=12, draft_width=own, **GREEDY))
    except RequestError as error:
        assert f"draft_width is {own}" in error.what
    else:
        assert drain(engine, most=20)[name].token_ids == expected_tokens([5], 12)


def test_adaptive_widths_know_the_prefill_rows_beside(program):
    """Rows that a step computes anyway are part of what a draft's cost is compared with."""
    engine, _ = fake_engine(program, draft="adaptive", prefill_chunk=8)
    told, widths = [], engine.policy.widths
    engine.policy.widths = lambda most, reserve=0: told.append(reserve) or widths(most, reserve)
    records = watch(engine)
    engine.add_request([5], SamplingParams(max_tokens=20, **GREEDY))
    for _ in range(3):
        engine.step()
    name = engine.add_request([9] * 20, SamplingParams(max_tokens=4, **GREEDY))
    drain(engine)
    prefilled = [sum(r.end - r.start for r in record.rows if r.request_id == name and r.end <= 20)
                 for record in records]
    assert prefilled[3:6] == [8, 8, 4]
    assert told[:6] == [0, 0, 0, 0, 8, 4]  # its first chunk: it was not admitted yet


def test_adaptive_widths_follow_confidence(program):
    """Unlikely drafts are not verified; outputs are the same."""
    prompts = [[70 + n] * (n + 1) for n in range(4)]
    counts = {}
    for mode in ("fixed", "adaptive"):
        engine, device = fake_engine(program, draft=mode)
        _cost_by_rows(engine)
        records = watch(engine)
        names = [engine.add_request(p, SamplingParams(max_tokens=20, **GREEDY)) for p in prompts]
        done = drain(engine)
        for name, prompt in zip(names, prompts, strict=True):
            assert done[name].token_ids == expected_tokens(prompt, 20)
        counts[mode] = engine.stats().verified
        widths = {w for r in records for w in r.widths.values()}
    assert counts["adaptive"] < counts["fixed"] and len(widths) > 2


def _cost_by_rows(engine) -> None:
    """Steps that cost as much as the rows they have."""
    engine.policy.curve = type(engine.policy.curve)(((1, 3.0), (64, 66.0)))


PENALTIES = [dict(repetition_penalty=2), dict(frequency_penalty=1.5), dict(presence_penalty=2),
             dict(repetition_penalty=1.5, frequency_penalty=-0.25, presence_penalty=1,
                  logit_bias={7: 0.5, 50: -2}),
             dict(frequency_penalty=2, temperature=0.7, top_k=9, seed=5),
             dict(allowed_token_ids=[7, 8, 9, 10], frequency_penalty=0.5, min_tokens=3,
                  stop_token_ids=[8])]


@pytest.mark.parametrize("params", PENALTIES)
def test_penalties_count_what_they_should(program, params):
    """Case B10: repetition counts prompt and output, the others the output alone, and a draft's
    row counts the drafts before it; with drafts of any quality, and after a preemption."""
    def choose(history: History) -> int:
        return 7 + len(history) // 2 % 8  # each twice: once penalised by the draft before it

    wanted = SamplingParams(**{**GREEDY, "max_tokens": 20, **params})
    expected = solo_tokens([7, 7, 7], wanted, choose)
    unlike = solo_tokens([7, 7, 7], SamplingParams(**{
        **GREEDY, "max_tokens": 20, "temperature": wanted.temperature}), choose)
    assert expected != unlike and solo(program, [7, 7, 7], wanted, choose=choose
                                       ).token_ids == expected
    for scripted in (None, right(4, choose=lambda h: _at(expected, h)), right(0, choose=choose)):
        engine, _ = fake_engine(program, choose=choose, drafts=scripted)
        name = engine.add_request([7, 7, 7], wanted)
        engine.step()
        engine.step()
        assert engine.preempt(name) or len(expected) < 9
        out = drain(engine)[name]
        assert out.token_ids == expected
        if scripted is None:
            assert sum(out.metrics.drafts.accepted) > 0  # the condition: verify rows with penalties


def _at(tokens: list[int], history: History) -> int:
    return tokens[min(len(history) - 3, len(tokens) - 1)]


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_other_verifications(program, verification):
    """Greedy requests keep the target's own tokens; others depend on their drafts, and nothing
    else: the same run gives the same."""
    runs = []
    for _ in range(2):
        engine, _ = fake_engine(program, verification=verification)
        greedy = engine.add_request([5, 6], SamplingParams(max_tokens=12, **GREEDY))
        free = [engine.add_request([5, n], SamplingParams(max_tokens=12, temperature=1.2, seed=n,
                                                          logprobs=2)) for n in (7, 8)]
        engine.step()
        engine.step()
        assert engine.preempt(free[0])
        done = drain(engine)
        assert done[greedy].token_ids == expected_tokens([5, 6], 12)
        assert all(np.isfinite(x.chosen) for n in free for x in done[n].logprobs)
        runs.append([outcome(done[n]) for n in free])
        assert engine.stats().verified > 0
    assert runs[0] == runs[1]
