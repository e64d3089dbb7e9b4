"""sparse_attention on cpu: an item is a row; its window tiles, then tiles of 64 picks."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, dims
from deepinfer.targets.cpu.kernels._attention import (
    LANES,
    TILE,
    clear_lanes,
    first_seen,
    softmax_macros,
    tile_bytes,
    tile_slots,
    window_macros,
)


@kernel("sparse_attention", items="N",
        scratch=lambda spec: tile_bytes(spec, spec.attrs["window"]))
def sparse_attention(spec: Spec):
    N, H, D, S, W, F, R, P, E, K = dims(spec, "N", "H", "D", "S", "W", "F", "R", "P", "E", "K")
    pages_total = dims(spec, "T")
    window = spec.attrs["window"]
    slots = tile_slots(window)  # the tile after them holds the picks
    clear = clear_lanes(D)
    start, attend, finish = softmax_macros(H, D, spec.attrs["scale"])
    _, follow, attend_window = window_macros(D, W, D // F, slots, attend)

    @T.prim_func
    def body(q: T.Tensor((N, H * D), "uint16"), k: T.Tensor((N, D), "uint8"),
             k_sf: T.Tensor((N, F), "uint8"), ring: T.Tensor((S, W, D), "uint8"),
             ring_sf: T.Tensor((S, W, F), "uint8"), sink: T.Tensor((H,), "float32"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), idx: T.Tensor((N, K), "int32"),
             pages: T.Tensor((R, P), "int32"), kv: T.Tensor((pages_total, E, D // 2), "uint8"),
             kv_sf: T.Tensor((pages_total, E, D // 16), "uint8"),
             o: T.Tensor((N, H * D), "uint16"),
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
            filled = T.alloc_var("int32")
            filled = 0
            for j in T.serial(K):
                entry = idx[row, j]
                if entry >= 0:  # ranks count picks only, so a -1 takes no lane
                    page = pages[r, entry // E]
                    call("di_key_e2m1", T.access_ptr(kv[page, entry % E, 0], "r"),
                         T.access_ptr(kv_sf[page, entry % E, 0], "r"), D,
                         T.access_ptr(scratch[0, slots, filled * D], "w"), type="int32")
                    filled = filled + 1
                if T.Or(filled == TILE, T.And(j == K - 1, filled > 0)):
                    clear(scratch, slots, filled, TILE)
                    call("di_pack_keys", T.access_ptr(scratch[0, slots, 0], "r"), D,
                         T.access_ptr(scratch[1, slots, 0], "w"), type="int32")
                    attend(scratch, slots, 0, filled, q_pairs, high, total, out)
                    filled = 0
            finish(sink, row, high, total, out, o)

    return body
