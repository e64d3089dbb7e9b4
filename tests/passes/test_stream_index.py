"""The pass stream_index: golden text, exactness, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.ir import Builder, Graph, Sym, TensorType
from deepinfer.ir.eval import evaluate
from deepinfer.ir.text import node_text
from deepinfer.ir.types import BF16, E2M1, I32, UE8M0, Value
from deepinfer.ir.verify import verify
from deepinfer.ops.indexer import candidate_blocks, candidate_mask, index_scores, topk
from deepinfer.ops.quant import quantize_fp4
from deepinfer.passes.drop_dead import drop_dead
from deepinfer.passes.stream_index import stream_index
from tests.ops.attention_cases import index_case

ROWS, REQUESTS = Sym("num_tokens", 64), Sym("num_requests", 8)
TABLE, PAGES = Sym("max_pages", 16), Sym("num_pages", 64)
STEP = [(0, 20, 4), (1, 0, 3), (2, 61, 2)]


class Model:
    """A builder with the operands of an indexer of 2 heads of 32 channels, 4 entries a page."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.positions = b.input("positions", TensorType((ROWS,), I32))
        self.request = b.input("request", TensorType((ROWS,), I32))
        self.pages = b.input("pages", TensorType((REQUESTS, TABLE), I32))
        self.keys = b.state("keys", TensorType((PAGES, 4, 32), E2M1))
        self.keys_sf = b.state("keys_sf", TensorType((PAGES, 4, 1), UE8M0))

    def scores(self, name: str) -> Value:
        with self.b.scope(name):
            q = self.b.input(f"{name}_q", TensorType((ROWS, 64), BF16))
            w = self.b.input(f"{name}_w", TensorType((ROWS, 2), BF16))
            codes = quantize_fp4(q, block=32, name="q4")
            made: Value = index_scores(*codes, w, self.positions, self.request, self.pages,
                                       self.keys, self.keys_sf, ratio=2, scale=0.125)
            return made

    def topk(self, scores: Value, **attrs: Any) -> Value:
        made: Value = topk(scores, self.positions, **{"k": 5, "ratio": 2, **attrs})
        return made


def all_three() -> Graph:
    with Builder("decode") as b:
        m = Model(b)
        plain = m.topk(m.scores("full"))
        scores = m.scores("source")
        blocks = candidate_blocks(scores, m.positions, ratio=2, block=3, count=4)
        free = m.topk(scores)
        masked = candidate_mask(m.scores("reindex"), blocks, block=3)
        return b.graph([plain, free, blocks, m.topk(masked)])


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    made: dict[str, np.ndarray[Any, Any]] = {}
    for seed, name in enumerate(("full", "source", "reindex")):
        q, w, positions, request, pages, keys, keys_sf = index_case(
            STEP, heads=2, width=32, ratio=2, size=4, seed=seed)
        made |= {f"{name}_q": q, f"{name}_w": w, "positions": positions, "request": request,
                 "pages": pages, "keys": keys, "keys_sf": keys_sf}
    return made


def test_each_selection_becomes_its_streamed_op() -> None:
    streamed = drop_dead(stream_index(all_three()))
    verify(streamed)
    assert [n.op.name for n in streamed.nodes] == [
        "fake_quantize_fp4", "index_topk", "fake_quantize_fp4", "index_topk_candidates",
        "fake_quantize_fp4", "index_topk_within"]
    assert node_text(streamed.nodes[-1]) == (
        "%topk.2: i32[num_tokens,5] = index_topk_within(%reindex.q4.q.wide, $reindex_w, "
        "$positions, $request, $pages, !keys, !keys_sf, %candidate_blocks) "
        "block=3 k=5 ratio=2 scale=0.125   # reindex")
    assert not any(TABLE * 4 in v.type.shape for v in streamed.values())


def test_it_is_exact() -> None:
    source = all_three()
    before, after = (evaluate(g, arrays()) for g in (source, stream_index(source)))
    assert list(before) == list(after)
    for name, array in before.items():
        assert (array >= 0).any()
        np.testing.assert_array_equal(after[name], array)
    assert (before["topk.1"] != before["topk.2"]).any()


def test_scores_that_are_read_otherwise_stay() -> None:
    def kept(build: Any) -> None:
        with Builder("g") as b:
            graph = b.graph(build(Model(b)))
        assert [n.op.name for n in stream_index(graph).nodes] == [n.op.name for n in graph.nodes]

    def read_by_the_caller(m: Model) -> list[Value]:
        scores = m.scores("a")
        return [m.topk(scores), scores]

    def selected_twice(m: Model) -> list[Value]:
        scores = m.scores("a")
        return [m.topk(scores), m.topk(scores, k=3)]

    def another_ratio(m: Model) -> list[Value]:
        return [m.topk(m.scores("a"), ratio=1)]

    def blocks_defined_after_the_scores(m: Model) -> list[Value]:
        scores = m.scores("a")
        other = m.scores("b")
        blocks = candidate_blocks(other, m.positions, ratio=2, block=3, count=4)
        return [m.topk(candidate_mask(scores, blocks, block=3)), other]

    for build in (read_by_the_caller, selected_twice, another_ratio,
                  blocks_defined_after_the_scores):
        kept(build)


def test_a_quantiser_shared_by_two_indexers_is_widened_once() -> None:
    with Builder("g") as b:
        m = Model(b)
        first = m.scores("a")
        scores = b.nodes[-1]
        again = index_scores(*scores.inputs, **scores.attrs)
        graph = b.graph([m.topk(first), m.topk(again)])
    streamed = stream_index(graph)
    verify(streamed)
    assert [n.op.name for n in streamed.nodes] == [
        "quantize_fp4", "fake_quantize_fp4", "index_topk", "index_topk"]
