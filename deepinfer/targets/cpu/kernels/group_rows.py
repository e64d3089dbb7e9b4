"""group_rows on cpu: one item, a counting sort in the order of the pairs."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("group_rows", items="1")
def group_rows(spec: Spec):
    N, K = dims(spec, "N", "K")
    experts = spec.attrs["experts"]

    @T.prim_func
    def body(idx: T.Tensor((N, K), "int32"), order: T.Tensor((N * K,), "int32"),
             offsets: T.Tensor((experts + 1,), "int32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as _:
            free = T.alloc_local((experts,), "int32")  # where the next pair of an expert goes
            for e in T.serial(experts):
                free[e] = 0
            for n, j in T.grid(N, K):
                free[idx[n, j]] = free[idx[n, j]] + 1
            offsets[0] = 0
            for e in T.serial(experts):
                offsets[e + 1] = offsets[e] + free[e]
                free[e] = offsets[e]
            for n, j in T.grid(N, K):
                order[free[idx[n, j]]] = n * K + j
                free[idx[n, j]] = free[idx[n, j]] + 1

    return body
