"""The whole forward of DeepSeek-V4.1-Flash on one page. Source: spec §2.2.

Three phases share it: ``prefill`` (ragged rows, some of them sampled), ``decode`` (one row a
request) and ``verify`` (an anchor and its drafts a request; every row is sampled).
"""

from __future__ import annotations

from functools import partial

from deepinfer.graph.attention import Shared, attention
from deepinfer.graph.blocks import engram, moe, sublayer
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.context import Context
from deepinfer.graph.limits import Limits
from deepinfer.ir import Builder, Graph, Sym, Value
from deepinfer.ir.types import F32, I32, U64
from deepinfer.ops.embed import embed
from deepinfer.ops.gemm import concat, gather_rows, linear
from deepinfer.ops.hyper import hyper_collapse, hyper_expand, hyper_mean, hyper_start
from deepinfer.ops.sample import logprobs, sample

PHASES = ("prefill", "decode", "verify")
PURPOSE_TOKEN = 0  # the target and its drafts share this noise (DESIGN §6)


def forward(cfg: ModelConfig, limits: Limits, phase: str) -> Graph:
    """The graph of one phase.

    Outputs: ``token`` i32[Q], ``logprob`` f32[Q], ``top_ids`` and ``top_logprobs`` [Q,k], and with
    DSpark stages ``hidden`` bf16[N, taps*d], what the draft's context is made of.
    """
    rows = Sym("num_tokens", _rows(limits, phase))
    requests = Sym("num_requests", limits.max_num_seqs)
    with Builder(phase) as b:
        c = Context.open(b, cfg, limits, rows, requests)
        tokens = c.input("tokens", (rows,))
        with b.scope("embed"):
            streams = hyper_expand(embed(tokens, c.w("embed.weight")), copies=cfg.hc_mult)
            pre = hyper_start(tokens, copies=cfg.hc_mult)
        shared, taps = Shared(), []
        for layer in cfg.layers:
            p = f"layers.{layer.index}"
            if layer.engram is not None:
                streams = engram(c, layer, streams, p)
            if layer.is_tap:
                with b.scope(p):
                    taps.append(hyper_mean(streams, name="tap"))
            streams, pre = sublayer(c, p, "attn", streams, pre,
                                    partial(attention, c, layer, p, shared))
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


def choose(c: Context, logits: Value, sampled: Sym) -> tuple[Value, Value, Value, Value]:
    """Pick each sampled row's token and report its logprobs (DESIGN §6)."""
    token = sample(logits, *sampling_inputs(c, sampled),
                   c.input("sample_position", (sampled,), I32), purpose=PURPOSE_TOKEN,
                   name="token")
    chosen, ids, values = logprobs(logits, token, k=c.limits.top_logprobs)
    return token, chosen, ids, values


def sampling_inputs(c: Context, sampled: Sym) -> tuple[Value, ...]:
    """temperature, top_k, top_p, min_p and seed of each sampled row."""
    return (c.input("temperature", (sampled,), F32), c.input("top_k", (sampled,), I32),
            c.input("top_p", (sampled,), F32), c.input("min_p", (sampled,), F32),
            c.input("seed", (sampled,), U64))


def _rows(limits: Limits, phase: str) -> int:
    return {"prefill": limits.max_num_batched_tokens, "decode": limits.max_num_seqs,
            "verify": limits.max_num_seqs * (1 + limits.draft_width)}[phase]


def _sampled(rows: Sym, phase: str) -> Sym:
    return Sym("num_sampled", rows.max) if phase == "prefill" else rows
