"""sample on cpu: an item is a row; tokens are ranked only as far as top-k and top-p ask."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, call, const, dims, fold_lanes


@kernel("sample", items="Q", scratch=lambda spec: 8 * spec.dims["V"])
def sample(spec: Spec):
    Q, V = dims(spec, "Q", "V")
    purpose, lowest = spec.attrs["purpose"], const(float("-inf"))

    def scaled(logit, best, temperature):
        return T.if_then_else(logit == best, const(0), (logit - best) / temperature)

    @T.prim_func
    def body(logits: T.Tensor((Q, V), "float32"), temperature: T.Tensor((Q,), "float32"),
             top_k: T.Tensor((Q,), "int32"), top_p: T.Tensor((Q,), "float32"),
             min_p: T.Tensor((Q,), "float32"), seed: T.Tensor((Q,), "uint64"),
             position: T.Tensor((Q,), "int32"), token: T.Tensor((Q,), "int32"),
             scratch: T.Tensor((8 * V,), "uint8"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            q = lo + item
            best = T.alloc_var("float32")  # the largest logit, then the largest score
            pick = T.alloc_var("int32")
            best = lowest
            pick = 0
            for v in T.serial(V):
                if logits[q, v] > best:
                    best = logits[q, v]
                    pick = v
            if temperature[q] > const(0) and best > lowest:
                cutoff = T.alloc_var("uint64")  # a token is kept if its rank key is not below
                count = T.alloc_var("int32")  # tokens that can be chosen
                limit = T.alloc_var("int32")  # those of them that top-k keeps
                kept = T.alloc_var("int32")
                popped = T.alloc_var("int32")
                cutoff = T.uint64(0)
                popped = 0
                if top_p[q] < const(1) or top_k[q] > 0:
                    count = call("di_rank_start", T.access_ptr(logits[q, 0], "r"), V,
                                 T.access_ptr(scratch[0], "rw"), type="int32")
                    if top_k[q] > 0 and top_k[q] < count:
                        while popped < top_k[q]:
                            cutoff = call("di_rank_at", T.access_ptr(scratch[0], "rw"), count,
                                          popped, popped, type="uint64")
                            popped = popped + 1
                if top_p[q] < const(1):
                    mass = T.alloc_local((LANES,), "float32")
                    for l in T.serial(LANES):
                        mass[l] = const(0)
                    for c in T.serial((V + LANES - 1) // LANES):
                        for l in T.serial(T.min(LANES, V - c * LANES)):
                            x = logits[q, c * LANES + l]
                            if x > lowest and call("di_rank_key", x, c * LANES + l,
                                                   type="uint64") >= cutoff:
                                mass[l] = mass[l] + call("di_exp", scaled(x, best, temperature[q]))
                    fold_lanes(mass)
                    better = T.alloc_var("float32")
                    key = T.alloc_var("uint64")
                    goal = T.alloc_var("float32")
                    goal = top_p[q] * mass[0]
                    better = const(0)
                    kept = 0
                    limit = T.if_then_else(popped > 0, popped, count)
                    while kept < limit and (kept == 0 or better < goal):
                        key = call("di_rank_at", T.access_ptr(scratch[0], "rw"), count, popped,
                                   kept, type="uint64")
                        popped = T.max(popped, kept + 1)
                        x = logits[q, call("di_rank_token", key, type="int32")]
                        better = better + call("di_exp", scaled(x, best, temperature[q]))
                        kept = kept + 1
                    cutoff = key
                noise = T.alloc_var("uint64")
                score = T.alloc_var("float32")
                top = T.alloc_var("float32")
                noise = call("di_noise_stream", seed[q], position[q], T.uint32(purpose),
                             type="uint64")
                top = best
                best = lowest
                for v in T.serial(V):
                    x = logits[q, v]
                    if x > lowest and call("di_rank_key", x, v, type="uint64") >= cutoff:
                        score = scaled(x, top, temperature[q])
                        if min_p[q] <= const(0) or call("di_exp", score) >= min_p[q]:
                            # Noise above best - score needs -log(1 - u) < exp(score - best), and u
                            # is smaller yet: most tokens lose without a logarithm.
                            u = call("di_noise_uniform", noise, v)
                            if u <= call("di_exp", score - best) * const(1.001):
                                score = score + call("di_noise_gumbel", noise, v)
                                if score > best:
                                    best = score
                                    pick = v
            token[q] = pick

    return body
