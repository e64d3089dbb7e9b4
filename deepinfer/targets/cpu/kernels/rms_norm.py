"""rms_norm on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, bf16, call, const, dims, f32, fold_lanes


@kernel("rms_norm", items="N")
def rms_norm(spec: Spec):
    N, C = dims(spec, "N", "C")

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), w: T.Tensor((C,), "uint16"),
             y: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            acc = T.alloc_local((LANES,), "float32")
            for l in T.serial(LANES):
                acc[l] = const(0)
            for c in T.serial(C // LANES):
                for l in T.serial(LANES):
                    v = f32(x[row, c * LANES + l])
                    acc[l] = acc[l] + v * v
            fold_lanes(acc)
            r = T.alloc_var("float32")
            r = call("di_rsqrt", acc[0] / const(C) + const(spec.attrs["eps"]))
            for c in T.serial(C):
                y[row, c] = bf16(f32(w[c]) * (f32(x[row, c]) * r))

    return body
