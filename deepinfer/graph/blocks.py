"""The parts of a layer besides attention: hyper-connections, MoE, Engram (spec §2.3, §2.8-2.10)."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.graph.config import LayerSpec
from deepinfer.graph.context import Context
from deepinfer.ir import TensorType, Value
from deepinfer.ir.types import I32
from deepinfer.numerics.engram import hash_multipliers
from deepinfer.ops.engram import engram_gate, engram_gather, engram_hash
from deepinfer.ops.gemm import silu_mul
from deepinfer.ops.hyper import hyper_collapse, hyper_mix, hyper_post
from deepinfer.ops.moe import expert_down, expert_gate_up, expert_reduce, route
from deepinfer.ops.quant import quantize_fp8


def sublayer(c: Context, p: str, kind: str, streams: Value, pre: Value,
             run: Callable[[Value], Value], u: Value | None = None) -> tuple[Value, Value]:
    """One sublayer between its hyper-connections (spec §2.3, "SinglePass mHC").

    The streams collapse with the ``pre`` handed over by the sublayer before; the ``pre`` computed
    here is for the next one.

    Args:
        p: the layer's name. kind: "attn" or "ffn". streams, pre: as they come in.
        run: the sublayer proper. u: its input, where it is known already.

    Returns:
        The new streams, and the ``pre`` to hand over.
    """
    cfg = c.cfg
    with c.b.scope(f"{p}.{kind}"):
        next_pre, post, comb = hyper_mix(
            streams, c.w(f"{p}.hc_{kind}_fn"), c.w(f"{p}.hc_{kind}_base"),
            c.w(f"{p}.hc_{kind}_scale"), hc=cfg.hc_mult, iters=cfg.hc_sinkhorn_iters,
            hc_eps=cfg.hc_eps, eps=cfg.rms_norm_eps)
        if u is None:
            u = collapsed(c, p, kind, streams, pre)
        return hyper_post(run(u), streams, post, comb), next_pre


def collapsed(c: Context, p: str, kind: str, streams: Value, pre: Value) -> Value:
    """The input of a sublayer: the streams' weighted sum, normed."""
    return c.norm(hyper_collapse(streams, pre), f"{p}.{kind}_norm.weight")


def moe(c: Context, p: str, experts_per_token: int, u: Value, *, images: bool = True) -> Value:
    """Routed experts (fp4 weights) and the shared expert (fp8) on ``u``; spec §2.8, §2.9.

    Without ``images`` (DSpark blocks) no row can be an image's, and ``bias_vl`` is not read.
    """
    cfg, ffn = c.cfg, f"{p}.ffn"
    scores = c.linear(u, f"{ffn}.gate", out="f32")
    bias = c.w(f"{ffn}.gate.bias")
    bias_vl = c.w(f"{ffn}.gate.bias_vl") if images else bias
    idx, weight = route(scores, bias, bias_vl, c.is_image, k=experts_per_token,
                        scale=cfg.routed_scaling_factor)

    def expert(name: str) -> tuple[Value, Value]:
        return c.w(f"{ffn}.experts.{name}.weight"), c.w(f"{ffn}.experts.{name}.scale")

    hidden = expert_gate_up(*c.quantized(u), *expert("w1"), *expert("w3"), idx, weight,
                            limit=cfg.swiglu_limit)
    routed = expert_down(*quantize_fp8(hidden, block=32, name="hidden8"), *expert("w2"), idx)
    shared = f"{ffn}.shared_experts"
    act = silu_mul(c.linear_fp8(u, f"{shared}.w1"), c.linear_fp8(u, f"{shared}.w3"),
                   limit=cfg.swiglu_limit)
    out: Value = expert_reduce(routed, idx, c.linear_fp8(act, f"{shared}.w2"))
    return out


def engram(c: Context, layer: LayerSpec, streams: Value, p: str) -> Value:
    """Add the hashed n-gram memory to the streams (spec §2.10)."""
    cfg, index = c.cfg, layer.engram
    assert index is not None
    e = f"{p}.engram"
    with c.b.scope(e):
        token_map = c.b.weight("derived.token_map", TensorType((cfg.vocab_size,), I32))
        lookback = c.keep(c.input("lookback", (c.all_rows.rows, cfg.engram_max_ngram_size)))
        rows = engram_hash(
            lookback, c.is_image, token_map,
            multipliers=hash_multipliers(layer.index, max_ngram=cfg.engram_max_ngram_size,
                                         compressed_vocab=cfg.engram_compressed_vocab_size),
            primes=cfg.engram_primes[index], heads=cfg.engram_n_heads,
            pad=cfg.engram_pad_token_id, columns=cfg.engram_columns)
        table = engram_gather(rows, c.w(f"{e}.embed.weight"), c.w(f"{e}.embed.scale"))
        kv = c.linear_fp8(table, f"{e}.wkv")
        out: Value = engram_gate(streams, kv, c.w(f"{e}.q_weight"), c.w(f"{e}.k_weight"),
                                 c.is_image, eps=cfg.rms_norm_eps)
        return out
