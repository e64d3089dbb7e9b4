"""engram_hash on cpu: an item is a token; the primes are constants, so divisions are products."""

from itertools import accumulate

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("engram_hash", items="N")
def engram_hash(spec: Spec):
    N, A, V = dims(spec, "N", "A", "V")
    attrs = spec.attrs
    multipliers, primes, heads = attrs["multipliers"], attrs["primes"], attrs["heads"]
    offsets = tuple(accumulate(primes, initial=0))

    def pick(values, i):
        """values[i] of a constant table, for an index that unrolling makes constant."""
        found = T.int64(values[-1])
        for at, value in enumerate(values[:-1]):
            found = T.if_then_else(i == at, T.int64(value), found)
        return found

    @T.prim_func
    def body(lookback: T.Tensor((N, A), "int32"), image: T.Tensor((N,), "uint8"),
             token_map: T.Tensor((V,), "int32"), rows: T.Tensor((N, attrs["columns"]), "int64"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            n = lo + item
            open_ = T.alloc_var("bool")
            rho = T.alloc_var("uint64")
            term = T.alloc_var("int64")
            rest = T.alloc_var("int64")
            open_ = image[n] == 0
            rho = T.uint64(0)
            for i in T.unroll(A, explicit=True):
                if lookback[n, i] < 0 or lookback[n, i] >= V:
                    open_ = False
                term = T.cast(token_map[attrs["pad"]], "int64")
                if open_:
                    term = T.cast(token_map[lookback[n, i]], "int64")
                # Unsigned, where a product may wrap.
                rho = rho ^ (T.cast(term, "uint64") * T.cast(pick(multipliers, i), "uint64"))
                if i > 0:
                    for h in T.unroll(heads, explicit=True):
                        rest = T.truncmod(T.cast(rho, "int64"), pick(primes, (i - 1) * heads + h))
                        if rest < 0:
                            rest = rest + pick(primes, (i - 1) * heads + h)
                        rows[n, (i - 1) * heads + h] = rest + pick(offsets, (i - 1) * heads + h)

    return body
