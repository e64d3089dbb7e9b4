"""The front door on a compiled tiny model: equal bits whatever happens around a request."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import deepinfer
from deepinfer import LLM, AsyncEngine, SamplingParams
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.errors import ProgramError, RequestError, TargetError
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.weights import load_weights

# 7 windows, 4 pages, and more positions than the candidate blocks hold.
IDS = np.random.default_rng(0).integers(3, 500, 60).tolist()


@pytest.fixture(scope="module")
def llm(tiny, compiled) -> Iterator[LLM]:
    with LLM(tiny, program=compiled, num_threads=2, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def logits(llm) -> np.ndarray:
    return llm.score(IDS)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def test_logits_are_alive(logits):
    assert logits.shape == (60, 512) and logits.dtype == np.float32 and np.isfinite(logits).all()
    assert len({row.tobytes() for row in logits}) == 60


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 16, 33, 59])
def test_any_chunking(llm, logits, chunk):
    calls = llm.engine.device.calls
    assert same(llm.score(IDS, chunk), logits)
    assert llm.engine.device.calls - calls == -(-60 // chunk)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(tiny, compiled, logits, threads):
    with LLM(tiny, program=compiled, num_threads=threads) as other:
        assert other.engine.device.num_threads == threads
        assert same(other.score(IDS, 13), logits)


def test_nothing_unwritten_is_read(tiny, compiled, llm, logits):
    """State and buffers full of NaN patterns give the same bits."""
    sizes = llm.engine.sizes
    device = CpuDevice(compiled, load_weights(compiled.manifest["weights"], tiny),
                       sizes.for_device(), num_threads=2, poison=True)
    engine = Engine(compiled, device, sizes, max_num_batched_tokens=64)
    assert same(engine.score(IDS, 11), logits)
    engine.close()


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts around the edges (1, ratio, window, page), greedy and sampled."""
    made = []
    for i, n in enumerate((1, 2, 3, 7, 8, 9, 16, 17, 40, 60)):
        greedy = i % 3 == 0
        made.append((IDS[60 - n:], SamplingParams(
            max_tokens=5 + i, temperature=0 if greedy else 0.9, top_k=40 * (i % 2), seed=i,
            top_p=0.95, min_p=0.01, logprobs=3, ignore_eos=True)))
    return made


@pytest.fixture(scope="module")
def solo(llm) -> list:
    return [llm.generate(prompt, params)[0] for prompt, params in requests()]


def comparable(output):
    return dataclasses.replace(output, request_id="")


@pytest.mark.parametrize("chunk", [None, 3])
def test_alone_or_in_a_batch(tiny, compiled, solo, chunk):
    prompts, params = zip(*requests(), strict=True)
    with LLM(tiny, program=compiled, num_threads=1, max_num_seqs=5, prefill_chunk=chunk) as other:
        device, engine = other.engine.device, other.engine
        together = other.generate(list(prompts), list(params))
        assert [comparable(x) for x in together] == [comparable(x) for x in solo]
        backwards = other.generate(list(prompts)[::-1], list(params)[::-1])[::-1]
        assert [comparable(x) for x in backwards] == [comparable(x) for x in solo]
        assert device.calls == 2 * engine.steps  # a step: one native call each of target and draft
        engine.check()
        assert engine.scheduler.pool.free_slots == 5


def test_greedy_tokens_are_the_argmax_of_the_logits(llm, solo):
    for (prompt, params), out in zip(requests(), solo, strict=True):
        assert out.finish_reason == "length" and len(out.token_ids) == params.max_tokens
        if params.temperature == 0:
            rows = llm.score([*prompt, *out.token_ids])[len(prompt) - 1:-1]
            assert rows.argmax(axis=1).tolist() == out.token_ids
            assert [x.top[0][0] for x in out.logprobs] == out.token_ids
            assert [x.chosen for x in out.logprobs] == [x.top[0][1] for x in out.logprobs]


def test_logprobs_are_those_of_the_logits(llm, solo):
    (prompt, _), out = requests()[5], solo[5]
    rows = llm.score([*prompt, *out.token_ids])[len(prompt) - 1:-1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    for row, token, got in zip(rows, out.token_ids, out.logprobs, strict=True):
        assert got.chosen == pytest.approx(row[token], abs=1e-5)
        assert [i for i, _ in got.top] == np.argsort(-row)[:3].tolist()
        assert [x for _, x in got.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-5)


def test_seeds(llm):
    def run(**given):
        return llm.generate(IDS[:9], SamplingParams(max_tokens=12, **given))[0].token_ids

    assert run() == run(seed=0) == run() != run(seed=1)
    assert run(temperature=0, seed=5) == run(temperature=0, seed=6)
    assert run(top_k=1, seed=5) == run(temperature=0)


def test_text(llm):
    out = llm.generate("hello", SamplingParams(max_tokens=8, ignore_eos=True))[0]
    bos = llm.program.manifest["facts"]["bos"]
    assert out.prompt_token_ids[0] == bos and out.prompt_token_ids == llm.encode("hello")
    assert out.text == llm.engine.text.decode(out.token_ids)
    assert llm.generate(out.prompt_token_ids, SamplingParams(max_tokens=8, ignore_eos=True)
                        )[0].token_ids == out.token_ids
    assert same(llm.score("hello"), llm.score(out.prompt_token_ids))


BAD = [
    ([], None, "the prompt is empty"), ("", None, "the prompt is empty"),
    ([512], None, "token id 512 is outside the vocabulary, expected 0..511"),
    ([5] * 256, None, "the prompt has 256 tokens, expected at most 255"),
    ("\ud800", None, "not Unicode"),
    ([5], {"temperature": float("nan")}, "temperature is nan"),
    ([5], {"top_p": 1.5}, "top_p is 1.5, expected a number in (0, 1]"),
    ([5], {"temprature": 1}, "unknown field 'temprature'"),
    ([5], 7, "params is 7"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD, ids=[m for _, _, m in BAD])
def test_one_bad_prompt_raises(llm, prompt, params, message):
    with pytest.raises(RequestError) as caught:
        llm.generate(prompt, params)
    assert message in str(caught.value) and not llm.engine.has_unfinished()


def test_bad_prompts_in_a_list_end_alone(llm):
    good = SamplingParams(max_tokens=4)
    expected = comparable(llm.generate(IDS[:5], good)[0])
    prompts, params = [IDS[:5]], [good]
    for prompt, wanted, _ in BAD:
        prompts += [prompt, IDS[:5]]
        params += [{} if wanted is None else wanted, good]
    got = llm.generate(prompts, params)
    assert all(comparable(x) == expected for x in got[::2])
    for out, (_, _, message) in zip(got[1::2], BAD, strict=True):
        assert out.finish_reason == "error" and message in str(out.error) and out.token_ids == []
    with pytest.raises(RequestError, match="there are 1 params for 2 prompts"):
        llm.generate([[5], [6]], [good])


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.device, "run", lambda *a, **k: (_ for _ in ()).throw(
        KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([IDS, IDS[:3]])
    monkeypatch.undo()
    assert not llm.engine.has_unfinished()
    llm.engine.check()
    assert llm.generate(IDS[:3])[0].finished


def test_what_does_not_fit_the_program(tiny, compiled, tmp_path):
    with pytest.raises(ProgramError, match="max_model_len is 256, max_model_len 300"):
        LLM(tiny, program=compiled, max_model_len=300)
    config = (tiny / "config.json").read_text()
    assert '"sliding_window": 8' in config
    config = config.replace('"sliding_window": 8', '"sliding_window": 9')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ProgramError, match="field model.*sliding_window is 8, expected 9"):
        LLM(tmp_path, program=compiled.path)
    with pytest.raises((ProgramError, TargetError), match="target"):
        LLM(tiny, program=compiled, target="sm100")
    with pytest.raises(RequestError, match="cache_bytes is 10, expected at least"):
        LLM(tiny, program=compiled, cache_bytes=10)


@pytest.mark.parametrize(("setting", "message"), [
    ({"max_num_seqs": 0}, "max_num_seqs is 0, expected an int >= 1"),
    ({"max_num_seqs": True}, "max_num_seqs is True"),
    ({"max_model_len": "9"}, "max_model_len is '9'"),
    ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
    ({"prefill_chunk": 0}, "prefill_chunk is 0"), ({"cache_bytes": 1.5}, "cache_bytes is 1.5"),
    ({"num_threads": 0}, "num_threads is 0"), ({"num_threads": "2"}, "num_threads is '2'"),
    ({"num_threads": 10**9}, "num_threads is 1000000000, expected an int in 1..4096"),
])
def test_settings_that_cannot_be(tiny, compiled, setting, message):
    """With a Program too: no slots, say, would let requests wait for ever."""
    with pytest.raises((RequestError, TargetError), match=message):
        LLM(tiny, program=compiled, **setting)


def test_rows_for_all_requests_are_asked_for_before_compiling(tiny, monkeypatch):
    monkeypatch.setattr("deepinfer.api.load.compile",
                        lambda *args, **named: pytest.fail("compiled"))
    with pytest.raises(RequestError, match="max_num_batched_tokens is 8, expected at least"):
        LLM(tiny, max_num_batched_tokens=8)


def test_threads_of_the_caller_take_turns(llm, logits, solo):
    prompts, params = zip(*requests(), strict=True)
    got = {}

    def call(i: int) -> None:
        got[i] = [llm.generate(list(prompts), list(params)), llm.score(IDS)]

    callers = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert len(got) == 3
    for outputs, scored in got.values():
        assert [comparable(x) for x in outputs] == [comparable(x) for x in solo]
        assert same(scored, logits)


def test_a_fork_computes_on(llm, logits):
    """The pool's threads stay with the parent: the child needs its own, and must not wait for the
    parent's when it closes."""
    assert llm.engine.device.num_threads == 2
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs is killed, and seen
        right = same(llm.score(IDS), logits)
        llm.engine.device.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same(llm.score(IDS), logits)


def test_a_request_of_the_engine_does_not_end_anothers_call(llm):
    alone = llm.generate([IDS[:5], IDS[:9]], SamplingParams(max_tokens=6, ignore_eos=True))
    llm.engine.add_request(IDS[:3], SamplingParams(max_tokens=2, ignore_eos=True))
    both = llm.generate([IDS[:5], IDS[:9]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [x.token_ids for x in both] == [x.token_ids for x in alone]
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("chunk", [0, -1, True, 1.5, "2", 10**9])
def test_bad_chunks(llm, chunk):
    with pytest.raises(RequestError, match="chunk is"):
        llm.score(IDS, chunk)


def test_a_number_is_no_prompt(llm):
    with pytest.raises(RequestError, match="expected a text or a list of token ids"):
        llm.generate(np.array(5))


def test_few_pages_make_requests_wait_and_change_nothing(tiny, compiled, llm, solo):
    from deepinfer.runtime.pages import bytes_per_page

    prompts, params = zip(*requests(), strict=True)
    with LLM(tiny, program=compiled, max_model_len=96, prefix_cache="off",
             cache_bytes=7 * bytes_per_page(compiled)) as other:
        assert other.engine.sizes.num_pages == 7
        got = other.generate(list(prompts), list(params))
    assert [comparable(x) for x in got] == [comparable(x) for x in solo]


def test_a_stream_joins_to_what_generate_gives(llm):
    params = SamplingParams(max_tokens=24, seed=3, logprobs=2, ignore_eos=True, stop="zz")
    whole = llm.generate("Once upon", params)[0]
    deltas = list(llm.stream("Once upon", params))
    assert len(deltas) > 1 and "".join(d.text for d in deltas) == whole.text
    assert sum((d.token_ids for d in deltas), []) == whole.token_ids
    assert sum((d.logprobs for d in deltas), []) == whole.logprobs
    with llm.stream("Once upon", params) as left:
        next(left)
    assert not llm.engine.has_unfinished()
    llm.engine.check()


def test_completions_equal_runs_with_their_seeds(llm):
    """Case B5."""
    params = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    [output] = llm.generate([IDS[:9]], params)
    for i, child in enumerate(output.outputs):
        alone = llm.generate(IDS[:9], params.child(i))[0]
        assert child.index == i and child.token_ids == alone.token_ids
    assert len({tuple(child.token_ids) for child in output.outputs}) == 3


def test_async_outputs_equal_those_of_generate(llm, solo):
    async def main() -> list:
        async def last(prompt, params):
            return [output async for output in engine.add_request(prompt, params)][-1]

        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(*(last(*request) for request in requests()))

    assert [comparable(x) for x in asyncio.run(main())] == [comparable(x) for x in solo]
    assert not llm.engine.has_unfinished()


def test_chat_gives_the_same_answer_whole_and_streamed(llm):
    messages, params = [{"role": "user", "content": "Hi"}], {"max_tokens": 12, "temperature": 0}
    answer = llm.chat(messages, params, thinking=False)
    assert answer.reasoning is None and answer.raw.usage.completion_tokens <= 12
    stream = llm.stream_chat(messages, params, thinking=False)
    assert "".join(delta.content for delta in stream) == answer.content
    assert comparable(stream.answer.raw) == comparable(answer.raw)
    longer = [*messages, answer.message, {"role": "user", "content": "And?"}]
    assert llm.chat(longer, params, thinking=False).raw.usage.prompt_tokens > (
        answer.raw.usage.prompt_tokens)


def test_the_engine_knows_its_weights(tiny, llm):
    with CheckpointReader(tiny) as reader:
        assert llm.engine.fingerprint == reader.fingerprint()


def test_public_names():
    assert deepinfer.LLM is LLM and deepinfer.Engine is Engine
    assert deepinfer.AsyncEngine is AsyncEngine and deepinfer.SamplingParams is SamplingParams
    names = {"LLM", "AsyncEngine", "ChatOutput", "Engine", "Program", "RequestOutput",
             "SamplingParams", "compile"}
    assert names == set(deepinfer.__all__) <= set(dir(deepinfer))
    assert all(getattr(deepinfer, name).__name__ == name for name in names)
    assert callable(deepinfer.compile) and "deepinfer.compiler" in sys.modules
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = deepinfer.Nothing
