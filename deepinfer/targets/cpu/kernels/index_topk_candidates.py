"""index_topk_candidates on cpu: an item is some rows; scratch holds their scores, then maxima.

The maxima take the place of scores already read: block b ends at or after entry b.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, const, dims
from deepinfer.targets.cpu.kernels.index_topk import (
    TILES,
    row_stride,
    score_macros,
    scratch_bytes,
    space,
)


@kernel("index_topk_candidates", items="N/rows", space=space, scratch=scratch_bytes)
def index_topk_candidates(spec: Spec):
    N, H, I, R, P, E = dims(spec, "N", "H", "I", "R", "P", "E")
    pages_total = dims(spec, "T")
    k, ratio, rows = spec.attrs["k"], spec.attrs["ratio"], spec.schedule["rows"]
    block, wanted = spec.attrs["block"], spec.attrs["count"]
    *_, score_all = score_macros(H, I, E, spec.attrs["scale"], rows, TILES)
    stride = row_stride(P, E)

    @T.prim_func
    def body(q: T.Tensor((N, H * I), "uint16"), w: T.Tensor((N, H), "uint16"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             pages: T.Tensor((R, P), "int32"), keys: T.Tensor((pages_total, E, I // 2), "uint8"),
             keys_sf: T.Tensor((pages_total, E, I // 32), "uint8"),
             idx: T.Tensor((N, k), "int32"), blocks: T.Tensor((N, wanted), "int32"),
             scratch: T.Tensor((rows * stride,), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            reach = T.alloc_var("int32")
            at = T.alloc_var("int32")
            first = (lo + item) * rows
            end = T.min(first + rows, N)
            while first < end:
                count = 1
                for r in T.serial(1, end - first):
                    if T.And(count == r, request[first + r] == request[first]):
                        count = r + 1
                reach = T.min((positions[first + count - 1] + 1) // ratio, P * E)
                score_all(q, w, first, count, pages, request[first], keys, keys_sf, reach,
                          scratch, stride)
                for r in T.serial(count):
                    at = r * stride
                    reach = T.min((positions[first + r] + 1) // ratio, P * E)
                    call("di_topk", T.access_ptr(scratch[at], "r"), reach, k, -1,
                         T.access_ptr(idx[first + r, 0], "w"), type="int32")
                    for b in T.serial((reach + (block - 1)) // block):
                        top = T.alloc_var("float32")
                        top = const(float("-inf"))
                        for j in T.serial(T.min(block, reach - b * block)):
                            v = scratch[at + b * block + j]
                            if T.And(v > top, v < const(float("inf"))):
                                top = v
                        scratch[at + b] = top
                    call("di_topk", T.access_ptr(scratch[at], "r"),
                         (reach + (block - 1)) // block, wanted,
                         (reach + (block - 1)) // block - 1,
                         T.access_ptr(blocks[first + r, 0], "w"), type="int32")
                first = first + count

    return body
