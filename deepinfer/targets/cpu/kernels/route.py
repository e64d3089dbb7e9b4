"""route on cpu: an item is a token."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, const, dims


@kernel("route", items="N")
def route(spec: Spec):
    N, E = dims(spec, "N", "E")
    k, scale = spec.attrs["k"], spec.attrs["scale"]

    @T.prim_func
    def body(z: T.Tensor((N, E), "float32"), bias: T.Tensor((E,), "float32"),
             bias_vl: T.Tensor((E,), "float32"), image: T.Tensor((N,), "uint8"),
             idx: T.Tensor((N, k), "int32"), weight: T.Tensor((N, k), "float32"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            n = lo + item
            score = T.alloc_local((E,), "float32")
            key = T.alloc_local((E,), "float32")
            taken = T.alloc_local((E,), "int32")
            for e in T.serial(E):
                score[e] = T.sqrt(call("di_softplus", z[n, e]))
            for e in T.serial(E):
                key[e] = call("di_choice_key", score[e] + T.if_then_else(
                    image[n] != 0, bias_vl[e], bias[e]))
                taken[e] = 0
            best = T.alloc_var("int32")
            for _ in T.serial(k):
                best = -1
                for e in T.serial(E):
                    if taken[e] == 0:
                        if best < 0:
                            best = e
                        elif key[e] > key[best]:
                            best = e
                taken[best] = 1
            count = T.alloc_var("int32")
            total = T.alloc_var("float32")
            count = 0
            total = const(0)
            for e in T.serial(E):
                if taken[e] != 0:
                    idx[n, count] = e
                    weight[n, count] = score[e]
                    total = total + score[e]
                    count = count + 1
            for j in T.serial(k):
                if k > 1:
                    weight[n, j] = weight[n, j] / (total + const(1e-20))
                weight[n, j] = weight[n, j] * const(scale)

    return body
