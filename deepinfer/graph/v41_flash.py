"""The whole forward of DeepSeek-V4.1-Flash on one page. Source: spec §2.2, §4.1.

Three phases share it: ``prefill`` (ragged rows, some of them sampled), ``decode`` (one row a
request) and ``verify`` (an anchor and its drafts a request; every row is sampled). Prefill may
leave rows behind at the replay cut: the layers from there on own nothing but a window ring.
"""

from __future__ import annotations

from functools import partial

from deepinfer.graph.attention import Shared, attention, compress
from deepinfer.graph.blocks import collapsed, engram, moe, sublayer
from deepinfer.graph.config import LayerSpec, ModelConfig
from deepinfer.graph.context import Context
from deepinfer.graph.limits import Limits
from deepinfer.ir import Builder, Graph, Sym, Value
from deepinfer.ir.types import F32, U8, U64
from deepinfer.ops.adjust import WORD, adjust_logits, force_token
from deepinfer.ops.embed import embed
from deepinfer.ops.gemm import concat, gather_rows, linear
from deepinfer.ops.hyper import hyper_collapse, hyper_expand, hyper_mean, hyper_start
from deepinfer.ops.sample import logprobs, sample

PHASES = ("prefill", "decode", "verify")
PURPOSE_TOKEN = 0  # the target and its drafts share this noise (DESIGN §6)


def forward(cfg: ModelConfig, limits: Limits, phase: str) -> Graph:
    """The graph of one phase.

    Outputs: ``token`` i32[Q], ``logprob`` f32[Q], ``top_ids`` and ``top_logprobs`` [Q,k], and with
    DSpark stages ``hidden`` bf16[N, taps*d], what the draft's context is made of; in prefill it
    has the kept rows, and ``sample_rows`` counts them.
    """
    rows = Sym("num_tokens", _rows(limits, phase))
    requests = Sym("num_requests", limits.max_num_seqs)
    with Builder(phase) as b:
        c = Context.open(b, cfg, limits, rows, requests)
        tokens = c.input("tokens", (rows,))
        with b.scope("embed"):
            streams = hyper_expand(embed(tokens, c.w("embed.weight")), copies=cfg.hc_mult)
            pre = hyper_start(tokens, copies=cfg.hc_mult)
        shared = Shared()
        taps: list[Value] = []
        for layer in cfg.layers:
            p = f"layers.{layer.index}"
            if layer.engram is not None:
                streams = engram(c, layer, streams, p)
            u = None
            if phase == "prefill" and layer.index == cfg.replay_cut:
                streams, u = leave_rows(c, layer, p, streams, pre, shared)
                taps = [c.keep(tap) for tap in taps]
            if layer.is_tap:
                with b.scope(p):
                    taps.append(hyper_mean(streams, name="tap"))
            streams, pre = sublayer(c, p, "attn", streams, pre,
                                    partial(attention, c, layer, p, shared), u)
            streams, pre = sublayer(c, p, "ffn", streams, pre,
                                    partial(moe, c, p, cfg.num_experts_per_tok))
        with b.scope("head"):
            last = hyper_collapse(streams, pre)
            if phase == "prefill":  # only the rows a request asked for reach the head
                last = gather_rows(last, c.input("sample_rows", (_sampled(rows, phase),)))
            logits = linear(c.norm(last, "norm.weight"), c.w("head.weight"), out="f32",
                            name="logits")
            outputs = list(choose(c, logits, _sampled(rows, phase)))
        if taps:
            hidden = taps[0]
            with b.scope("taps"):
                for tap in taps[1:]:
                    hidden = concat(hidden, tap, name="hidden")
            outputs.append(hidden)
        return b.graph(outputs)


def leave_rows(c: Context, layer: LayerSpec, p: str, streams: Value, pre: Value, shared: Shared
               ) -> tuple[Value, Value]:
    """At the replay cut: make the entries of all rows, then go on with the kept ones (spec §4.1).

    Returns:
        The streams and the attention's input of the kept rows.
    """
    with c.b.scope(f"{p}.attn"):
        u = collapsed(c, p, "attn", streams, pre)
        compress(c, layer, u, p, shared)
        c.cut()
        return c.keep(streams), c.keep(u)


def choose(c: Context, logits: Value, sampled: Sym) -> tuple[Value, Value, Value, Value]:
    """Pick each sampled row's token and report its logprobs, of the raw logits (DESIGN §6)."""
    adjusted = adjust_logits(logits, *adjustments(c, sampled),
                             c.input("recent", (sampled, c.drafts)), *masking(c, sampled),
                             name="adjusted")
    token = sample(adjusted, *sampling_inputs(c, sampled),
                   c.input("sample_position", (sampled,)), purpose=PURPOSE_TOKEN, name="sampled")
    token = force_token(token, c.input("forced", (sampled,)), name="token")
    chosen, ids, values = logprobs(logits, token, k=c.limits.top_logprobs)
    return token, chosen, ids, values


def sampling_inputs(c: Context, sampled: Sym) -> tuple[Value, ...]:
    """temperature, top_k, top_p, min_p and seed of each sampled row."""
    return (c.input("temperature", (sampled,), F32), c.input("top_k", (sampled,)),
            c.input("top_p", (sampled,), F32), c.input("min_p", (sampled,), F32),
            c.input("seed", (sampled,), U64))


def adjustments(c: Context, sampled: Sym) -> tuple[Value, ...]:
    """What penalties and biases need to know of each sampled row, but for the newest drafts."""
    entries = Sym("num_adjustments", c.limits.max_num_seqs * c.cfg.vocab_size)
    return (c.input("adjust_spans", (sampled, 2)), c.input("adjust_ids", (entries,)),
            c.input("adjust_counts", (entries,)), c.input("adjust_seen", (entries,), U8),
            c.input("adjust_bias", (entries,), F32), c.input("repetition", (sampled,), F32),
            c.input("frequency", (sampled,), F32), c.input("presence", (sampled,), F32))


def masking(c: Context, sampled: Sym, step: str = "") -> tuple[Value, Value]:
    """The row of ``masks`` of each sampled row, and all masks of the step."""
    masks = Sym("num_masks", c.limits.max_num_masks)
    return (c.input(f"mask_row{step}", (sampled,)),
            c.input("masks", (masks, -(-c.cfg.vocab_size // WORD))))


def _rows(limits: Limits, phase: str) -> int:
    return {"prefill": limits.max_num_batched_tokens, "decode": limits.max_num_seqs,
            "verify": limits.max_num_seqs * (1 + limits.draft_width)}[phase]


def _sampled(rows: Sym, phase: str) -> Sym:
    return Sym("num_sampled", rows.max) if phase == "prefill" else rows
