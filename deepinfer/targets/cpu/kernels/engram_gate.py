"""engram_gate on cpu: an item is one stream of one token."""

import math

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, bf16, call, const, dims, f32, fold_lanes


@kernel("engram_gate", items="N*H")
def engram_gate(spec: Spec):
    N, H, C, Z = dims(spec, "N", "H", "C", "Z")
    eps, root = const(spec.attrs["eps"]), const(1 / math.sqrt(C))

    @T.prim_func
    def body(x: T.Tensor((N, H, C), "uint16"), kv: T.Tensor((N, Z), "uint16"),
             q_weight: T.Tensor((H, C), "uint16"), k_weight: T.Tensor((H, C), "uint16"),
             image: T.Tensor((N,), "uint8"), y: T.Tensor((N, H, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            n = (lo + item) // H
            h = (lo + item) % H
            dots = T.alloc_local((LANES,), "float32")
            squares = T.alloc_local((LANES,), "float32")
            key_squares = T.alloc_local((LANES,), "float32")
            for l in T.serial(LANES):
                dots[l] = const(0)
                squares[l] = const(0)
                key_squares[l] = const(0)
            for c in T.serial(C // LANES):
                for l in T.serial(LANES):
                    i = c * LANES + l
                    v = f32(x[n, h, i])
                    key = f32(kv[n, h * C + i])
                    dots[l] = dots[l] + v * (f32(q_weight[h, i]) * f32(k_weight[h, i])) * key
                    squares[l] = squares[l] + v * v
                    key_squares[l] = key_squares[l] + key * key
            fold_lanes(dots)
            fold_lanes(squares)
            fold_lanes(key_squares)
            dot = T.alloc_var("float32")
            gate = T.alloc_var("float32")
            dot = dots[0] * call("di_rsqrt", squares[0] / const(C) + eps)
            dot = dot * call("di_rsqrt", key_squares[0] / const(C) + eps)
            dot = dot * root
            gate = call("di_abs", dot)
            gate = T.sqrt(T.if_then_else(gate < const(1e-6), const(1e-6), gate))
            gate = call("di_sigmoid", call("copysignf", gate, dot))
            for c in T.serial(C):
                y[n, h, c] = T.if_then_else(
                    image[n] != 0, x[n, h, c],
                    bf16(f32(x[n, h, c]) + gate * f32(kv[n, H * C + c])))

    return body
