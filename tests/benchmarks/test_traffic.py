"""Bytes and operations of a step, against sums made by hand from the checkpoint's tensors."""

from __future__ import annotations

import math

import pytest
from traffic import Step, node_bytes, node_flops, traffic

from deepinfer.compiler import build_graphs
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import tiny_config
from deepinfer.graph.weights import checkpoint_tensors
from deepinfer.ir import Builder, Graph, Sym, TensorType
from deepinfer.ir.types import BF16
from deepinfer.ops.gemm import linear

CFG = tiny_config()
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
TABLES = ("embed.weight", "engram.embed.weight", "engram.embed.scale")


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return build_graphs(CFG, Limits.for_model(CFG))


def weights(experts: float) -> float:
    """Bytes of the target's matrices with so many of the 8 experts of each layer; texts read no
    image tokens."""
    total = 0.0
    for name, tag, shape in checkpoint_tensors(CFG):
        if not name.startswith(("mtp.", "image_")) and not name.endswith(TABLES):
            share = experts / 8 if ".experts." in name and "shared" not in name else 1.0
            total += share * BYTES[tag] * math.prod(shape)
    return total


def looked_up(rows: int) -> int:
    """Rows of tables: the embedding, two layers of 6 Engram columns of 32 codes and a scale, the
    token classes of 4 tokens in each of them (one table), two tables of rotations."""
    return rows * (128 * 2 + 2 * 6 * 33 + 4 * 4 + 2 * 16 * 4)


def caches(requests: int, context: int) -> int:
    """12 rings of 64 codes and 2 scales of the window's 7 earlier keys; 10 layers read up to 8
    picks of 32 + 4 bytes; indexers read 16 + 1 bytes of each entry, the two that choose among
    candidates of at most 16; and two layers hold an open pair of 2 x 64 numbers."""
    rings = 12 * min(7, context - 1) * 66
    picks = 4 * min(8, context // 2) * 36 + 6 * min(8, context) * 36
    keys = 17 * (2 * (context // 2) + context + 2 * min(context, 16))
    return requests * (rings + picks + keys + 2 * 512)


@pytest.mark.parametrize("requests, context", [(1, 1), (1, 40), (3, 40)])
@pytest.mark.parametrize("experts", [2.0, 5.5])
def test_bytes_of_a_decode_step(graphs, requests, context, experts):
    met = {f"layers.{i}.ffn": experts for i in range(12)}
    got = traffic(graphs["decode"], Step(requests, requests, context, met))
    expected = weights(experts) + looked_up(requests) + caches(requests, context)
    assert got.nbytes == pytest.approx(expected, rel=0, abs=0.5)


def test_experts_without_a_count_are_as_many_as_pairs_or_all(graphs):
    for rows, experts in ((1, 2), (2, 4), (9, 8)):
        got = traffic(graphs["decode"], Step(rows, rows, 40)).nbytes
        assert got == pytest.approx(weights(experts) + looked_up(rows) + caches(rows, 40), abs=0.5)


def flops(rows: int, context: int) -> int:
    """Of one request whose last ``rows`` positions these are."""
    d, heads, size = 128, 4, 64
    attn = d * 64 + 64 * heads * size + d * size + (heads * size // 2) * 2 * 32 + 2 * 32 * d
    ffn = d * 8 + 3 * d * 64 * (1 + 2)  # router, the shared expert and two routed ones
    mixes = 2 * 24 * 4 * d
    compressors = 2 * (2 * d * size) + d * size
    indexers = 5 * (64 * 4 * 32 + d * 4) + 3 * size * 32
    engrams = 2 * (6 * 32 * 5 * d)
    per_row = 12 * (attn + ffn + mixes) + indexers + compressors + engrams
    products = 0
    for p in range(context - rows, context):
        window = 12 * min(8, p + 1)
        picks = 4 * min(8, (p + 1) // 2) + 6 * min(8, p + 1)
        scored = 2 * ((p + 1) // 2) + (p + 1) + 2 * min(16, p + 1)
        products += 2 * heads * size * (window + picks) + 4 * 32 * scored
    return 2 * (rows * per_row + products)


def head(rows: int) -> int:
    return 2 * rows * 128 * 512


def test_operations_of_prefill_and_decode(graphs):
    """Every row has the products of a compressor and an indexer; one row of a prompt has a head."""
    assert traffic(graphs["decode"], Step(1, 1, 41)).flops == flops(1, 41) + head(1)
    assert traffic(graphs["prefill"], Step(24, 1, 24)).flops == flops(24, 24) + head(1)


def test_a_linear_by_hand():
    with Builder("one") as b:
        y = linear(b.input("x", TensorType((Sym("num_tokens", 8), 64), BF16)),
                   b.weight("w", TensorType((32, 64), BF16)), name="y")
        (node,) = b.graph([y]).nodes
    step = Step(5, 5, 100)
    assert node_bytes(node, step) == 32 * 64 * 2
    assert node_flops(node, step) == 2 * 5 * 32 * 64
