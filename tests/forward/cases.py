"""Small models and hand-made step inputs for the tests of the whole forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.compiler import build_graphs, compile
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import byte_level_tokenizer, tiny_config, write_random_model
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.runtime.weights import load_weights
from deepinfer.testing.reference import EvaluatorDevice

Array = np.ndarray[Any, Any]
SLOTS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on disk with its limits; everything else follows."""

    path: Path
    cfg: ModelConfig
    limits: Limits

    @property
    def sizes(self) -> dict[str, int]:
        per_seq = self.limits.pages_per_seq
        return {"num_slots": SLOTS, "num_pages": SLOTS * per_seq, "pages_per_seq": per_seq}

    def program(self) -> Program:
        return compile(self.path, isa=host_levels(), limits=self.limits)

    def native(self, *, threads: int = 1, program: Program | None = None) -> CpuDevice:
        program = program or self.program()
        weights = load_weights(program.manifest["weights"], self.path)
        return CpuDevice(program, weights, self.sizes, num_threads=threads, poison=True)

    def source(self) -> EvaluatorDevice:
        return EvaluatorDevice(build_graphs(self.cfg, self.limits), self.cfg, self.path, self.sizes)


def make_case(path: Path, *, seed: int = 0, page_size: int = 8, **changes: Any) -> Case:
    """Write a random tiny model with these config fields changed."""
    cfg = tiny_config(**changes)
    write_random_model(cfg, path, seed, tokenizer=byte_level_tokenizer(cfg.vocab_size))
    limits = Limits.for_model(cfg, max_num_seqs=SLOTS, max_num_batched_tokens=256,
                              page_size=page_size)
    return Case(path, cfg, limits)


def tokens_for(case: Case, n: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(3, case.cfg.vocab_size, n).astype(np.int32)


def inputs(case: Case, rows: Sequence[tuple[int, Array, int, int]], *, floor: int = 0,
           keep_from: int = 0) -> dict[str, Array]:
    """Prefill inputs with every kept row sampled; ``rows`` = (slot, all tokens, start, end) each.

    floor: of the layers from the replay cut on. keep_from: positions before it go no further.
    Pages of slot s are s*P .. s*P + P - 1, in descending order: a page table that is no identity.
    """
    per_seq = case.limits.pages_per_seq
    position, request, token, lookback, spans, pages = [], [], [], [], [], []
    for r, (slot, tokens, start, end) in enumerate(rows):
        spans.append((slot, len(position), len(position) + end - start, 0))
        pages.append([slot * per_seq + per_seq - 1 - i for i in range(per_seq)])
        for p in range(start, end):
            position.append(p)
            request.append(r)
            token.append(int(tokens[p]))
            lookback.append([int(tokens[p - i]) if p >= i else -1
                             for i in range(case.cfg.engram_max_ngram_size)])
    n = len(position)
    positions = np.array(position, np.int32)
    odd = np.flatnonzero(positions % 2).astype(np.int32)
    requests = np.array(request, np.int32)
    kept = np.flatnonzero(positions >= keep_from).astype(np.int32)
    edges = np.concatenate([[0], np.cumsum(np.bincount(requests[kept], minlength=len(rows)))])
    kept_spans = [(slot, edges[r], edges[r + 1], floor) for r, (slot, *_) in enumerate(rows)]
    return {
        "tokens": np.array(token, np.int32), "positions": positions, "request": requests,
        "spans": np.array(spans, np.int32).reshape(-1, 4), "entry_positions": positions,
        "kept_rows": kept, "kept_positions": positions[kept], "kept_request": requests[kept],
        "kept_spans": np.array(kept_spans, np.int32).reshape(-1, 4),
        "kept_is_image": np.zeros(len(kept), np.uint8),
        "pages": np.array(pages, np.int32).reshape(-1, per_seq),
        "group_rows": odd, "group_positions": positions[odd] - 1, "group_request": requests[odd],
        "lookback": np.array(lookback, np.int32).reshape(n, case.cfg.engram_max_ngram_size),
        "is_image": np.zeros(n, np.uint8),
        "sample_rows": np.arange(len(kept), dtype=np.int32), **sampling(len(kept)),
        **adjusting(case, positions[kept]), "forced": np.full(len(kept), -1, np.int32),
        "sample_position": positions[kept] + 1,
    }


def only(phase: str, given: dict[str, Array]) -> dict[str, Array]:
    """Prefill inputs as decode or verify takes them: all rows are kept and sampled there."""
    assert phase in ("decode", "verify") and len(given["kept_rows"]) == len(given["tokens"])
    return {k: v for k, v in given.items() if k != "sample_rows" and not k.startswith("kept_")}


def sampling(n: int, temperature: float = 0.8) -> dict[str, Array]:
    return {"temperature": np.full(n, temperature, np.float32), "top_k": np.full(n, 40, np.int32),
            "top_p": np.full(n, 0.9, np.float32), "min_p": np.zeros(n, np.float32),
            "seed": np.full(n, 2**63 + 5, np.uint64)}


def adjusting(case: Case, positions: Array, *, draft: bool = False) -> dict[str, Array]:
    """Penalties, biases and masks, by position: every third has entries, every fourth a mask."""
    rng, vocab, n = np.random.default_rng(7), case.cfg.vocab_size, len(positions)
    width, block = max(1, case.limits.draft_width), case.cfg.dspark_block_size
    size = 30
    ids = np.sort(rng.choice(vocab, size, replace=False)).astype(np.int32)
    counts = rng.integers(0, 4, size).astype(np.int32)
    about = np.zeros((n, 2), np.int32)
    about[positions % 3 == 0] = [5, size]
    recent = np.full((n, width), -1, np.int32)
    recent[positions % 4 == 1, 0] = ids[7] + 1 if ids[7] + 1 < vocab else 0
    mask_row = np.where(positions % 4 == 0, positions // 4 % 2, -1).astype(np.int32)
    named = {f"mask_row.{k}": np.roll(mask_row, k) for k in range(block)} if draft else {
        "mask_row": mask_row, "recent": recent}
    return {
        "adjust_spans": about, "adjust_ids": ids, "adjust_counts": counts,
        "adjust_seen": (counts > 0).astype(np.uint8) | (np.arange(size) % 5 == 0),
        "adjust_bias": np.where(np.arange(size) % 4 == 0, 2.5, 0).astype(np.float32),
        "repetition": np.full(n, 1.25, np.float32), "frequency": np.full(n, 0.375, np.float32),
        "presence": np.full(n, -0.5, np.float32), **named,
        "masks": rng.integers(-2**31, 2**31, (2, -(-vocab // 32))).astype(np.int32)}


def draft_inputs(case: Case, rows: Sequence[tuple[int, int, int]], hidden: Array,
                 anchors: Sequence[int]) -> dict[str, Array]:
    """Draft inputs: ``rows`` = (slot, start, end) of the committed rows whose taps are ``hidden``;
    every request then drafts one block after its last row."""
    block = case.cfg.dspark_block_size
    position, request, spans, block_position, block_spans = [], [], [], [], []
    for r, (slot, start, end) in enumerate(rows):
        spans.append((slot, len(position), len(position) + end - start, 0))
        position += range(start, end)
        request += [r] * (end - start)
        block_spans.append((slot, r * block, (r + 1) * block, 0))
        block_position += range(end, end + block)
    m = len(rows)
    noise = [case.cfg.dspark_noise_token_id] * (block - 1)
    last = np.array([end for _, _, end in rows], np.int32)
    return {
        "hidden": hidden, "positions": np.array(position, np.int32),
        "request": np.array(request, np.int32), "spans": np.array(spans, np.int32),
        "block_positions": np.array(block_position, np.int32),
        "block_request": np.repeat(np.arange(m, dtype=np.int32), block),
        "block_spans": np.array(block_spans, np.int32),
        "block_tokens": np.array([t for a in anchors for t in (a, *noise)], np.int32),
        "is_image": np.zeros(m * block, np.uint8), "anchor": np.array(anchors, np.int32),
        "calibration": np.linspace(0.7, 1.3, block).astype(np.float32), **sampling(m),
        **adjusting(case, last, draft=True),
        **{f"sample_position.{k}": last + 1 + k for k in range(block)},
    }


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
