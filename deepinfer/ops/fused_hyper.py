"""The hyper-connections between two sublayers as one op, bit for bit; a pass puts them in."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.sums import LANE_SUM
from deepinfer.ops.hyper import hyper_collapse, hyper_mix, hyper_post
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.quant import fake_quantize_fp8

Array = NDArray[Any]

ENTER = Order("C*hc and C, streams", "lane_sum", LANE_SUM,
              "those of hyper_post, hyper_mix, hyper_collapse, rms_norm and quantize_fp8: streams, "
              "collapsed and normed rows are bf16 in between")


@op("x:bf16[N,hc,C], pre:f32[N,hc], fn:f32[M,C*hc], base:f32[M], scale:f32[3], w:bf16[C] "
    "-> next_pre:f32[N,hc], post:f32[N,hc], comb:f32[N,hc,hc], u:bf16[N,C], u8:bf16[N,C]",
    order=ENTER)
def hyper_enter(x: Array, pre: Array, fn: Array, base: Array, scale: Array, w: Array, *, hc: int,
                iters: int, hc_eps: float, eps: float, norm_eps: float, block: int
                ) -> tuple[Array, ...]:
    """All that a sublayer begins with: ``hyper_mix(x)``, ``u = rms_norm(hyper_collapse(x, pre))``
    and ``u8 = fake_quantize_fp8(u)``.

    Args:
        x: residual streams. pre: collapse weight per stream, of the sublayer before.
        fn, base, scale, hc, iters, hc_eps, eps: as ``hyper_mix``. w, norm_eps: of the norm.
        block: elements per scale.
    Order: those of the four ops.
    Source: spec §2.3, §2.0.
    """
    u = rms_norm(hyper_collapse(x, pre), w, eps=norm_eps)
    mixes = hyper_mix(x, fn, base, scale, hc=hc, iters=iters, hc_eps=hc_eps, eps=eps)
    return *mixes, u, fake_quantize_fp8(u, block=block)


@op("y:bf16[N,C], x:bf16[N,hc,C], post:f32[N,hc], comb:f32[N,hc,hc], pre:f32[N,hc], "
    "fn:f32[M,C*hc], base:f32[M], scale:f32[3], w:bf16[C] -> streams:bf16[N,hc,C], "
    "next_pre:f32[N,hc], next_post:f32[N,hc], next_comb:f32[N,hc,hc], u:bf16[N,C], u8:bf16[N,C]",
    order=ENTER)
def hyper_post_enter(y: Array, x: Array, post: Array, comb: Array, pre: Array, fn: Array,
                     base: Array, scale: Array, w: Array, *, hc: int, iters: int, hc_eps: float,
                     eps: float, norm_eps: float, block: int) -> tuple[Array, ...]:
    """From the end of one sublayer into the next: ``streams = hyper_post(y, x, post, comb)``, then
    ``hyper_enter`` of them.

    Args:
        y, x, post, comb: as ``hyper_post``. The rest: as ``hyper_enter``.
    Order: that of ``hyper_post``, then that of ``hyper_enter``.
    Source: spec §2.3, §2.0.
    """
    streams = hyper_post(y, x, post, comb)
    return streams, *hyper_enter(streams, pre, fn, base, scale, w, hc=hc, iters=iters,
                                 hc_eps=hc_eps, eps=eps, norm_eps=norm_eps, block=block)
