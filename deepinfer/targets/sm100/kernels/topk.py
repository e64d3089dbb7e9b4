"""topk on sm100: a block is a row. A radix select finds the k-th largest key, a second walk packs.

Scores become unsigned keys that order like them; what may not be picked has key 0. Four passes over
eight bits each narrow the k-th largest key down; then entries above it, and the first ones equal to
it, are written in ascending order, each at the number of picks before it. Counts are integers, so
no order of threads changes a pick.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.sm100.dialect import WARP, bits_of, dims

BINS, BITS = 256, 8


@T.macro
def key_of(key, scores, row, i):
    """The order-preserving key of a finite score (-0 as +0), 0 of any other."""
    bits = bits_of(scores[row, i])
    key[0] = T.uint32(0)
    if (bits & T.uint32(0x7FFFFFFF)) < T.uint32(0x7F800000):
        if bits > T.uint32(0x80000000):
            key[0] = bits ^ T.uint32(0xFFFFFFFF)
        else:
            key[0] = bits | T.uint32(0x80000000)


@T.macro
def find_digit(lane, bins, state):
    """One warp: the digit of the ``state[1]``-th largest entry, from the counts of all digits.

    ``state`` = (digits found so far, rank among the entries that have them), updated. A rank beyond
    the last entry gives digit 0.
    """
    count = T.alloc_var("int32")
    upto = T.alloc_var("int32")
    before = T.alloc_var("int32")
    found = T.alloc_var("int32")
    rank = T.alloc_var("int32")
    count = 0
    for d in T.unroll(BINS // WARP):  # lane 0 has the highest digits
        count = count + bins[BINS - 1 - lane * (BINS // WARP) - d]
    upto = count
    for step in T.unroll(5):
        other = T.shfl_up(upto, 1 << step)
        if lane >= 1 << step:
            upto = upto + other
    before = upto - count
    rank = T.cast(state[1], "int32")
    T.sync_warp()
    if before < rank and (rank <= upto or lane == WARP - 1):
        found = 0
        for d in T.serial(BINS // WARP):
            digit = BINS - 1 - lane * (BINS // WARP) - d
            if found == 0:
                if before + bins[digit] >= rank or digit == 0:
                    found = 1
                    state[0] = (state[0] << T.uint32(BITS)) | T.cast(digit, "uint32")
                    state[1] = T.cast(rank - before, "uint32")
                else:
                    before = before + bins[digit]


@kernel("topk", items="N", space=lambda spec: grid(threads=(256, 512)))
def topk(spec: Spec):
    N, L = dims(spec, "N", "L")
    k, ratio, threads = spec.attrs["k"], spec.attrs["ratio"], spec.schedule["threads"]
    warps = threads // WARP

    @T.prim_func
    def body(scores: T.Tensor((N, L), "float32"), positions: T.Tensor((N,), "int32"),
             idx: T.Tensor((N, k), "int32")):
        with T.Kernel(N, threads=threads) as row:
            bins = T.alloc_shared((BINS,), "int32")
            state = T.alloc_shared((2,), "uint32")
            above_in = T.alloc_shared((warps,), "int32")
            equal_in = T.alloc_shared((warps,), "int32")
            key = T.alloc_local((1,), "uint32")
            above = T.alloc_var("int32")
            equal = T.alloc_var("int32")
            tx = T.get_thread_binding()
            lane, warp = tx % WARP, tx // WARP
            reach = T.max(T.min((positions[row] + 1) // ratio, L), 0)
            if tx == 0:
                state[0] = T.uint32(0)
                state[1] = T.uint32(k)
            for p in T.serial(32 // BITS):
                if tx < BINS:
                    bins[tx] = 0
                T.sync_threads()
                for c in T.serial(T.ceildiv(reach, threads)):
                    if c * threads + tx < reach:
                        key_of(key, scores, row, c * threads + tx)
                        shift = T.cast(32 - BITS - p * BITS, "uint32")
                        # p = 0: a shift by 32 is not defined, and every key takes part
                        higher = key[0] >> T.cast(32 - T.max(p, 1) * BITS, "uint32")
                        digit = T.cast((key[0] >> shift) & T.uint32(BINS - 1), "int32")
                        if p == 0 or higher == state[0]:
                            T.atomic_add(bins[digit], 1)
                T.sync_threads()
                if tx < WARP:
                    find_digit(lane, bins, state)
                T.sync_threads()
            above = 0  # entries above the threshold, and equal to it, before this chunk
            equal = 0
            for c in T.serial(T.ceildiv(reach, threads)):
                i = c * threads + tx
                key[0] = T.uint32(0)
                if i < reach:
                    key_of(key, scores, row, i)
                is_above = T.alloc_var("uint32")
                is_equal = T.alloc_var("uint32")
                is_above = T.ballot(key[0] > state[0])
                is_equal = T.ballot(T.And(key[0] == state[0], key[0] != T.uint32(0)))
                if lane == 0:
                    above_in[warp] = T.cast(T.popcount(is_above), "int32")
                    equal_in[warp] = T.cast(T.popcount(is_equal), "int32")
                T.sync_threads()
                lower = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
                before = T.alloc_var("int32")
                ties = T.alloc_var("int32")
                before = above + T.cast(T.popcount(is_above & lower), "int32")
                ties = equal + T.cast(T.popcount(is_equal & lower), "int32")
                for v in T.serial(warps):
                    if v < warp:
                        before = before + above_in[v]
                        ties = ties + equal_in[v]
                    above = above + above_in[v]
                    equal = equal + equal_in[v]
                quota = T.cast(state[1], "int32")
                if key[0] > state[0]:
                    idx[row, before + T.min(ties, quota)] = i
                elif T.And(T.And(key[0] == state[0], key[0] != T.uint32(0)), ties < quota):
                    idx[row, before + ties] = i
                T.sync_threads()
            for c in T.serial(T.ceildiv(k, threads)):
                place = c * threads + tx
                if T.And(place < k, place >= above + T.min(equal, T.cast(state[1], "int32"))):
                    idx[row, place] = -1

    return body
