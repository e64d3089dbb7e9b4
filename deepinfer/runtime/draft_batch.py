"""Draft batches: from committed rows and anchors to the arrays that the draft phase declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from deepinfer.program import Phase
from deepinfer.runtime.batch import declared, offsets
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampler import draft_sampling_inputs

Array = np.ndarray[Any, Any]


class Committed(NamedTuple):
    """Rows whose tokens are final: what the draft's context is made of.

    Args:
        request: whose. start, end: positions. row: of the target's ``hidden``, at ``start``.
    """

    request: Request
    start: int
    end: int
    row: int


class Context(NamedTuple):
    """Committed rows of all requests, as arrays.

    Args:
        slots, starts, counts: i32[R], by request, with their positions. rows: i32[R], of the
            target's ``hidden``, where each request's first one lies.
    """

    slots: Array
    starts: Array
    counts: Array
    rows: Array

    @staticmethod
    def of(committed: Sequence[Committed]) -> Context:
        starts, ends, rows = np.array([c[1:] for c in committed], np.int32).reshape(-1, 3).T
        slots = np.array([c.request.slot for c in committed], np.int32)
        return Context(slots, starts, ends - starts, rows)


class Anchors(NamedTuple):
    """The requests that get a block, each drafted after its last token.

    Args:
        requests: whose. tokens: i32[D], their last ones. lengths: i32[D], tokens up to there.
    """

    requests: Sequence[Request]
    tokens: Array
    lengths: Array

    @staticmethod
    def of(requests: Sequence[Request]) -> Anchors:
        return Anchors(requests, np.array([r.tokens[-1] for r in requests], np.int32),
                       np.array([len(r.tokens) for r in requests], np.int32))


def build_draft_inputs(phase: Phase, context: Context, hidden: Array, anchors: Anchors,
                       facts: Mapping[str, Any], *, calibration: Array,
                       masks: Mapping[int, Array] | None = None) -> dict[str, Array]:
    """The inputs of one draft step.

    Args:
        hidden: bf16[K, taps*d] of the target step. facts: of the Program's manifest.
        calibration: temperatures, f32[block]. masks: allowed first tokens by index of an anchor.

    Returns:
        hidden; positions, request i32[N]; spans i32[R,4]; block_tokens, block_positions,
        block_request i32[D*block]; block_spans i32[D,4]; anchor i32[D]; calibration f32[block];
        ``draft_sampling_inputs``.
    """
    # This is between two native calls: few arrays, and no look at anything that is not warm.
    block, vocab_size = int(facts["block"]), int(facts["vocab_size"])
    firsts = offsets(context.counts)
    request = np.repeat(np.arange(len(context.slots), dtype=np.int32), context.counts)
    local = np.arange(firsts[-1], dtype=np.int32) - firsts[request]
    spans = np.zeros((len(context.slots), 4), np.int32)
    spans[:, 0], spans[:, 1], spans[:, 2] = context.slots, firsts[:-1], firsts[1:]
    tokens = np.full((len(anchors.tokens), block), int(facts["noise_token"]), np.int32)
    tokens[:, 0] = anchors.tokens
    positions = anchors.lengths[:, None] + np.arange(-1, block - 1, dtype=np.int32)
    return declared(phase, {
        "hidden": hidden[context.rows[request] + local], "request": request, "spans": spans,
        "positions": context.starts[request] + local,
        "block_tokens": tokens.reshape(-1), "anchor": anchors.tokens,
        "block_positions": positions.reshape(-1),
        **_blocks(tuple(r.slot for r in anchors.requests), block), "calibration": calibration,
        **draft_sampling_inputs(anchors.requests, anchors.lengths, block, masks or {}, vocab_size),
    })


@lru_cache(maxsize=64)
def _blocks(slots: tuple[int | None, ...], block: int) -> dict[str, Array]:
    """What does not change while the same requests draft."""
    count = len(slots)
    firsts = np.arange(count, dtype=np.int32) * np.int32(block)
    return {"block_request": np.repeat(np.arange(count, dtype=np.int32), block),
            "block_spans": np.stack([np.array(slots, np.int32), firsts, firsts + np.int32(block),
                                     np.zeros(count, np.int32)], axis=1),
            "is_image": np.zeros(count * block, np.uint8)}
