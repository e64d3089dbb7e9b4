"""A device without arithmetic: its logits are a hash of a request's history, read from its state.

It keeps codes of tokens where a model keeps keys and values: in every window ring, in the pending
half of a group, in pages. A wrong slot, page, floor, restore or roll-back changes the hash. What
follows the logits (penalties, masks, noise, logprobs) are the project's own references.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer.ir import Graph
from deepinfer.ir.types import Kind
from deepinfer.runtime.devices.state import StateAccess

Array = np.ndarray[Any, Any]
NAN = 2**32 - 1  # the code of a token whose rows are NaN


class HashDevice(StateAccess):
    """Args:
        graphs: source graphs by phase. facts: of their Program. sizes: of state, by symbol.
        nan_token: whose rows are NaN. threads, isa: reported, as a real device does.
    """

    def __init__(self, graphs: Mapping[str, Graph], facts: Mapping[str, Any],
                 sizes: Mapping[str, int], *, nan_token: int | None, threads: int, isa: str
                 ) -> None:
        self.graphs, self.facts, self.nan_token = graphs, facts, nan_token
        self.num_threads, self.isa = threads, isa
        values = {v.name: v for g in graphs.values() for v in g.of_kind(Kind.STATE)}
        self.state = {n: np.zeros(v.type.storage(sizes), v.type.dtype.numpy)
                      for n, v in values.items()}
        self.paged = tuple(s["name"] for s in facts["state"] if s["kind"] == "paged")
        self.pages = {n: self.state[n] for n in self.paged if n.endswith(".kv")}
        self.attention = {node.loc.split(".")[1]: node.outputs[0].name
                          for node in graphs["prefill"].nodes
                          if node.op.name in ("window_attention", "sparse_attention")}

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Iterable[str] = ()
            ) -> dict[str, Array]:
        if phase_name == "draft":
            return self._draft(inputs)
        self._layers: dict[str, list[int]] = {}
        digests = [self._row(inputs, row) for row in range(len(inputs["tokens"]))]
        kept = inputs.get("kept_rows", np.arange(len(digests)))
        picked = kept[inputs["sample_rows"]] if "sample_rows" in inputs else kept
        vocab = int(self.facts["vocab_size"])
        logits = np.array([_numbers(digests[row], vocab) for row in picked], np.float32)
        env = {**inputs, self.facts["values"]["logits"]: logits.reshape(-1, vocab)}
        graph = self.graphs[phase_name]
        for node in graph.nodes:
            if node.loc == "head" and all(v.name in env for v in node.inputs):
                with np.errstate(invalid="ignore"):
                    got = node.op.run(tuple(env[v.name] for v in node.inputs), node.attrs)
                env.update(zip((v.name for v in node.outputs), got, strict=True))
        hidden = self.facts["outputs"][phase_name]["hidden"]
        width = next(v for v in graph.outputs if v.name == hidden).type.shape[1]
        env[hidden] = np.zeros((len(kept), width), ml_dtypes.bfloat16)
        wanted = set(trace)
        for layer, name in self.attention.items():
            if name not in wanted:
                continue
            rows = range(len(digests)) if int(layer) < self.facts["cut"] else kept
            env[name] = np.array([_numbers(self._layers[layer][row], 4) for row in rows],
                                 np.float32).reshape(-1, 4)
        names = {v.name for v in graph.outputs} | wanted
        return {name: env[name] for name in names if name in env}

    def _row(self, inputs: Mapping[str, Array], row: int) -> int:
        """Write the row's code wherever a model would, read back what it attends to."""
        r, position = int(inputs["request"][row]), int(inputs["positions"][row])
        slot, _, _, floor = inputs["spans"][r].tolist()
        token = int(inputs["tokens"][row])
        code = NAN if token == self.nan_token else token + 1
        self._write_entries(inputs, row, slot, position, code)
        entries, bad = self._read_entries(inputs["pages"][r], position)
        kept = "kept_rows" not in inputs or row in inputs["kept_rows"]
        late_floor = int(inputs["kept_spans"][r][3]) if "kept_spans" in inputs else floor
        whole = zlib.crc32(entries)
        for state in self.facts["state"]:
            decoder = state["part"] == "decoder"
            if not state["name"].endswith(".ring") or state["part"] == "draft" or (
                    decoder and not kept):
                continue
            ring = self.state[state["name"]].view(np.uint8)
            _put(ring[slot, position % ring.shape[1]], code)
            low = max(position - self.facts["window"] + 1, late_floor if decoder else floor, 0)
            seen = ring[slot, np.arange(min(low, position), position + 1) % ring.shape[1], :4]
            bad |= (seen == 0xFF).all(axis=1).any()
            whole = zlib.crc32(seen.tobytes(), whole)
            self._layers.setdefault(str(state["layer"]), []).append(-1 if bad else whole)
        if not kept:
            for layer in self.attention:
                if int(layer) >= self.facts["cut"]:
                    self._layers.setdefault(layer, []).append(0)
        return -1 if bad else whole

    def _write_entries(self, inputs: Mapping[str, Array], row: int, slot: int, position: int,
                       code: int) -> None:
        closes = row in inputs["group_rows"]
        page_size = int(self.facts["page_size"])
        page = int(inputs["pages"][inputs["request"][row]][position // page_size])
        for name, pages in self.pages.items():
            ratio = page_size // pages.shape[1]
            pending = self.state.get(name.removesuffix("kv") + "pending")
            if ratio == 1:
                if inputs["entry_positions"][row] >= 0:
                    _put(pages[page, position % page_size], code)
                continue
            assert pending is not None
            half = pending.view(np.uint8)[slot, (position // 2) % pending.shape[1], 0]
            if position % 2 == 0:
                _put(half, code)
            elif closes:
                first = int.from_bytes(half[:4].tobytes(), "little")
                both = NAN if NAN in (first, code) else zlib.crc32(f"{first} {code}".encode())
                _put(pages[page, position % page_size // 2], both)

    def _read_entries(self, table: Array, position: int) -> tuple[bytes, bool]:
        read, bad = b"", False
        page_size = int(self.facts["page_size"])
        for pages in self.pages.values():
            count = (position + 1) * pages.shape[1] // page_size
            seen = pages[table].reshape(-1, pages.shape[2])[:count, :4]
            bad |= bool((seen == 0xFF).all(axis=1).any())
            read += seen.tobytes()
        return read, bad

    def _draft(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Tokens that depend on the anchor; right by chance only."""
        roles, anchor = self.facts["outputs"]["draft"], inputs["anchor"]
        vocab = int(self.facts["vocab_size"])
        out = {name: ((anchor * 7 + k * 13) % vocab).astype(np.int32)
               for k, name in enumerate(roles["tokens"])}
        return out | {name: np.full(len(anchor), 0.6, np.float32) for name in roles["confidences"]}

    def close(self) -> None:
        """Nothing to release."""


def _put(cell: Array, code: int) -> None:
    cell[:4] = np.frombuffer(code.to_bytes(4, "little"), np.uint8)


def _numbers(digest: int, count: int) -> Sequence[float] | Array:
    """As many numbers as asked for that depend on a digest; NaN for a bad one."""
    if digest < 0:
        return np.full(count, np.nan, np.float32)
    return np.random.Generator(np.random.PCG64(digest)).standard_normal(count, np.float32)
