"""expert_reduce on cpu: an item is a token."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, dims, f32


@kernel("expert_reduce", items="N")
def expert_reduce(spec: Spec):
    N, K, C = dims(spec, "N", "K", "C")

    @T.prim_func
    def body(y: T.Tensor((N * K, C), "uint16"), shared: T.Tensor((N, C), "uint16"),
             out: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            n = lo + item
            total = T.alloc_local((C,), "float32")
            for c in T.serial(C):
                total[c] = f32(y[n * K, c])
            for j in T.serial(K - 1):
                for c in T.serial(C):
                    total[c] = total[c] + f32(y[n * K + j + 1, c])
            for c in T.serial(C):
                out[n, c] = bf16(total[c] + f32(shared[n, c]))

    return body
