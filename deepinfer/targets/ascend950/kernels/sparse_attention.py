"""sparse_attention on ascend950: a cube core and its two vector cores take up to 64 heads of a row.

Each vector core gathers and dequantises 32 keys of a tile of 64, twice over: as L1 has them for the
scores (keys are rows) and for the outputs (channels are rows: the cube unit wants both operands
along the sum). Both products run on the cube core in bf16; scores and a tile's outputs come back to
UB, each vector core getting half of the heads, for the online softmax. With two buffers the keys of
the next tile are gathered while the cube core computes the scores of this one.

The order of tiles and of the sum of P is the op's; sums over channels and keys have the cube unit's
order. The number of tiles is that of K picks, however many a row has: the cube core cannot count
them. A tile that no key of a row is in changes nothing (P is +0, the maximum stays).

Flags, from the vector cores: KEYS + stage, P, SCORES_FREE, OUTPUTS_FREE; from the cube core: SCORES,
OUTPUTS, KEYS_FREE + stage, P_FREE. Every "free" is set once before the loops and waited for once
after them.
"""

import tilelang.ascend.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.ascend950.dialect import (
    CUBES,
    SECOND,
    WARP,
    arrive,
    await_,
    dims,
    notify,
    wait,
)
from deepinfer.targets.ascend950.kernels._macros import count_bits, e2m1, power_of_two
from deepinfer.targets.base import Spec, grid, kernel

TILE, MOST_ROWS, THREADS = 64, 64, 256
HALF = TILE // 2  # keys of a tile that one vector core gathers
LOAD = 8  # channels a thread converts at a time
KEYS, KEYS_FREE, SCORES, SCORES_FREE, P, P_FREE, OUTPUTS, OUTPUTS_FREE = 0, 2, 4, 5, 6, 7, 8, 9


@T.macro
def arrive_both(pipe, flag):
    arrive(pipe, flag)
    arrive(pipe, flag + SECOND)


@T.macro
def await_both(pipe, flag):
    await_(pipe, flag)
    await_(pipe, flag + SECOND)


@T.macro
def pack_picks(lane, idx, row, K, picks, count):
    """One warp: the entries that are picks, in order, and how many there are."""
    filled = T.alloc_var("int32")
    entry = T.alloc_var("int32")
    taken = T.alloc_var("uint32")
    bits = T.alloc_local((1,), "uint32")
    filled = 0
    for c in T.serial(T.ceildiv(K, WARP)):
        entry = -1
        if c * WARP + lane < K:
            entry = idx[row, c * WARP + lane]
        taken = T.cast(T.ballot(entry >= 0), "uint32")
        bits[0] = taken & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
        count_bits(bits)
        if entry >= 0:
            picks[filled + T.cast(bits[0], "int32")] = entry
        bits[0] = taken
        count_bits(bits)
        filled = filled + T.cast(bits[0], "int32")
    if lane == 0:
        count[0] = filled


@T.macro
def warp_max(value):
    for step in T.unroll(5):
        value[0] = T.max(value[0], T.call_extern("float32", "asc_shfl_xor", value[0], 16 >> step))


@T.macro
def tile_sum(total, low, high):
    """Lane 0: the declared sum of 64 values, ``low`` of keys 0..31 and ``high`` of 32..63.

    16 lanes add keys l, l + 16, l + 32, l + 48, then a tree; the upper lanes compute along.
    """
    total[0] = low + T.call_extern("float32", "asc_shfl_xor", low, 16)
    total[0] = total[0] + high
    total[0] = total[0] + T.call_extern("float32", "asc_shfl_xor", high, 16)
    for step in T.unroll(4):
        total[0] = total[0] + T.call_extern("float32", "asc_shfl_xor", total[0], 8 >> step)


@kernel("sparse_attention", items="N", space=lambda spec: grid(buffers=(2, 1)))
def sparse_attention(spec: Spec):
    N, H, D, S, W, F, R, NP, E, K = dims(spec, "N", "H", "D", "S", "W", "F", "R", "P", "E", "K")
    pages_total = dims(spec, "T")
    window, scale, buffers = spec.attrs["window"], spec.attrs["scale"], spec.schedule["buffers"]
    if D % TILE:
        raise TargetError(f"head_dim = {D}, expected a multiple of {TILE}",
                          where="kernel sparse_attention on ascend950", next="use cpu")
    heads = min(MOST_ROWS, -(-H // 32) * 32)  # of a group: halves are whole fractals
    groups, rows, block = -(-H // heads), heads // 2, D // F
    picked_tiles, per_key = -(-K // TILE), D // LOAD

    @T.macro
    def gather_tile(u, half, row, s, positions, request, spans, k, k_sf, ring, ring_sf, pages, kv,
                    kv_sf, picks, count, keys_ub, values_ub):
        """Keys of tile u as bf16, both ways; keys that the row does not see become zeros."""
        with T.SimtVF(threads=THREADS):
            tx = T.get_thread_binding()
            codes = T.alloc_local((LOAD,), "float8_e4m3fn")
            factor = T.alloc_local((1,), "float32")
            converted = T.alloc_local((LOAD,), "bfloat16")
            position = T.alloc_var("int32")
            place = T.alloc_var("int32")
            position = positions[row]
            low = T.max(position - (window - 1), 0)
            window_tiles = position // TILE - low // TILE + 1
            first = spans[request[row], 1]
            for i in T.serial(HALF * per_key // THREADS):
                key = (i * THREADS + tx) // per_key
                c = (i * THREADS + tx) % per_key * LOAD
                at = (low // TILE + u) * TILE + half * HALF + key  # a position, in a window tile
                rank = (u - window_tiles) * TILE + half * HALF + key  # in the others
                for e in T.unroll(LOAD):
                    converted[e] = T.bfloat16(0)
                if u < window_tiles:
                    if T.And(at >= low, at <= position):
                        if at >= positions[first]:  # older positions are in the ring
                            place = first + at - positions[first]
                            for e in T.unroll(LOAD):
                                codes[e] = k[place, c + e]
                            power_of_two(factor, k_sf[place, c // block])
                        else:
                            place = spans[request[row], 0]
                            for e in T.unroll(LOAD):
                                codes[e] = ring[place, at % W, c + e]
                            power_of_two(factor, ring_sf[place, at % W, c // block])
                        for e in T.unroll(LOAD):
                            converted[e] = T.cast(T.cast(codes[e], "float32") * factor[0],
                                                  "bfloat16")
                elif rank < count[0]:
                    place = pages[request[row], picks[rank] // E]
                    codes[0] = kv_sf[place, picks[rank] % E, c // 16]
                    factor[0] = T.cast(codes[0], "float32")
                    for e in T.unroll(LOAD):
                        nibble = (T.cast(kv[place, picks[rank] % E, c // 2 + e // 2], "int32")
                                  >> (4 * (e % 2))) & 15
                        converted[e] = T.cast(e2m1(nibble) * factor[0], "bfloat16")
                for e in T.unroll(LOAD):
                    # [channels / 16][keys and one row of padding][16], [keys / 16][channels][16]
                    keys_ub[(c // 16 * (HALF + 1) + key) * 16 + c % 16 + e] = converted[e]
                    values_ub[(key // 16 * D + c + e) * 16 + key % 16] = converted[e]

    @T.macro
    def send_keys(half, s, keys_ub, values_ub, k_l1, v_l1):
        notify("V", "MTE3", 0)
        wait("V", "MTE3", 0)
        await_("MTE3", KEYS_FREE + s)
        T.ascend_nd2nz_post_copy(T.access_ptr(k_l1[s, half * HALF, 0], "w"),
                                 T.access_ptr(keys_ub[0], "r"), HALF, D, TILE, "bfloat16_t")
        T.ascend_nd2nz_post_copy(T.access_ptr(v_l1[s, 0, half * HALF], "w"),
                                 T.access_ptr(values_ub[0], "r"), HALF * D // 16, 16,
                                 HALF * D // 16, "bfloat16_t")
        arrive("MTE3", KEYS + s)
        notify("MTE3", "V", 0)

    @T.macro
    def softmax(u, row, positions, count, scores_ub, p_ub, high_ub, alpha_ub, total_ub):
        """A warp takes a head, a lane keys l and l + 32 of the tile."""
        with T.SimtVF(threads=THREADS):
            tx = T.get_thread_binding()
            lane = tx % WARP
            position = T.alloc_var("int32")
            p0 = T.alloc_var("float32")
            p1 = T.alloc_var("float32")
            high = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            position = positions[row]
            low = T.max(position - (window - 1), 0)
            window_tiles = position // TILE - low // TILE + 1
            at = (low // TILE + u) * TILE + lane
            rank = (u - window_tiles) * TILE + lane
            sees0 = T.if_then_else(u < window_tiles, T.And(at >= low, at <= position),
                                   rank < count[0])
            sees1 = T.if_then_else(u < window_tiles, T.And(at + 32 >= low, at + 32 <= position),
                                   rank + 32 < count[0])
            for j in T.serial(rows // (THREADS // WARP)):
                i = j * (THREADS // WARP) + tx // WARP
                p0 = scores_ub[i, lane] * T.float32(scale)
                p1 = scores_ub[i, lane + 32] * T.float32(scale)
                p0 = T.if_then_else(sees0, p0, -T.infinity("float32"))
                p1 = T.if_then_else(sees1, p1, -T.infinity("float32"))
                high[0] = T.max(p0, p1)
                warp_max(high)
                high[0] = T.max(high[0], high_ub[i])
                p0 = T.exp(p0 - high[0])  # of -inf: +0
                p1 = T.exp(p1 - high[0])
                tile_sum(total, p0, p1)
                p_ub[(lane // 16 * (rows + 1) + i) * 16 + lane % 16] = T.cast(p0, "bfloat16")
                p_ub[((lane // 16 + 2) * (rows + 1) + i) * 16 + lane % 16] = T.cast(p1, "bfloat16")
                if lane == 0:
                    alpha_ub[i] = T.exp(high_ub[i] - high[0])
                    total_ub[i] = total_ub[i] * alpha_ub[i] + total[0]
                    high_ub[i] = high[0]

    @T.prim_func
    def body(q: T.Tensor((N, H, D), "bfloat16"), k: T.Tensor((N, D), "float8_e4m3fn"),
             k_sf: T.Tensor((N, F), "uint8"), ring: T.Tensor((S, W, D), "float8_e4m3fn"),
             ring_sf: T.Tensor((S, W, F), "uint8"), sink: T.Tensor((H,), "float32"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 3), "int32"), idx: T.Tensor((N, K), "int32"),
             pages: T.Tensor((R, NP), "int32"), kv: T.Tensor((pages_total, E, D // 2), "uint8"),
             kv_sf: T.Tensor((pages_total, E, D // 16), "float8_e4m3fn"),
             o: T.Tensor((N, H, D), "bfloat16")):
        with T.Kernel(CUBES) as core:
            q_l1 = T.alloc_l1((heads, D), "bfloat16")
            k_l1 = T.alloc_l1((buffers, TILE, D), "bfloat16")
            v_l1 = T.alloc_l1((buffers, D, TILE), "bfloat16")
            p_l1 = T.alloc_l1((heads, TILE), "bfloat16")
            scores_l0c = T.alloc_l0c((heads, TILE), "float32")
            outputs_l0c = T.alloc_l0c((heads, D), "float32")
            scores_ub = T.alloc_shared((rows, TILE), "float32")
            outputs_ub = T.alloc_shared((rows, D), "float32")
            sum_ub = T.alloc_shared((rows, D), "float32")
            out_ub = T.alloc_shared((rows, D), "bfloat16")
            keys_ub = T.alloc_shared(((HALF + 1) * D,), "bfloat16")
            values_ub = T.alloc_shared((HALF * D,), "bfloat16")
            p_ub = T.alloc_shared((TILE * (rows + 1),), "bfloat16")
            high_ub = T.alloc_shared((rows,), "float32")
            alpha_ub = T.alloc_shared((rows,), "float32")
            total_ub = T.alloc_shared((rows,), "float32")
            picks = T.alloc_shared((K,), "int32")
            count = T.alloc_shared((1,), "int32")
            units = T.ceildiv(N * groups - core, CUBES)
            with T.Cube():
                notify("MTE1", "MTE2", 0)
                for i in T.unroll(2, explicit=True):
                    notify("FIX", "M", i)
                for i in T.unroll(buffers, explicit=True):
                    arrive_both("MTE1", KEYS_FREE + i)
                arrive_both("MTE1", P_FREE)
                for t in T.serial(units):
                    row = (t * CUBES + core) // groups
                    group = (t * CUBES + core) % groups
                    position = positions[row]
                    tiles = (position // TILE - T.max(position - (window - 1), 0) // TILE + 1
                             + picked_tiles)
                    wait("MTE1", "MTE2", 0)
                    T.copy(q[row, group * heads:(group + 1) * heads, 0:D], q_l1[:, :])
                    notify("MTE2", "MTE1", 0)
                    wait("MTE2", "MTE1", 0)
                    for u in T.serial(tiles):
                        s = u % buffers
                        await_both("MTE1", KEYS + s)
                        wait("FIX", "M", 0)
                        T.gemm(q_l1, k_l1[s, :, :], scores_l0c, transpose_B=True, clear_accum=True)
                        notify("M", "FIX", 0)
                        wait("M", "FIX", 0)
                        await_both("FIX", SCORES_FREE)
                        T.dual_copy(scores_l0c, scores_ub)
                        notify("FIX", "M", 0)
                        arrive_both("FIX", SCORES)
                        await_both("MTE1", P)
                        wait("FIX", "M", 1)
                        T.gemm(p_l1, v_l1[s, :, :], outputs_l0c, transpose_B=True,
                               clear_accum=True)
                        arrive_both("MTE1", P_FREE)
                        arrive_both("MTE1", KEYS_FREE + s)
                        notify("M", "FIX", 1)
                        wait("M", "FIX", 1)
                        await_both("FIX", OUTPUTS_FREE)
                        T.dual_copy(outputs_l0c, outputs_ub)
                        notify("FIX", "M", 1)
                        arrive_both("FIX", OUTPUTS)
                    notify("MTE1", "MTE2", 0)
                wait("MTE1", "MTE2", 0)
                for i in T.unroll(2, explicit=True):
                    wait("FIX", "M", i)
                await_both("FIX", SCORES_FREE)
                await_both("FIX", OUTPUTS_FREE)
            with T.Vector() as half:
                arrive("V", SCORES_FREE)
                arrive("V", OUTPUTS_FREE)
                for i in T.unroll(3, explicit=True):
                    notify("MTE3", "V", i)
                for t in T.serial(units):
                    row = (t * CUBES + core) // groups
                    first_head = (t * CUBES + core) % groups * heads + half * rows
                    position = positions[row]
                    tiles = (position // TILE - T.max(position - (window - 1), 0) // TILE + 1
                             + picked_tiles)
                    with T.SimtVF(threads=THREADS):
                        tx = T.get_thread_binding()
                        if tx < WARP:
                            pack_picks(tx, idx, row, K, picks, count)
                        if tx < rows:
                            high_ub[tx] = -T.infinity("float32")
                            total_ub[tx] = T.float32(0)
                    if buffers == 2:
                        wait("MTE3", "V", 0)
                        gather_tile(0, half, row, 0, positions, request, spans, k, k_sf, ring,
                                    ring_sf, pages, kv, kv_sf, picks, count, keys_ub, values_ub)
                        send_keys(half, 0, keys_ub, values_ub, k_l1, v_l1)
                    for u in T.serial(tiles):
                        if u + buffers - 1 < tiles:
                            ahead = u + buffers - 1
                            wait("MTE3", "V", 0)
                            gather_tile(ahead, half, row, ahead % buffers, positions, request,
                                        spans, k, k_sf, ring, ring_sf, pages, kv, kv_sf, picks,
                                        count, keys_ub, values_ub)
                            send_keys(half, ahead % buffers, keys_ub, values_ub, k_l1, v_l1)
                        await_("V", SCORES)
                        wait("MTE3", "V", 1)
                        softmax(u, row, positions, count, scores_ub, p_ub, high_ub, alpha_ub,
                                total_ub)
                        arrive("V", SCORES_FREE)
                        notify("V", "MTE3", 1)
                        wait("V", "MTE3", 1)
                        await_("MTE3", P_FREE)
                        T.ascend_nd2nz_post_copy(T.access_ptr(p_l1[half * rows, 0], "w"),
                                                 T.access_ptr(p_ub[0], "r"), rows, TILE, heads,
                                                 "bfloat16_t")
                        arrive("MTE3", P)
                        notify("MTE3", "V", 1)
                        await_("V", OUTPUTS)
                        with T.SimtVF(threads=THREADS):
                            tx = T.get_thread_binding()
                            for i in T.serial(rows * D // THREADS):
                                r, c = (i * THREADS + tx) // D, (i * THREADS + tx) % D
                                if u == 0:
                                    sum_ub[r, c] = outputs_ub[r, c]
                                else:
                                    sum_ub[r, c] = sum_ub[r, c] * alpha_ub[r] + outputs_ub[r, c]
                        arrive("V", OUTPUTS_FREE)
                    wait("MTE3", "V", 2)
                    with T.SimtVF(threads=THREADS):
                        tx = T.get_thread_binding()
                        for i in T.serial(rows * D // THREADS):
                            r, c = (i * THREADS + tx) // D, (i * THREADS + tx) % D
                            logit = sink[T.min(first_head + r, H - 1)]
                            out_ub[r, c] = T.cast(
                                sum_ub[r, c] / (total_ub[r] + T.exp(logit - high_ub[r])),
                                "bfloat16")
                    notify("V", "MTE3", 2)
                    wait("V", "MTE3", 2)
                    T.copy(out_ub, o[row, first_head:first_head + rows, 0:D])
                    notify("MTE3", "V", 2)
                for i in T.unroll(3, explicit=True):
                    wait("MTE3", "V", i)
                for i in T.unroll(buffers, explicit=True):
                    await_("MTE3", KEYS_FREE + i)
                await_("MTE3", P_FREE)

    return body
