"""Drives an engine step by step: prompts in, then steps of decode that are timed one by one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from deepinfer.llm import LLM
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.stats import StepRecord


def prompt_ids(llm: LLM, count: int, seed: int = 0) -> list[int]:
    """Random tokens, special ones left out."""
    size = int(llm.program.manifest["facts"]["vocab_size"])
    return np.random.default_rng(seed).integers(3, size, count).tolist()


def prefill_seconds(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """From adding the prompts to one token of each."""
    begin = time.perf_counter()
    llm.generate([list(p) for p in prompts],
                 SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - begin


class Decoding:
    """Requests of an engine that decode greedily, in lockstep, without drafts.

    Args:
        llm: with ``draft="off"``. prompts: of the requests; all of them fit the engine at once.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]]) -> None:
        self.engine = llm.engine
        most = self.engine.max_model_len - max(map(len, prompts))
        params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
        self.ids = [self.engine.add_request(p, params) for p in prompts]
        self.tokens: dict[str, list[int]] = {}
        self.context = max(map(len, prompts))
        while len(self.tokens) < len(prompts):
            self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            assert output.error is None, output.error
            self.tokens[output.request_id] = list(output.token_ids)

    def run(self, count: int) -> list[float]:
        """Seconds of each of so many steps, every one a decode step of all requests."""
        took, phases = [], set[tuple[str, int]]()
        before, self.engine.on_step = self.engine.on_step, lambda r: (
            phases.add((r.phase, len(r.rows))), before and before(r))
        try:
            for _ in range(count):
                begin = time.perf_counter()
                self._step()
                took.append(time.perf_counter() - begin)
        finally:
            self.engine.on_step = before
        assert phases == {("decode", len(self.ids))}, phases
        self.context += count
        return took

    def experts(self, count: int) -> dict[str, float]:
        """Mean number of distinct experts that a step meets, by layer ("layers.3.ffn"), over so
        many steps."""
        met: dict[str, list[int]] = defaultdict(list)
        phase = self.engine.program.phases["decode"]
        names = tuple(v.name for v in phase.values if v.kind == "temp" and v.dtype == "i32"
                      and v.name.endswith("route.idx"))
        assert names, "no value of the decode phase is called '...route.idx': what picks experts?"

        def look(record: StepRecord) -> None:
            for name in names:
                met[name.removesuffix(".route.idx")].append(len(np.unique(record.outputs[name])))

        self.engine.trace, self.engine.on_step = names, look
        try:
            self.run(count)
        finally:
            self.engine.trace, self.engine.on_step = (), None
        return {name: float(np.mean(counts)) for name, counts in met.items()}

    def close(self) -> None:
        for request_id in self.ids:
            self.engine.abort(request_id)


class _Timed:
    """An entry point of a Program that adds up the time that it takes."""

    def __init__(self, entry: Callable[..., Any]) -> None:
        self._entry, self.seconds = entry, 0.0

    def __call__(self, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._entry(*args)
        finally:
            self.seconds += time.perf_counter() - begin


@contextmanager
def native_seconds(llm: LLM) -> Iterator[Callable[[], float]]:
    """While it is open, seconds spent inside native calls so far."""
    device: Any = llm.engine.device
    entries = device._entries
    timed = device._entries = {name: _Timed(entry) for name, entry in entries.items()}
    try:
        yield lambda: sum(entry.seconds for entry in timed.values())
    finally:
        device._entries = entries
