"""A device without a model: it keeps tokens in pages and rings, and checks every input of a step.

The next token of a request is a function of its whole history, which the device reads back from the
pages that the inputs name; rings and the draft's rings must hold the window before every row. A
wrong page, slot, span, position, mask or hidden row shows as a wrong token or a failed check.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from deepinfer.compiler import build_graphs
from deepinfer.graph.facts import facts
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.ir.graph import Graph
from deepinfer.ir.types import Sym
from deepinfer.program import Phase, Program, ValueInfo
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.state import StateSizes
from tests.runtime.fake_rings import NOTHING, Pending, Rings
from tests.runtime.fake_sampler import Choose, History, by_hash, logits_of, setting_of

__all__ = ["Choose", "FakeDevice", "History", "by_hash", "expected_tokens", "fake_engine",
           "fake_program"]

Array = np.ndarray[Any, Any]


def _phase(graph: Graph) -> Phase:
    values = tuple(ValueInfo(v.name, v.kind.value, v.type.dtype.name, tuple(
        (d.name, d.times) if isinstance(d, Sym) else d for d in v.type.shape), 0)
        for v in graph.values())
    return Phase(graph.name, values, (), tuple(v.name for v in graph.outputs), 0, 0, ())


def fake_program(page_size: int = 8, max_model_len: int = 64) -> Program:
    """A Program of the tiny model that declares everything and holds no code."""
    cfg = tiny_config()
    limits = Limits.for_model(cfg, page_size=page_size, max_model_len=max_model_len)
    graphs = build_graphs(cfg, limits)
    phases = {name: _phase(graph) for name, graph in graphs.items()}
    manifest = {"facts": facts(cfg, limits, graphs), "model": cfg.to_json(), "target": "fake"}
    return Program(Path("fake"), manifest, phases)


class FakeDevice:
    """Args:
        choose: the likeliest token after a history; penalties, masks and noise apply as well.
        nan: histories whose logits hold a NaN.
        draft: the drafts after a history; default: the right ones, each 4th by hash wrong.

    Attributes:
        steps: (phase, inputs) of every call. kept: positions whose rows passed the cut, in all.
        most_rows: of a target step; more fail.
    """

    def __init__(self, program: Program, sizes: StateSizes, choose: Choose = by_hash,
                 nan: Callable[[History], bool] = lambda history: False,
                 draft: Callable[[History], Sequence[int]] | None = None) -> None:
        self.program, self.choose, self.nan = program, choose, nan
        self.facts = program.manifest["facts"]
        self.draft = draft
        self.pages = np.full((sizes.num_pages, sizes.page_size), NOTHING)
        made = (sizes.num_slots, self.facts["ring"], self.facts["window"])
        self.rings = {part: Rings(*made) for part in ("encoder", "decoder", "draft")}
        self.pending = Pending(sizes.num_slots, self.facts["draft_width"] // 2 + 1)
        self.histories: dict[int, History] = {}  # of each slot, after its last step
        self.steps: list[tuple[str, dict[str, Array]]] = []
        self.kept, self.most_rows = 0, 10**6
        self.closed = False

    @property
    def calls(self) -> int:
        """Of the target."""
        return sum(phase != "draft" for phase, _ in self.steps)

    def _mostly_right(self, history: History, d: int, inputs: Mapping[str, Array]) -> list[int]:
        made: list[int] = []
        for k in range(self.facts["block"]):
            past = (*history, *made)
            setting = setting_of(inputs, d, made, int(inputs[f"mask_row.{k}"][d]))
            token = setting.choose(past, self.choose)
            wrong = zlib.crc32(np.array((*past, 5), np.int32).tobytes()) % 4 == 0
            made.append(3 + (token + 1) % 256 if wrong else token)
        return made

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]:
        phase = self.program.phases[phase_name]
        self.steps.append((phase_name, {k: v.copy() for k, v in inputs.items()}))
        self._check_types(phase, inputs)
        if phase_name == "draft":
            return self._draft(inputs, trace)
        return self._target(phase, inputs, trace)

    def _target(self, phase: Phase, inputs: Mapping[str, Array], trace: Iterable[str]
                ) -> dict[str, Array]:
        histories: list[History] = []
        groups = []
        assert len(inputs["tokens"]) <= self.most_rows
        for r, (slot, first, end, floor) in enumerate(inputs["spans"].tolist()):
            rows = slice(first, end)
            assert (inputs["request"][rows] == r).all() and end > first
            positions, tokens = inputs["positions"][rows], inputs["tokens"][rows].tolist()
            assert (np.diff(positions) == 1).all()
            start = int(positions[0])
            written = self._write_entries(r, first, positions.tolist(), tokens, inputs)
            groups += [(row, p - 1, r) for row, p in written if p % 2]
            paged = self.pages[inputs["pages"][r]].reshape(-1)[:start + len(tokens)]
            assert (paged != NOTHING).all() and paged[start:].tolist() == tokens
            self.rings["encoder"].require(slot, start, floor, paged.tolist())
            self.rings["encoder"].write(slot, start, tokens)
            for _, p in written:
                if p % 2 and p == start:  # the first half was a row of an earlier step
                    self.pending.require(slot, p - 1, paged.tolist())
            self.pending.write(slot, start, tokens)
            self._decoder_rows(phase, r, start, paged.tolist(), inputs)
            histories += [tuple(paged[:p + 1].tolist()) for p in positions]
            self.histories[slot] = histories[-1]
        assert sum(s[2] - s[1] for s in inputs["spans"]) == len(inputs["tokens"])
        got = zip(*(inputs[f"group_{n}"].tolist() for n in ("rows", "positions", "request")),
                  strict=True)
        assert list(got) == groups
        for history, back in zip(histories, inputs["lookback"].tolist(), strict=True):
            assert back == [*history[::-1][:len(back)], *[-1] * (len(back) - len(history))]
        kept = inputs.get("kept_rows", np.arange(len(histories)))
        past = [histories[i] for i in kept]
        self.kept += len(past)
        picked = inputs.get("sample_rows", np.arange(len(past)))
        return self._outputs(phase, past, [past[i] for i in picked], inputs, trace)

    def _write_entries(self, r: int, first: int, positions: Sequence[int], tokens: Sequence[int],
                       inputs: Mapping[str, Array]) -> list[tuple[int, int]]:
        """Rows into their pages; returns (row, position) of those that are not cached already."""
        written = []
        size = self.pages.shape[1]
        for row, position in enumerate(positions, first):
            entry = inputs["entry_positions"][row]
            assert entry in (position, -1)
            if entry >= 0:
                page = inputs["pages"][r][position // size]
                self.pages[page, position % size] = tokens[row - first]
                written.append((row, position))
        return written

    def _decoder_rows(self, phase: Phase, r: int, start: int, history: list[int],
                      inputs: Mapping[str, Array]) -> None:
        """The layers after the cut run on the kept rows and see nothing below their floor."""
        if phase.name == "prefill":
            slot, first, end, floor = inputs["kept_spans"][r].tolist()
            assert (inputs["kept_request"][first:end] == r).all()
            assert (inputs["kept_positions"] == inputs["positions"][inputs["kept_rows"]]).all()
            if first == end:
                return
            start = int(inputs["kept_positions"][first])
        else:
            slot, _, _, floor = inputs["spans"][r].tolist()
        if start >= floor:
            self.rings["decoder"].require(slot, start, floor, history)
        self.rings["decoder"].write(slot, start, history[start:])

    def _draft(self, inputs: Mapping[str, Array], trace: Iterable[str]) -> dict[str, Array]:
        """Context rows carry (position, token) in their hidden row; rings must be complete."""
        names = self.facts["outputs"]["draft"]
        for r, (slot, first, end, _) in enumerate(inputs["spans"].tolist()):
            assert (inputs["request"][first:end] == r).all() and end > first
            rows = inputs["hidden"][first:end, :4].astype(np.int64)
            positions = rows[:, 0] * 128 + rows[:, 1]
            assert positions.tolist() == inputs["positions"][first:end].tolist()
            self.rings["draft"].write(slot, int(positions[0]),
                                      (rows[:, 2] * 128 + rows[:, 3]).tolist())
        block = self.facts["block"]
        drafts = []
        for d, (slot, first, end, _) in enumerate(inputs["block_spans"].tolist()):
            assert (first, end) == (d * block, (d + 1) * block)
            anchor, at = int(inputs["anchor"][d]), int(inputs["block_positions"][first])
            assert inputs["block_tokens"][first:end].tolist() == [
                anchor, *[self.facts["noise_token"]] * (block - 1)]
            history = self.histories[slot][:at]
            assert len(history) == at
            self.rings["draft"].require(slot, at, max(0, at - self.facts["window"]), history)
            assert [int(inputs[f"sample_position.{k}"][d]) for k in range(block)] == list(
                range(at + 1, at + 1 + block))
            past = (*history, anchor)
            drafts.append(list(self.draft(past) if self.draft is not None else
                               self._mostly_right(past, d, inputs)))
        tokens = np.array(drafts, np.int32).reshape(-1, block)
        out = {name: tokens[:, k] for k, name in enumerate(names["tokens"])}
        out |= {name: np.full(len(tokens), 0.9 - 0.1 * k, np.float32)
                for k, name in enumerate(names["confidences"])}
        for name in trace:
            k = int(name.split(".")[1])
            out[name] = np.full((len(tokens), self.facts["vocab_size"]), -np.inf, np.float32)
            out[name][np.arange(len(tokens)), tokens[:, k]] = 0
        return out

    def _check_types(self, phase: Phase, inputs: Mapping[str, Array]) -> None:
        declared = {v.name: v for v in phase.values if v.kind == "input"}
        assert inputs.keys() == declared.keys()
        names = {"i32": "int32", "f32": "float32", "u64": "uint64", "u8": "uint8",
                 "bf16": "bfloat16"}
        sizes: dict[str, int] = {}
        for name, v in declared.items():
            array = inputs[name]
            assert array.dtype == names[v.dtype] and array.flags.c_contiguous, name
            assert array.ndim == len(v.shape), name
            for have, want in zip(array.shape, v.shape, strict=True):
                if isinstance(want, int):
                    assert have == want, (name, array.shape)
                else:
                    assert have == sizes.setdefault(want[0], have // want[1]) * want[1], name

    def _outputs(self, phase: Phase, past: list[History], histories: list[History],
                 inputs: Mapping[str, Any], trace: Iterable[str]) -> dict[str, Array]:
        assert inputs["sample_position"].tolist() == [len(h) for h in histories]
        settings = [setting_of(inputs, q, [t for t in recent if t >= 0], mask)
                    for q, (recent, mask) in enumerate(zip(
                        inputs["recent"].tolist(), inputs["mask_row"].tolist(), strict=True))]
        forced = inputs["forced"].tolist()
        tokens = np.array([f if f >= 0 else s.choose(h, self.choose)
                           for f, s, h in zip(forced, settings, histories, strict=True)], np.int32)
        chosen = np.array([np.nan if self.nan(h) else -len(h) for h in histories], np.float32)
        k = 20
        top_ids = (tokens[:, None] + np.arange(k, dtype=np.int32)) % 512
        top = (chosen[:, None] - np.arange(k)).astype(np.float32)
        hidden = next(v for v in phase.values if v.name == phase.outputs[4])
        rows = np.zeros((len(past), int(str(hidden.shape[1]))), np.float32)
        for row, h in zip(rows, past, strict=True):
            row[:4] = [(len(h) - 1) // 128, (len(h) - 1) % 128, h[-1] // 128, h[-1] % 128]
        out = dict(zip(phase.outputs, (tokens, chosen, top_ids, top, rows.astype(bfloat16)),
                       strict=True))
        for name in trace:
            rows = ([s.logits(h, self.choose) for s, h in zip(settings, histories, strict=True)]
                    if name == "head.adjusted" else [logits_of(h) for h in histories])
            out[name] = np.array(rows, np.float32).reshape(-1, self.facts["vocab_size"])
        return out

    def _part(self, name: str) -> Rings:
        part = next(s["part"] for s in self.facts["state"] if s["name"] == name)
        return self.rings[part]

    def read_slot(self, slot: int, names: Iterable[str]) -> dict[str, Array]:
        return {name: self._part(name).data[slot].copy() for name in names}

    def write_slot(self, slot: int, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            self._part(name).data[slot] = array

    def read_pages(self, page_ids: Sequence[int]) -> dict[str, Array]:
        return {"pages": self.pages[list(page_ids)]}

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, Array]) -> None:
        self.pages[list(page_ids)] = arrays["pages"]

    def close(self) -> None:
        self.closed = True


def fake_engine(program: Program, *, max_num_seqs: int = 4, max_num_batched_tokens: int = 40,
                max_model_len: int = 64, num_pages: int | None = None, choose: Choose = by_hash,
                nan: Callable[[History], bool] = lambda history: False,
                drafts: Callable[[History], Sequence[int]] | None = None, **given: Any
                ) -> tuple[Engine, FakeDevice]:
    """An engine on a fake device."""
    interval = given.get("snapshot_interval", 8)
    sizes = StateSizes.plan(program, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
                            snapshot_interval=interval)
    if num_pages is not None:
        sizes = StateSizes(sizes.num_slots, num_pages, sizes.pages_per_seq, sizes.page_size,
                           sizes.snapshot_bytes)
    device = FakeDevice(program, sizes, choose, nan, drafts)
    device.most_rows = max_num_batched_tokens
    engine = Engine(program, device, sizes, max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=max_model_len, **given)
    return engine, device


def expected_tokens(prompt: list[int], count: int, choose: Choose = by_hash) -> list[int]:
    """What the fake device makes a request generate, computed from the prompt alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose(tuple(tokens)))
    return tokens[len(prompt):]
