"""adjust_logits on cpu: an item is a row; it is copied, then its few tokens are changed."""

import tilelang.language as T

from deepinfer.ops.adjust import WORD
from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import const, dims


@kernel("adjust_logits", items="Q")
def adjust_logits(spec: Spec):
    Q, V, E, B, M = dims(spec, "Q", "V", "E", "B", "M")
    words, lowest = -(-V // WORD), const(float("-inf"))

    @T.macro
    def change(adjusted, q, token, known, n, bias, repetition, frequency, presence):
        x = T.alloc_var("float32")
        x = adjusted[q, token]
        if known:
            x = T.if_then_else(x > const(0), x / repetition[q], x * repetition[q])
        if n > 0:
            x = x - frequency[q] * T.cast(n, "float32")
            x = x - presence[q]
        if bias != const(0):
            x = x + bias
        adjusted[q, token] = x

    @T.prim_func
    def body(logits: T.Tensor((Q, V), "float32"), entries: T.Tensor((Q, 2), "int32"),
             ids: T.Tensor((E,), "int32"), counts: T.Tensor((E,), "int32"),
             seen: T.Tensor((E,), "uint8"), bias: T.Tensor((E,), "float32"),
             repetition: T.Tensor((Q,), "float32"), frequency: T.Tensor((Q,), "float32"),
             presence: T.Tensor((Q,), "float32"), recent: T.Tensor((Q, B), "int32"),
             mask_row: T.Tensor((Q,), "int32"), masks: T.Tensor((M, words), "int32"),
             adjusted: T.Tensor((Q, V), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            q = lo + item
            drafted = T.alloc_var("int32")
            left = T.alloc_local((B,), "int32")  # drafts that no entry is about
            for v in T.serial(V):
                adjusted[q, v] = logits[q, v]
            for b in T.serial(B):
                left[b] = recent[q, b]
            for e in T.serial(entries[q, 0], entries[q, 1]):
                drafted = 0
                for b in T.serial(B):
                    if recent[q, b] == ids[e]:
                        drafted = drafted + 1
                        left[b] = -1
                change(adjusted, q, ids[e], T.Or(seen[e] != T.uint8(0), drafted > 0),
                       counts[e] + drafted, bias[e], repetition, frequency, presence)
            for b in T.serial(B):
                token = T.alloc_var("int32")
                token = left[b]
                if token >= 0:
                    drafted = 0
                    for other in T.serial(B):
                        if left[other] == token:
                            drafted = drafted + 1
                            left[other] = -1
                    change(adjusted, q, token, drafted > 0, drafted, const(0), repetition,
                           frequency, presence)
            if mask_row[q] >= 0:
                for v in T.serial(V):
                    if (masks[mask_row[q], v // WORD] >> (v % WORD)) & 1 == 0:
                        adjusted[q, v] = lowest

    return body
