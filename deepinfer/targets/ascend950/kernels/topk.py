"""topk on ascend950: a vector core takes a row. A radix select finds the k-th largest key, a second
walk packs.

Scores become unsigned keys that order like them; what may not be picked has key 0. Four passes over
eight bits each narrow the k-th largest key down; then entries above it, and the first ones equal to
it, are packed in ascending order, each at the number of picks before it. Counts are integers, so
no order of threads changes a pick. Threads read scores where they are: a row need not fit UB.
"""

import tilelang.ascend.language as T

from deepinfer.targets.ascend950.dialect import UNIT, VECTORS, WARP, bits_of, dims, notify, wait
from deepinfer.targets.ascend950.kernels._macros import count_bits
from deepinfer.targets.base import Spec, grid, kernel

BINS, BITS = 256, 8
PASSES = 32 // BITS


@T.macro
def key_of(key, scores, row, i):
    """The order-preserving key of a finite score (-0 as +0), 0 of any other."""
    bits = T.alloc_var("uint32")
    bits = bits_of(scores[row, i])
    key[0] = T.uint32(0)
    if (bits & T.uint32(0x7FFFFFFF)) < T.uint32(0x7F800000):
        if bits > T.uint32(0x80000000):
            key[0] = bits ^ T.uint32(0xFFFFFFFF)
        else:
            key[0] = bits | T.uint32(0x80000000)


@T.macro
def find_digit(lane, bins, state, p):
    """One warp: the digit of the ``state[p, 1]``-th largest entry, from the counts of all digits.

    A pass's state = (digits found so far, rank among the entries that have them); row p + 1 is
    made. A rank beyond the last entry gives digit 0.
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
        other = T.alloc_var("int32")
        other = T.call_extern("int32", "asc_shfl_up", upto, 1 << step)
        if lane >= 1 << step:
            upto = upto + other
    before = upto - count
    rank = T.cast(state[p, 1], "int32")
    if before < rank and (rank <= upto or lane == WARP - 1):
        found = 0
        for d in T.serial(BINS // WARP):
            digit = BINS - 1 - lane * (BINS // WARP) - d
            if found == 0:
                if before + bins[digit] >= rank or digit == 0:
                    found = 1
                    state[p + 1, 0] = (state[p, 0] << T.uint32(BITS)) | T.cast(digit, "uint32")
                    state[p + 1, 1] = T.cast(rank - before, "uint32")
                else:
                    before = before + bins[digit]


@kernel("topk", items="N", space=lambda spec: grid(threads=(512, 256)))
def topk(spec: Spec):
    N, L = dims(spec, "N", "L")
    k, ratio, threads = spec.attrs["k"], spec.attrs["ratio"], spec.schedule["threads"]
    warps = threads // WARP
    kept = -(-k * 4 // UNIT) * UNIT // 4  # picks of a row in UB: copies start at whole units

    @T.macro
    def select(tx, reach, scores, row, key, bins, state):
        """Leaves in the last row of ``state`` the k-th largest key, and how many equal it count."""
        if tx == 0:
            state[0, 0] = T.uint32(0)
            state[0, 1] = T.uint32(k)
        for p in T.serial(PASSES):
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
                    if p == 0 or higher == state[p, 0]:
                        T.atomic_add(bins[digit], 1)
            T.sync_threads()
            if tx < WARP:
                find_digit(tx, bins, state, p)
            T.sync_threads()

    @T.macro
    def pack(tx, reach, scores, row, key, state, above_in, equal_in, s, idx_ub):
        lane, warp = tx % WARP, tx // WARP
        above = T.alloc_var("int32")  # entries above the threshold, and equal to it, before
        equal = T.alloc_var("int32")  # this chunk
        quota = T.alloc_var("int32")
        bits = T.alloc_local((1,), "uint32")
        above = 0
        equal = 0
        quota = T.cast(state[PASSES, 1], "int32")
        for c in T.serial(T.ceildiv(reach, threads)):
            i = c * threads + tx
            key[0] = T.uint32(0)
            if i < reach:
                key_of(key, scores, row, i)
            is_above = T.alloc_var("uint32")
            is_equal = T.alloc_var("uint32")
            is_above = T.cast(T.ballot(key[0] > state[PASSES, 0]), "uint32")
            is_equal = T.cast(T.ballot(T.And(key[0] == state[PASSES, 0], key[0] != T.uint32(0))),
                              "uint32")
            if lane == 0:
                bits[0] = is_above
                count_bits(bits)
                above_in[warp] = T.cast(bits[0], "int32")
                bits[0] = is_equal
                count_bits(bits)
                equal_in[warp] = T.cast(bits[0], "int32")
            T.sync_threads()
            lower = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
            before = T.alloc_var("int32")
            ties = T.alloc_var("int32")
            bits[0] = is_above & lower
            count_bits(bits)
            before = above + T.cast(bits[0], "int32")
            bits[0] = is_equal & lower
            count_bits(bits)
            ties = equal + T.cast(bits[0], "int32")
            for v in T.serial(warps):
                if v < warp:
                    before = before + above_in[v]
                    ties = ties + equal_in[v]
                above = above + above_in[v]
                equal = equal + equal_in[v]
            if key[0] > state[PASSES, 0]:
                idx_ub[s, before + T.min(ties, quota)] = i
            elif T.And(T.And(key[0] == state[PASSES, 0], key[0] != T.uint32(0)), ties < quota):
                idx_ub[s, before + ties] = i
            T.sync_threads()
        for c in T.serial(T.ceildiv(k, threads)):
            place = c * threads + tx
            if T.And(place < k, place >= above + T.min(equal, quota)):
                idx_ub[s, place] = -1

    @T.prim_func
    def body(scores: T.Tensor((N, L), "float32"), positions: T.Tensor((N,), "int32"),
             idx: T.Tensor((N, k), "int32")):
        with T.Kernel(VECTORS) as core:
            bins = T.alloc_shared((BINS,), "int32")
            state = T.alloc_shared((PASSES + 1, 2), "uint32")
            above_in = T.alloc_shared((warps,), "int32")
            equal_in = T.alloc_shared((warps,), "int32")
            idx_ub = T.alloc_shared((2, kept), "int32")
            for s in T.unroll(2, explicit=True):
                notify("MTE3", "V", s)
            for t in T.serial(T.ceildiv(N - core, VECTORS)):
                row = t * VECTORS + core
                wait("MTE3", "V", t % 2)
                with T.SimtVF(threads=threads):
                    tx = T.get_thread_binding()
                    key = T.alloc_local((1,), "uint32")
                    reach = T.alloc_var("int32")
                    reach = T.max(T.min((positions[row] + 1) // ratio, L), 0)
                    select(tx, reach, scores, row, key, bins, state)
                    pack(tx, reach, scores, row, key, state, above_in, equal_in, t % 2, idx_ub)
                notify("V", "MTE3", t % 2)
                wait("V", "MTE3", t % 2)
                T.copy(idx_ub[t % 2, 0:k], idx[row, 0:k])
                notify("MTE3", "V", t % 2)
            for s in T.unroll(2, explicit=True):
                wait("MTE3", "V", s)

    return body
