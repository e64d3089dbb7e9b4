"""The prefix cache in the engine: a hit skips work and changes nothing."""

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
    rows_of,
    solo,
    watch,
)
from tests.runtime.fake_device import expected_tokens, fake_engine, fake_program
from tests.runtime.test_text import TEXT

PAGE = 8
LONG = fake_program(page_size=PAGE, max_model_len=200)


def text_of(count: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 37 + i * i + 7 * i) % 500 for i in range(count)]


def engine_of(**given):
    return fake_engine(LONG, max_model_len=200, **{"snapshot_interval": 2, **given})


def serve(engine, prompt, **params):
    """A request alone; its output and how many positions came from the cache."""
    given = {"max_tokens": 4, "logprobs": 1, **GREEDY, **params}
    name = engine.add_request(prompt, SamplingParams(**given))
    out = drain(engine)[name]
    return out, out.usage.cached_tokens


@pytest.mark.parametrize("draft", ["off", "fixed"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 100, 129])
def test_the_same_prompt_again(length, draft):
    """Cases A3, D2, E3: bits of a cold run, from the last page end before the last token; only the
    rest is computed; the first run and one after a flush hit nothing."""
    engine, _ = engine_of(draft=draft)
    records = watch(engine)
    prompt = text_of(length)
    cold, none = serve(engine, prompt)
    for other in range(5):
        serve(engine, text_of(20, 1 + other))
    warm, hit = serve(engine, prompt)
    engine.prefix.clear()
    again, flushed = serve(engine, prompt)
    assert (none, flushed, hit) == (0, 0, (length - 1) // PAGE * PAGE)
    assert outcome(cold) == outcome(warm) == outcome(again)
    assert warm.token_ids == expected_tokens(prompt, 4)
    rows = [end - start for start, end in rows_of(records, warm.request_id) if start < length]
    assert sum(rows) == length - hit and rows_of(records, warm.request_id)[0][0] == hit
    assert [r.hits for r in records if r.hits] == ([{warm.request_id: hit}] if hit else [])
    assert engine.stats().hit_tokens == hit


def test_a_snapshot_is_taken_only_while_the_rings_hold_the_window():
    """A long chunk past a page end has overwritten what its snapshot would need."""
    engine, _ = fake_engine(fake_program(page_size=16, max_model_len=128), max_model_len=128,
                            max_num_batched_tokens=100, draft="off")
    records = watch(engine)
    name = engine.add_request([5] * 10, SamplingParams(max_tokens=70, **GREEDY))
    for _ in range(50):
        engine.step()
    assert engine.preempt(name)
    engine.prefix.clear()
    for _ in range(2):
        engine.step()
        assert engine.preempt(name)
    assert rows_of(records, name)[-2:] == [(0, 60), (0, 61)]  # 48 was passed by 12 rows
    assert drain(engine)[name].token_ids == expected_tokens([5] * 10, 70)


@pytest.mark.parametrize("tail", [1, 9, 60])
def test_a_longer_prompt(tail):
    """Case D2: the next turn of a chat: prompt, output and new tokens."""
    engine, _ = engine_of(snapshot_interval=8)
    first, _ = serve(engine, text_of(70), max_tokens=20)
    prompt = [*first.prompt_token_ids, *first.token_ids, *text_of(tail, 3)]
    second, hit = serve(engine, prompt, max_tokens=9)
    assert hit == 88  # 89 rows were computed, and the last page end among them was kept
    assert second.token_ids == expected_tokens(prompt, 9)
    other, hit = serve(engine, [*text_of(66), 4, 4, 4, 4, 4], max_tokens=3)
    assert hit == 64 and other.token_ids == expected_tokens([*text_of(66), *[4] * 5], 3)


def test_who_shares_with_whom():
    """Case D3: a hit needs the same tokens from the start and the same salt."""
    prompt, other = [1, 23] * 16, [12, 3] * 16
    engine, _ = engine_of(snapshot_interval=1)
    serve(engine, prompt, cache_salt="a")
    for tokens, salt, hit in [
            (prompt, "b", 0), (prompt, "", 0), (other, "a", 0), (prompt, "a", 24),
            (prompt, "b", 24), (prompt, "", 24), (prompt[:8] + other[8:], "a", 8),
            (other[:8] + prompt[8:], "a", 8), (prompt[8:16] + other[8:], "b", 8),
            (other[:8] + prompt[8:], "b", 0), (prompt[1:] + [5, 5], "a", 0)]:
        out, found = serve(engine, tokens, cache_salt=salt)
        assert found == hit, (tokens, salt)
        assert out.token_ids == expected_tokens(tokens, 4)


@pytest.mark.parametrize("draft", ["off", "fixed"])
@pytest.mark.parametrize("chunks", [0, 1, 2, 6, 25])
def test_abort_in_the_middle_of_a_prefill(chunks, draft):
    """Case D4: what an aborted request left is whole or gone: the same prompt gives what it gives
    cold, while others fill the freed pages; the second abort does nothing."""
    engine, _ = engine_of(draft=draft, num_pages=50, prefill_chunk=8)
    prompt = text_of(190)
    gone = engine.add_request(prompt, SamplingParams(max_tokens=9, **GREEDY))
    for _ in range(chunks):
        engine.step()
    assert engine.abort(gone) and not engine.abort(gone)
    engine.check()
    assert engine.pool.free_pages == 50 and engine.stats().free_slots == 4
    filling = engine.add_request(text_of(150, 1), SamplingParams(max_tokens=20, **GREEDY))
    done = {}
    for _ in range(4):
        collect(engine, done)
    again = engine.add_request(prompt, SamplingParams(max_tokens=9, **GREEDY))
    done |= drain(engine)
    assert gone not in done
    assert done[again].token_ids == expected_tokens(prompt, 9)
    assert done[filling].token_ids == expected_tokens(text_of(150, 1), 20)
    require_all_free(engine)


def test_abort_of_a_waiting_request_and_in_its_last_step():
    """Case D4."""
    engine, _ = engine_of(max_num_seqs=1)
    first = engine.add_request([5], SamplingParams(max_tokens=1, **GREEDY))
    waiting = engine.add_request([6], SamplingParams(max_tokens=1, **GREEDY))
    assert engine.abort(waiting)
    (out,) = engine.step()
    assert out.request_id == first and out.finished
    assert not engine.abort(first) and not engine.abort(waiting) and not engine.has_unfinished()
    require_all_free(engine)


@pytest.mark.parametrize("draft", ["off", "fixed"])
@pytest.mark.parametrize("length", [1, 33, 49])
def test_prompt_logprobs_take_nothing_from_the_cache(length, draft):
    """Case B9: one for each token of the prompt, equal to a cold run, whatever is cached."""
    engine, device = engine_of(draft=draft, prefill_chunk=8, snapshot_interval=1)
    prompt = text_of(length)
    params = SamplingParams(max_tokens=5, prompt_logprobs=2, logprobs=1, **GREEDY)
    cold = solo(LONG, prompt, params, max_model_len=200)
    serve(engine, text_of(32) + [9] * 8)
    for _ in range(2):
        name = engine.add_request(prompt, params)
        out = drain(engine)[name]
        assert outcome(out) == outcome(cold) and out.usage.cached_tokens == 0
        first, *others = out.prompt_logprobs
        assert first is None and [x.chosen for x in others] == [-n for n in range(1, length)]
        assert [x.top[0][0] for x in others] == prompt[1:]
    _, hit = serve(engine, prompt)
    assert hit == (length - 1) // PAGE * PAGE  # others do find what such a request computed


def test_prompt_logprobs_survive_a_preemption():
    """Case B9: in the middle of the prompt, and in the middle of the output."""
    prompt = text_of(33)
    params = SamplingParams(max_tokens=20, prompt_logprobs=1, logprobs=1, **GREEDY)
    cold = outcome(solo(LONG, prompt, params, max_model_len=200))
    for steps in range(1, 9):
        engine, _ = engine_of(prefill_chunk=8)
        name = engine.add_request(prompt, params)
        for _ in range(steps):
            engine.step()
        assert engine.preempt(name)
        assert outcome(drain(engine)[name]) == cold


def test_chunk_edges_are_the_requests_own():
    """Case A4: alone, behind a long prompt, beside short ones, and after hits of any length, a
    prompt's chunks end at places that only it decides."""
    prompt = text_of(90)

    def cuts(before, cached):
        engine, _ = engine_of(prefill_chunk=12)
        records = watch(engine)
        if cached:
            serve(engine, [*prompt[:cached], *text_of(9, 5)])
        for other in before:
            engine.add_request(other, SamplingParams(max_tokens=30, **GREEDY))
        name = engine.add_request(prompt, SamplingParams(max_tokens=9, **GREEDY))
        assert drain(engine)[name].token_ids == expected_tokens(prompt, 9)
        return [end for start, end in rows_of(records, name) if start < len(prompt)]

    alone = cuts([], 0)
    assert alone == [12, 16, 24, 32, 36, 48, 60, 64, 72, 80, 84, 88, 90]
    for before in ([text_of(170, 1)], [text_of(30, n) for n in (1, 2, 3)]):
        assert cuts(before, 0) == alone
    for cached in (16, 17, 40, 65, 88):
        found = cuts([], cached)
        assert found == alone[-len(found):] and len(found) < len(alone)


def test_replay_takes_every_page_and_computes_a_window():
    """Mode "replay": rows of the last window before the hit run again and write no entry."""
    engine, device = engine_of(prefix_cache="replay")
    records = watch(engine)
    prompt = text_of(100)
    serve(engine, prompt)
    before = len(device.steps)
    out, hit = serve(engine, prompt)
    assert hit == 96 and out.token_ids == expected_tokens(prompt, 4)
    assert rows_of(records, out.request_id)[:2] == [(88, 96), (96, 100)]
    inputs = device.steps[before][1]
    assert inputs["entry_positions"].tolist() == [-1] * 8
    assert inputs["group_rows"].shape == (0,)
    assert inputs["spans"].tolist()[0][3] == inputs["kept_spans"].tolist()[0][3] == 88


def test_off_finds_nothing():
    engine, _ = engine_of(prefix_cache="off")
    assert [serve(engine, text_of(50))[1] for _ in range(2)] == [0, 0]
    assert engine.stats().cached_pages == 0
    with pytest.raises(RequestError, match="prefix_cache is 'on', expected one of"):
        engine_of(prefix_cache="on")


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_a_pool_that_is_too_small_for_what_is_cached(mode):
    """Cached pages give way; nobody gets a page that another one reads."""
    engine, _ = engine_of(prefix_cache=mode, num_pages=26, snapshot_interval=1)
    prompts = [text_of(40 + 17 * n, n % 3) for n in range(8)]
    names = [engine.add_request(p, SamplingParams(max_tokens=6, **GREEDY)) for p in prompts * 2]
    done = drain(engine)
    for name, prompt in zip(names, prompts * 2, strict=True):
        assert done[name].token_ids == expected_tokens(prompt, 6)
    stats = engine.stats()
    assert stats.hit_tokens > 0 and stats.cached_pages <= 26
    require_all_free(engine)


def test_prefixes_outlive_the_engine(tiny, tmp_path):
    """A directory of pages and snapshots: found by an engine of the same model and settings; a
    damaged entry is a miss."""
    prompt = text_of(50)
    given = {"cache_dir": tmp_path, "model": tiny, "text": TEXT}
    first, _ = engine_of(**given)
    assert serve(first, prompt)[1] == 0
    first.close()
    second, _ = engine_of(**given)
    out, hit = serve(second, prompt)
    assert hit == 48 and out.token_ids == expected_tokens(prompt, 4)
    for settings in ({"replay": "mask"}, {"prefix_cache": "replay"}, {"draft": "off"}):
        other, _ = engine_of(**given, **settings)
        out, hit = serve(other, prompt[:49])
        assert hit == 0 and out.token_ids == expected_tokens(prompt[:49], 4), settings
    for file in [f for f in tmp_path.rglob("*") if f.is_file() and f.stat().st_size > 100]:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    third, _ = engine_of(**given)
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        out, hit = serve(third, prompt)
    assert hit == 0 and out.token_ids == expected_tokens(prompt, 4)
