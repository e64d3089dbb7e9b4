"""window_attention on cpu: an item is a row, whose heads share each tile of keys."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._attention import (
    LANES,
    TILE,
    first_seen,
    softmax_macros,
    tile_bytes,
    tile_slots,
    window_macros,
)


@kernel("window_attention", items="N",
        scratch=lambda spec: tile_bytes(spec, spec.attrs["window"]))
def window_attention(spec: Spec):
    N, H, D, S, W, F, R = dims(spec, "N", "H", "D", "S", "W", "F", "R")
    window = spec.attrs["window"]
    slots = tile_slots(window)
    start, attend, finish = softmax_macros(H, D, spec.attrs["scale"])
    _, follow, attend_window = window_macros(D, W, D // F, slots, attend)

    @T.prim_func
    def body(q: T.Tensor((N, H * D), "uint16"), k: T.Tensor((N, D), "uint8"),
             k_sf: T.Tensor((N, F), "uint8"), ring: T.Tensor((S, W, D), "uint8"),
             ring_sf: T.Tensor((S, W, F), "uint8"), sink: T.Tensor((H,), "float32"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), o: T.Tensor((N, H * D), "uint16"),
             scratch: T.Tensor((2, slots + 1, TILE * D), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            q_pairs = T.alloc_local((-(-H // LANES), D // 2, LANES, 2), "uint16")
            high = T.alloc_local((-(-H // LANES), LANES), "float32")
            total = T.alloc_local((-(-H // LANES), LANES), "float32")
            out = T.alloc_local((D // LANES, H, LANES), "float32")
            r = request[row]
            position = positions[row]
            low = T.alloc_var("int32")
            low = first_seen(position, window, spans[r, 3])
            follow(item, row, window, low, positions, request, spans, k, k_sf, ring, ring_sf,
                   scratch)
            start(q, row, q_pairs, high, total, out)
            attend_window(low, position, scratch, q_pairs, high, total, out)
            finish(sink, row, high, total, out, o)

    return body
