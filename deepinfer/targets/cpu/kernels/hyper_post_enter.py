"""hyper_post_enter on cpu: an item is a few rows, whose new streams stay in the cache."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, dims
from deepinfer.targets.cpu.kernels._hyper import enter_row, mix_macro, mix_space, post_row


@kernel("hyper_post_enter", items="N/rows", space=mix_space)
def hyper_post_enter(spec: Spec):
    rows, columns = spec.schedule["rows"], spec.schedule["columns"]
    hc, eps, block = spec.attrs["hc"], spec.attrs["norm_eps"], spec.attrs["block"]
    N, C, M = dims(spec, "N", "C", "M")
    mix = mix_macro(spec, rows)

    @T.prim_func
    def body(y: T.Tensor((N, C), "uint16"), x: T.Tensor((N, hc * C), "uint16"),
             post: T.Tensor((N, hc), "float32"), comb: T.Tensor((N, hc, hc), "float32"),
             pre: T.Tensor((N, hc), "float32"), fn: T.Tensor((M, hc * C), "float32"),
             base: T.Tensor((M,), "float32"), scale: T.Tensor((3,), "float32"),
             w: T.Tensor((C,), "uint16"), streams: T.Tensor((N, hc * C), "uint16"),
             next_pre: T.Tensor((N, hc), "float32"), next_post: T.Tensor((N, hc), "float32"),
             next_comb: T.Tensor((N, hc, hc), "float32"), u: T.Tensor((N, C), "uint16"),
             u8: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = (lo + item) * rows
            count = T.min(rows, N - first)
            acc = T.alloc_local((columns,), "float32")
            lanes = T.alloc_local((LANES,), "float32")
            for r in T.serial(count):
                post_row(acc, y, x, post, comb, streams, first + r, hc, C, columns)
            mix(streams, first, count, fn, base, scale, next_pre, next_post, next_comb)
            for r in T.serial(count):
                enter_row(acc, lanes, streams, pre, w, u, u8, first + r, hc, C,
                          columns, eps, block)

    return body
