"""The DSpark draft: seed the stages' rings from committed rows, then draft one block (spec §5).

Two row sets meet in this phase. *Context rows* (``num_tokens``) are the positions committed since
the last draft, with the target's taps; *block rows* are the anchor and the noise tokens after it,
``dspark_block_size`` for each drafting request.
"""

from __future__ import annotations

from functools import partial

from deepinfer.graph.attention import output, queries, window_kv
from deepinfer.graph.blocks import moe, sublayer
from deepinfer.graph.config import LayerSpec, ModelConfig
from deepinfer.graph.context import Context, Rows
from deepinfer.graph.limits import Limits
from deepinfer.graph.v41_flash import (
    PURPOSE_TOKEN,
    adjustments,
    masking,
    sampling_inputs,
)
from deepinfer.ir import Builder, Graph, Sym, TensorType, Value
from deepinfer.ir.types import BF16, F32
from deepinfer.ops.adjust import adjust_logits, recent_push, recent_start
from deepinfer.ops.attention import draft_attention
from deepinfer.ops.cache import window_write
from deepinfer.ops.draft import confidence, draft_logits, take_step
from deepinfer.ops.embed import embed
from deepinfer.ops.gemm import concat, linear
from deepinfer.ops.hyper import hyper_collapse, hyper_expand, hyper_start
from deepinfer.ops.sample import sample


def draft(cfg: ModelConfig, limits: Limits) -> Graph:
    """The draft graph.

    Outputs, for k in 0 .. block - 1: ``draft.k.token`` i32 and then ``draft.k.confidence`` f32.
    """
    block = cfg.dspark_block_size
    context_rows = Sym("num_tokens", limits.max_num_batched_tokens)
    drafting = Sym("num_drafting", limits.max_num_seqs)
    rows = drafting * block
    with Builder("draft") as b:
        c = Context.open(b, cfg, limits, context_rows, Sym("num_requests", limits.max_num_seqs))
        context = c.rows_of
        hidden = c.input("hidden", (context_rows, len(cfg.dspark_target_layer_ids)
                                    * cfg.hidden_size), BF16)
        with b.scope("mtp.context"):
            mixed = c.norm(c.linear_fp8(hidden, "mtp.0.main_proj"), "mtp.0.main_norm.weight")
        for i, stage in enumerate(cfg.stages):
            with b.scope(f"mtp.{i}.context"):
                k, k_sf = window_kv(c, stage, mixed, f"mtp.{i}")
                window_write(k, k_sf, context.positions, context.request, context.spans,
                             *c.ring(f"mtp.{i}"))
        c.rows_of = Rows.declare(b, rows, drafting, "block_", is_image="is_image")
        tokens = c.input("block_tokens", (rows,))
        with b.scope("mtp.embed"):
            streams = hyper_expand(embed(tokens, c.w("embed.weight")), copies=cfg.hc_mult)
            pre = hyper_start(tokens, copies=cfg.hc_mult)
        for i, stage in enumerate(cfg.stages):
            p = f"mtp.{i}"
            streams, pre = sublayer(c, p, "attn", streams, pre,
                                    partial(block_attention, c, stage, p))
            streams, pre = sublayer(c, p, "ffn", streams, pre, partial(
                moe, c, p, cfg.dspark_num_experts_per_tok, images=False))
        return b.graph(markov(c, hyper_collapse(streams, pre, name="draft.h"), drafting))


def block_attention(c: Context, stage: LayerSpec, p: str, u: Value) -> Value:
    """Attention of a stage: every block row sees the ring and the whole block (spec §5.3)."""
    _, q = queries(c, stage, u, p)
    k, k_sf = window_kv(c, stage, u, p)
    ring, ring_sf = c.ring(p)
    rows = c.rows_of
    o = draft_attention(q, k, k_sf, ring, ring_sf, c.w(f"{p}.attn.attn_sink"), rows.positions,
                        rows.request, rows.spans, window=c.cfg.sliding_window,
                        scale=c.cfg.head_dim ** -0.5)
    return output(c, stage, o, p)


def markov(c: Context, h: Value, drafting: Sym) -> list[Value]:
    """Draft token by token: each adds its rank-256 bias to the next row's logits (spec §5.3).

    A draft goes through the target's transforms, with its block's earlier drafts counted
    (DESIGN §6).
    """
    cfg, last = c.cfg, f"mtp.{c.cfg.n_stages - 1}"
    with c.b.scope("draft"):
        logits = linear(c.norm(h, f"{last}.norm.weight"), c.w("head.weight"), out="f32",
                        name="logits")
        previous = c.input("anchor", (drafting,))
        temperatures = c.b.input("calibration", TensorType((cfg.dspark_block_size,), F32))
        params, about = sampling_inputs(c, drafting), adjustments(c, drafting)
        recent = recent_start(previous, width=max(c.drafts, cfg.dspark_block_size - 1))
        tokens, confidences = [], []
        for k in range(cfg.dspark_block_size):
            with c.b.scope(str(k)):
                e = embed(previous, c.w(f"{last}.markov_head.embed.weight"), name="markov")
                bias = c.linear(e, f"{last}.markov_head.head", out="f32")
                row = draft_logits(logits, bias, step=k, block=cfg.dspark_block_size)
                row = adjust_logits(row, *about, recent, *masking(c, drafting, f".{k}"),
                                    name="adjusted")
                position = c.input(f"sample_position.{k}", (drafting,))
                previous = sample(row, *params, position, purpose=PURPOSE_TOKEN, name="token")
                if k + 1 < cfg.dspark_block_size:
                    recent = recent_push(recent, previous, name="recent")
                hk = take_step(h, step=k, block=cfg.dspark_block_size)
                z = c.linear(concat(hk, e), f"{last}.confidence_head.proj", out="f32")
                confidences.append(confidence(z, temperatures, step=k))
                tokens.append(previous)
        return tokens + confidences
