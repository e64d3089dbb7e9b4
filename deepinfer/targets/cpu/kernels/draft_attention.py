"""draft_attention on cpu: an item is a row of a draft block."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels.window_attention import (
    LANES,
    TILE,
    first_seen,
    softmax_macros,
    window_macro,
)


@kernel("draft_attention", items="N")
def draft_attention(spec: Spec):
    N, H, D, S, W, F, R = dims(spec, "N", "H", "D", "S", "W", "F", "R")
    window = spec.attrs["window"]
    start, attend, finish = softmax_macros(H, D, spec.attrs["scale"])
    attend_window = window_macro(D, W, D // F, attend)

    @T.prim_func
    def body(q: T.Tensor((N, H * D), "uint16"), k: T.Tensor((N, D), "uint8"),
             k_sf: T.Tensor((N, F), "uint8"), ring: T.Tensor((S, W, D), "uint8"),
             ring_sf: T.Tensor((S, W, F), "uint8"), sink: T.Tensor((H,), "float32"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), o: T.Tensor((N, H * D), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            q_pairs = T.alloc_local((-(-H // LANES), D // 2, LANES, 2), "uint16")
            keys = T.alloc_local((TILE, D), "uint16")
            high = T.alloc_local((-(-H // LANES), LANES), "float32")
            total = T.alloc_local((-(-H // LANES), LANES), "float32")
            out = T.alloc_local((D // LANES, H, LANES), "float32")
            slot = spans[request[row], 0]
            first = spans[request[row], 1]
            last = spans[request[row], 2] - 1
            block_start = positions[first]
            low = T.alloc_var("int32")
            low = first_seen(block_start, window + 1, spans[request[row], 3])
            start(q, row, q_pairs, high, total, out)
            attend_window(low, positions[last], block_start, slot, first, k, k_sf, ring, ring_sf,
                          keys, q_pairs, high, total, out)
            finish(sink, row, high, total, out, o)

    return body
