"""What tests of the engine share: running it dry, and a request's result when it runs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.program import Program
from deepinfer.runtime.engine import Engine, StepRecord
from deepinfer.runtime.request import RequestOutput, SamplingParams
from tests.runtime.fake_device import fake_engine
from tests.runtime.fake_grammar import with_fake_grammars

GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
STEPWISE: dict[str, Any] = {"draft": "off", "overlap": False}  # a token a step, handed out at once
PLAIN: dict[str, Any] = {**STEPWISE, "prefix_cache": "off"}


def drain(engine: Engine, most: int = 1000) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking the state after every step; what finished, by id."""
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        collect(engine, done)
        most -= 1
        assert most, f"never finish: {[r.request_id for r in engine.scheduler.requests]}"
    return done


def collect(engine: Engine, done: dict[str, RequestOutput]) -> list[RequestOutput]:
    """One step; adds what finished, each once. Returns all outputs."""
    outputs = engine.step()
    engine.check()
    for out in outputs:
        if out.finished:
            assert out.request_id not in done
            done[out.request_id] = out
    return outputs


def watch(engine: Engine) -> list[StepRecord]:
    """The records of all later steps."""
    records: list[StepRecord] = []
    engine.on_step = records.append
    return records


def rows_of(records: Sequence[StepRecord], request_id: str) -> list[tuple[int, int]]:
    """Positions [start, end) that a request had rows at, by step."""
    return [(row.start, row.end) for record in records for row in record.rows
            if row.request_id == request_id]


def solo(program: Program, prompt: list[int], params: SamplingParams, **given: Any
         ) -> RequestOutput:
    """The request alone in a new engine, without drafts, overlap and prefix cache."""
    engine, _ = fake_engine(program, **{**PLAIN, **given})
    with_fake_grammars(engine)
    name = engine.add_request(prompt, params)
    return drain(engine)[name]


def outcome(out: RequestOutput) -> Mapping[str, Any]:
    """All that a caller gets and that must not depend on what else the engine did."""
    error = None if out.error is None else out.error.what
    return {"tokens": out.token_ids, "text": out.text, "reason": out.finish_reason,
            "stop": out.stop_reason, "usage": out.usage, "logprobs": out.logprobs,
            "prompt_logprobs": out.prompt_logprobs, "error": error}


def require_all_free(engine: Engine) -> None:
    """Everything is back: no request, all slots, all pages free or cached."""
    stats = engine.stats()
    assert (stats.running, stats.unfinished) == (0, 0)
    assert stats.free_pages == engine.pool.num_pages
    assert stats.free_slots == engine.sizes.num_slots
