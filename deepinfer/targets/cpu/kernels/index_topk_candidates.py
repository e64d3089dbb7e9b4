"""index_topk_candidates on cpu: an item is a row; scratch holds its scores, then block maxima.

The maxima take the place of scores already read: block b ends at or after entry b.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, const, dims
from deepinfer.targets.cpu.kernels.index_topk import max_entries, score_macros


@kernel("index_topk_candidates", items="N", scratch=lambda spec: 4 * max_entries(spec))
def index_topk_candidates(spec: Spec):
    N, H, I, R, P, E = dims(spec, "N", "H", "I", "R", "P", "E")
    pages_total = dims(spec, "T")
    k, ratio = spec.attrs["k"], spec.attrs["ratio"]
    block, count = spec.attrs["block"], spec.attrs["count"]
    *_, score_all = score_macros(H, I, E, spec.attrs["scale"])

    @T.prim_func
    def body(q: T.Tensor((N, H * I), "uint16"), w: T.Tensor((N, H), "uint16"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             pages: T.Tensor((R, P), "int32"), keys: T.Tensor((pages_total, E, I // 2), "uint8"),
             keys_sf: T.Tensor((pages_total, E, I // 32), "uint8"),
             idx: T.Tensor((N, k), "int32"), blocks: T.Tensor((N, count), "int32"),
             scratch: T.Tensor((P * E,), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            reach = T.min((positions[row] + 1) // ratio, P * E)
            score_all(q, w, row, pages, request[row], keys, keys_sf, reach, scratch)
            call("di_topk", T.access_ptr(scratch[0], "r"), reach, k, -1,
                 T.access_ptr(idx[row, 0], "w"), type="int32")
            for b in T.serial((reach + (block - 1)) // block):
                top = T.alloc_var("float32")
                top = const(float("-inf"))
                for j in T.serial(T.min(block, reach - b * block)):
                    v = scratch[b * block + j]
                    if T.And(v > top, v < const(float("inf"))):
                        top = v
                scratch[b] = top
            call("di_topk", T.access_ptr(scratch[0], "r"), (reach + (block - 1)) // block,
                 count, (reach + (block - 1)) // block - 1, T.access_ptr(blocks[row, 0], "w"),
                 type="int32")

    return body
