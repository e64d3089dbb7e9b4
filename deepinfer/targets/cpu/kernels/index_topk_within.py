"""index_topk_within on cpu: an item is a row; only the entries of its candidate blocks are read.

Scratch holds one score per rank: rank i is entry blocks[i // block] * block + i % block, so that
ranks ascend as entries do, and picks are mapped back at the end.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, const, dims
from deepinfer.targets.cpu.kernels.index_topk import TILE, score_macros


def ranks(spec: Spec) -> int:
    return -(-spec.dims["B"] * spec.attrs["block"] // TILE) * TILE


@kernel("index_topk_within", items="N", scratch=lambda spec: 4 * ranks(spec))
def index_topk_within(spec: Spec):
    N, H, I, R, P, E, B = dims(spec, "N", "H", "I", "R", "P", "E", "B")
    pages_total = dims(spec, "T")
    k, ratio, block = spec.attrs["k"], spec.attrs["ratio"], spec.attrs["block"]
    load, clear, weigh, score, _ = score_macros(H, I, E, spec.attrs["scale"])

    @T.prim_func
    def body(q: T.Tensor((N, H * I), "uint16"), w: T.Tensor((N, H), "uint16"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             pages: T.Tensor((R, P), "int32"), keys: T.Tensor((pages_total, E, I // 2), "uint8"),
             keys_sf: T.Tensor((pages_total, E, I // 32), "uint8"),
             blocks: T.Tensor((N, B), "int32"), idx: T.Tensor((N, k), "int32"),
             scratch: T.Tensor((ranks(spec),), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            r = request[row]
            reach = T.min((positions[row] + 1) // ratio, P * E)
            weights = T.alloc_local((1, H), "float32")
            tile = T.alloc_local((1, I // 2, TILE), "uint8")
            tile_sf = T.alloc_local((1, I // 32, TILE), "uint8")
            entries = T.alloc_local((TILE,), "int32")
            used = T.alloc_var("int32")
            weigh(w, row, 1, weights)
            for t in T.serial(ranks(spec) // TILE):
                used = 0
                for n in T.serial(TILE):
                    entries[n] = -1
                    if t * TILE + n < B * block:
                        b = blocks[row, (t * TILE + n) // block]
                        if T.And(b >= 0, b * block + (t * TILE + n) % block < reach):
                            entries[n] = b * block + (t * TILE + n) % block
                            used = used + 1
                if used > 0:
                    for n in T.serial(TILE):
                        if entries[n] >= 0:
                            load(keys, keys_sf, pages[r, entries[n] // E], entries[n] % E, tile,
                                 tile_sf, 0, n)
                        else:
                            clear(tile, tile_sf, 0, n)
                    score(q, weights, row, 1, tile, tile_sf, 1, scratch, t * TILE, 0)
                for n in T.serial(TILE):
                    if entries[n] < 0:
                        scratch[t * TILE + n] = const(float("-inf"))
            call("di_topk", T.access_ptr(scratch[0], "r"), B * block, k, -1,
                 T.access_ptr(idx[row, 0], "w"), type="int32")
            for j in T.serial(k):
                if idx[row, j] >= 0:
                    idx[row, j] = blocks[row, idx[row, j] // block] * block + idx[row, j] % block

    return body
