"""Attention of one layer: projections, window ring, compressed branch, indexer (spec §2.4-2.6)."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.graph.config import LayerSpec
from deepinfer.graph.context import BLOCK, Context
from deepinfer.ir import Sym, TensorType, Value
from deepinfer.ir.types import F32
from deepinfer.ops.attention import sparse_attention, window_attention
from deepinfer.ops.cache import kv_write, pending_write, window_write
from deepinfer.ops.compress import compress_pairs
from deepinfer.ops.gemm import grouped_linear_fp8
from deepinfer.ops.indexer import candidate_blocks, candidate_mask, index_scores, topk
from deepinfer.ops.quant import quantize_fp4, quantize_fp4_e4m3, quantize_fp8
from deepinfer.ops.rope import rope


@dataclass(slots=True)
class Shared:
    """What later layers read of earlier ones (spec §2.7): the newest source wins.

    Args:
        source: the layer whose compressed entries and index keys these are.
        kv, index_keys: caches. topk, candidates: selections of the newest index source.
    """

    source: int | None = None
    kv: tuple[Value, Value] | None = None
    index_keys: tuple[Value, Value] | None = None
    topk: Value | None = None
    candidates: Value | None = None


def queries(c: Context, layer: LayerSpec, u: Value, p: str) -> tuple[Value, Value]:
    """The low-rank query row (also read by the indexer) and the rotated queries of all heads."""
    qr = c.norm(c.linear_fp8(u, f"{p}.attn.wq_a"), f"{p}.attn.q_norm.weight")
    q = c.linear_fp8(qr, f"{p}.attn.wq_b")
    return qr, rope(q, c.rows_of.positions, c.rope_table(layer), heads=c.cfg.num_attention_heads,
                    name="q")


def window_kv(c: Context, layer: LayerSpec, u: Value, p: str) -> tuple[Value, Value]:
    """The row's own key = value vector, rotated, as e4m3 per 32 over all channels."""
    k = c.norm(c.linear_fp8(u, f"{p}.attn.wkv"), f"{p}.attn.kv_norm.weight")
    k = rope(k, c.rows_of.positions, c.rope_table(layer), heads=1, name="k")
    codes: tuple[Value, Value] = quantize_fp8(k, block=BLOCK, name="k8")
    return codes


def output(c: Context, layer: LayerSpec, o: Value, p: str) -> Value:
    """Undo the rotation that V carried in, then the grouped and the final projection."""
    o = rope(o, c.rows_of.positions, c.rope_table(layer), heads=c.cfg.num_attention_heads,
             inverse=True, name="o")
    z = grouped_linear_fp8(o, c.w(f"{p}.attn.wo_a.weight"), c.w(f"{p}.attn.wo_a.scale"),
                           groups=c.cfg.o_groups, name="wo_a")
    return c.linear_fp8(z, f"{p}.attn.wo_b")


def compress(c: Context, layer: LayerSpec, u: Value, p: str, shared: Shared) -> None:
    """Write this KV source's compressed entries and index keys (spec §2.5, §2.6).

    It takes all rows of the step, also at the replay cut: every position has its entries.
    """
    a = f"{p}.attn.compressor"
    rows = c.all_rows
    positions, request = rows.positions, rows.request
    with c.b.scope("compressor"):
        if layer.ratio == 2:
            groups = Sym("num_groups", rows.rows.max)
            group_rows = c.input("group_rows", (groups,))
            positions = entries = c.input("group_positions", (groups,))
            request = c.input("group_request", (groups,))
            value = c.linear(u, f"{a}.wkv", out="f32")
            gate = c.linear(u, f"{a}.wgate", out="f32")
            pending = c.b.state(f"{p}.pending", TensorType(
                (c.slots, c.limits.pending, 2, c.cfg.head_dim), F32))
            latent = compress_pairs(value, gate, group_rows, positions, request, rows.spans,
                                    pending)
            pending_write(value, gate, rows.positions, rows.spans, pending)
        else:
            entries = c.input("entry_positions", (rows.rows,))
            latent = c.linear(u, f"{a}.wkv")
        latent = c.norm(latent, f"{a}.norm.weight")
        kv = rope(latent, positions, c.rope_table(layer), heads=1, name="kv")
        kv4 = quantize_fp4_e4m3(kv, block=16, name="kv4")
        shared.source, shared.kv = layer.index, c.kv_cache(layer.index)
        kv_write(*kv4, entries, request, c.pages, *shared.kv, ratio=layer.ratio)
    with c.b.scope("indexer"):  # its keys are made of the latent before rotation
        keys = c.norm(c.linear(latent, f"{p}.attn.indexer.wk"), f"{p}.attn.indexer.k_norm.weight")
        keys = rope(keys, positions, c.rope_table(layer), heads=1, name="key")
        keys4 = quantize_fp4(keys, block=BLOCK, name="key4")
        shared.index_keys = c.index_cache(layer.index)
        kv_write(*keys4, entries, request, c.pages, *shared.index_keys, ratio=layer.ratio)


def select(c: Context, layer: LayerSpec, u: Value, qr: Value, p: str, shared: Shared) -> None:
    """Score the index keys and select the compressed entries to attend to (spec §2.6)."""
    cfg, rows = c.cfg, c.rows_of
    assert shared.index_keys is not None
    q = c.linear_fp8(qr, f"{p}.attn.indexer.wq_b")
    q = rope(q, rows.positions, c.rope_table(layer), heads=cfg.index_n_heads, name="q")
    q4 = quantize_fp4(q, block=BLOCK, name="q4")
    weights = c.linear(u, f"{p}.attn.indexer.weights_proj")
    scale = cfg.index_head_dim ** -0.5 * cfg.index_n_heads ** -0.5
    scores = index_scores(*q4, weights, rows.positions, rows.request, c.pages, *shared.index_keys,
                          ratio=layer.ratio, scale=scale)
    if layer.candidates == "source":
        shared.candidates = candidate_blocks(
            scores, rows.positions, ratio=layer.ratio, block=cfg.candidate_block_size,
            count=cfg.candidate_topk_blocks)
    elif layer.candidates == "within":
        assert shared.candidates is not None
        scores = candidate_mask(scores, shared.candidates, block=cfg.candidate_block_size)
    shared.topk = topk(scores, rows.positions, k=cfg.index_topk, ratio=layer.ratio)


def attention(c: Context, layer: LayerSpec, p: str, shared: Shared, u: Value) -> Value:
    """The whole attention of target layer ``layer`` on its normed, collapsed input ``u``."""
    cfg, rows = c.cfg, c.rows_of
    qr, q = queries(c, layer, u, p)
    k, k_sf = window_kv(c, layer, u, p)
    if layer.is_kv_source and shared.source != layer.index:  # at the replay cut it is done
        compress(c, layer, u, p, shared)
    if layer.is_index_source:
        with c.b.scope("indexer"):
            select(c, layer, u, qr, p, shared)
    ring, ring_sf = c.ring(p)
    sink = c.w(f"{p}.attn.attn_sink")
    operands = (q, k, k_sf, ring, ring_sf, sink, rows.positions, rows.request, rows.spans)
    scale = cfg.head_dim ** -0.5
    if layer.ratio:
        assert shared.kv is not None
        o = sparse_attention(*operands, shared.topk, c.pages, *shared.kv,
                             window=cfg.sliding_window, scale=scale)
    else:
        o = window_attention(*operands, window=cfg.sliding_window, scale=scale)
    # The ring is written after it was read: a long chunk overwrites slots its first rows need.
    window_write(k, k_sf, rows.positions, rows.request, rows.spans, ring, ring_sf)
    return output(c, layer, o, p)
