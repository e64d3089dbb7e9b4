"""logprobs on cpu: an item is a row; the best k are kept sorted while the row is read."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, call, const, dims, fold_lanes


@kernel("logprobs", items="Q")
def logprobs(spec: Spec):
    Q, V = dims(spec, "Q", "V")
    k, lowest = spec.attrs["k"], const(float("-inf"))

    @T.prim_func
    def body(logits: T.Tensor((Q, V), "float32"), token: T.Tensor((Q,), "int32"),
             chosen: T.Tensor((Q,), "float32"), top_ids: T.Tensor((Q, k), "int32"),
             top: T.Tensor((Q, k), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            q = lo + item
            value = T.alloc_var("float32")
            count = T.alloc_var("int32")
            at = T.alloc_var("int32")
            best = T.alloc_local((k + 1,), "float32")  # one more than is kept: the one pushed out
            ids = T.alloc_local((k + 1,), "int32")
            count = 0
            for j in T.serial(k + 1):
                best[j] = lowest
                ids[j] = 0
            for v in T.serial(V):
                value = call("di_choice_key", logits[q, v])
                if count < k or value > best[k - 1]:
                    at = count
                    while at > 0 and value > best[T.max(at - 1, 0)]:
                        best[at] = best[at - 1]
                        ids[at] = ids[at - 1]
                        at = at - 1
                    best[at] = value
                    ids[at] = v
                    count = T.min(count + 1, k)
            acc = T.alloc_local((LANES,), "float32")
            for l in T.serial(LANES):
                acc[l] = const(0)
            for c in T.serial(V // LANES):
                for l in T.serial(LANES):
                    acc[l] = acc[l] + call("di_exp", logits[q, c * LANES + l] - best[0])
            for l in T.serial(V % LANES):
                acc[l] = acc[l] + call("di_exp", logits[q, V // LANES * LANES + l] - best[0])
            fold_lanes(acc)
            acc[0] = call("di_log", acc[0])
            chosen[q] = (logits[q, token[q]] - best[0]) - acc[0]
            for j in T.serial(k):
                top_ids[q, j] = ids[j]
                top[q, j] = (logits[q, ids[j]] - best[0]) - acc[0]

    return body
