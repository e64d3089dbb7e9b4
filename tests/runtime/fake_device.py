"""A device without a model: it keeps tokens in pages and rings, and checks every input of a step.

The next token of a request is a function of its whole history, which the device reads back from the
pages and slots that the inputs name. A wrong page, slot, span or position shows as a wrong token or
as a failed check.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.compiler import build_graphs, facts
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.ir.graph import Graph
from deepinfer.ir.types import Sym
from deepinfer.program import Phase, Program, ValueInfo
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.pages import StateSizes

NOTHING = -7
History = tuple[int, ...]


def by_hash(history: History) -> int:
    """A token 3..258 (a byte) that depends on every earlier one."""
    return 3 + zlib.crc32(np.array(history, np.int32).tobytes()) % 256


def _phase(graph: Graph) -> Phase:
    values = tuple(ValueInfo(v.name, v.kind.value, v.type.dtype.name, tuple(
        (d.name, d.times) if isinstance(d, Sym) else d for d in v.type.shape), 0)
        for v in graph.values())
    return Phase(graph.name, values, (), tuple(v.name for v in graph.outputs), 0, 0, ())


def fake_program(page_size: int = 8, max_model_len: int = 64) -> Program:
    """A Program of the tiny model that declares everything and holds no code."""
    cfg = tiny_config()
    limits = Limits.for_model(cfg, page_size=page_size, max_model_len=max_model_len)
    phases = {name: _phase(graph) for name, graph in build_graphs(cfg, limits).items()}
    manifest = {"facts": facts(cfg, limits), "model": cfg.to_json(), "target": "fake"}
    return Program(Path("fake"), manifest, phases)


class FakeDevice:
    """Args: choose: the next token after a history. nan: histories whose logits hold a NaN."""

    def __init__(self, program: Program, sizes: StateSizes,
                 choose: Callable[[History], int] = by_hash,
                 nan: Callable[[History], bool] = lambda history: False) -> None:
        self.program, self.choose, self.nan = program, choose, nan
        self.pages = np.full((sizes.num_pages, sizes.page_size), NOTHING)
        self.slots = np.full((sizes.num_slots, sizes.pages_per_seq * sizes.page_size), NOTHING)
        self.steps: list[tuple[str, dict[str, np.ndarray[Any, Any]]]] = []
        self.closed = False

    @property
    def calls(self) -> int:
        return len(self.steps)

    def run(self, phase_name: str, inputs: Mapping[str, np.ndarray[Any, Any]], *,
            trace: Iterable[str] = ()) -> dict[str, np.ndarray[Any, Any]]:
        self.steps.append((phase_name, dict(inputs)))
        phase = self.program.phases[phase_name]
        self._check_types(phase, inputs)
        histories: list[History] = []
        groups = []
        for r, (slot, first, end) in enumerate(inputs["spans"]):
            rows = slice(first, end)
            assert (inputs["request"][rows] == r).all() and end > first
            positions, tokens = inputs["positions"][rows], inputs["tokens"][rows]
            assert (np.diff(positions) == 1).all()
            for row, (position, token) in enumerate(zip(positions, tokens, strict=True), first):
                page = inputs["pages"][r][position // self.pages.shape[1]]
                self.pages[page, position % self.pages.shape[1]] = token
                self.slots[slot, position] = token
                if position % 2:
                    groups.append((row, position - 1, r))
            last = int(positions[-1])
            paged = self.pages[inputs["pages"][r]].reshape(-1)[:last + 1]
            assert (paged == self.slots[slot, :last + 1]).all() and (paged != NOTHING).all()
            histories += [tuple(paged[:p + 1].tolist()) for p in positions]
        assert sum(end - first for _, first, end in inputs["spans"]) == len(inputs["tokens"])
        got = zip(*(inputs[f"group_{n}"].tolist() for n in ("rows", "positions", "request")),
                  strict=True)
        assert list(got) == groups
        for history, back in zip(histories, inputs["lookback"].tolist(), strict=True):
            assert back == [*history[::-1][:len(back)], *[-1] * (len(back) - len(history))]
        picked = inputs.get("sample_rows", np.arange(len(histories)))
        return self._outputs(phase, [histories[i] for i in picked], inputs, trace)

    def _check_types(self, phase: Phase, inputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
        declared = {v.name: v for v in phase.values if v.kind == "input"}
        assert inputs.keys() == declared.keys()
        names = {"i32": "int32", "f32": "float32", "u64": "uint64", "u8": "uint8"}
        sizes: dict[str, int] = {}
        for name, v in declared.items():
            array = inputs[name]
            assert array.dtype == names[v.dtype] and array.flags.c_contiguous, name
            assert array.ndim == len(v.shape), name
            for have, want in zip(array.shape, v.shape, strict=True):
                size = want if isinstance(want, int) else sizes.setdefault(want[0], have)
                assert have == size, (name, array.shape)

    def _outputs(self, phase: Phase, histories: list[History], inputs: Mapping[str, Any],
                 trace: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        assert inputs["sample_position"].tolist() == [len(h) for h in histories]
        tokens = np.array([self.choose(h) for h in histories], np.int32)
        chosen = np.array([np.nan if self.nan(h) else -len(h) for h in histories], np.float32)
        k = 20
        top_ids = (tokens[:, None] + np.arange(k, dtype=np.int32)) % 512
        top = (chosen[:, None] - np.arange(k)).astype(np.float32)
        out = dict(zip(phase.outputs, (tokens, chosen, top_ids, top), strict=False))
        if "head.logits" in trace:
            out["head.logits"] = np.array([[by_hash((*h, i)) for i in range(512)]
                                           for h in histories], np.float32).reshape(-1, 512)
        return out

    def close(self) -> None:
        self.closed = True


def fake_engine(program: Program, *, max_num_seqs: int = 4, max_num_batched_tokens: int = 16,
                max_model_len: int = 64, num_pages: int | None = None,
                choose: Callable[[History], int] = by_hash,
                nan: Callable[[History], bool] = lambda history: False, **given: Any
                ) -> tuple[Engine, FakeDevice]:
    """An engine on a fake device."""
    sizes = StateSizes.plan(program, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    if num_pages is not None:
        sizes = StateSizes(sizes.num_slots, num_pages, sizes.pages_per_seq, sizes.page_size)
    device = FakeDevice(program, sizes, choose, nan)
    engine = Engine(program, device, sizes, max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=max_model_len, **given)
    return engine, device


def expected_tokens(prompt: list[int], count: int,
                    choose: Callable[[History], int] = by_hash) -> list[int]:
    """What the fake device makes a request generate, computed from the prompt alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose(tuple(tokens)))
    return tokens[len(prompt):]
