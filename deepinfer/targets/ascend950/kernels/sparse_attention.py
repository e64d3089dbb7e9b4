"""sparse_attention on ascend950: a cube core and its two vector cores take up to 64 heads of a row.

Each vector core gathers and dequantises 32 keys of a tile of 64, twice over: as L1 has them for the
scores (keys are rows) and for the outputs (channels are rows: the cube unit wants both operands
along the sum). Both products run on the cube core in bf16; scores and a tile's outputs come back to
UB, each vector core getting half of the heads, for the online softmax. With two buffers the keys of
the next tile are gathered while the cube core computes the scores of this one.

The order of tiles and of the sum of P is the op's; sums over channels and keys have the cube unit's
order. The number of tiles is that of K picks, however many a row has: the cube core cannot count
them. A tile that no key of a row is in changes nothing (P is +0, the maximum stays).

Flags, from the vector cores: KEYS + stage and P; from the cube core: SCORES, OUTPUTS and
KEYS_FREE + stage, which is set once before the loops and waited for once after them. No more are
needed: scores, P and outputs go round in a ring (scores, softmax, P, outputs, sum, next softmax),
so whoever makes the next one has been told, on the way, that the last one was taken.
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
from deepinfer.targets.ascend950.kernels._gather import (
    HALF,
    THREADS,
    TILE,
    first_seen,
    gatherer,
    pack_picks,
)
from deepinfer.targets.base import Spec, grid, kernel

MOST_HEADS = 64  # of a group
KEYS, KEYS_FREE, SCORES, P, OUTPUTS = 0, 2, 4, 5, 6


@T.macro
def arrive_both(pipe, flag):
    arrive(pipe, flag)
    arrive(pipe, flag + SECOND)


@T.macro
def await_both(pipe, flag):
    await_(pipe, flag)
    await_(pipe, flag + SECOND)


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
    heads = min(MOST_HEADS, -(-H // 32) * 32)  # of a group: halves are whole fractals
    groups, rows, picked_tiles = -(-H // heads), heads // 2, -(-K // TILE)
    gather_tile = gatherer(D, F, W, E, window)

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
    def softmax(u, row, positions, request, spans, count, scores_ub, p_ub, high_ub, alpha_ub,
                total_ub):
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
            low = first_seen(position, window, spans[request[row], 3])
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
             spans: T.Tensor((R, 4), "int32"), idx: T.Tensor((N, K), "int32"),
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
            keys_ub = T.alloc_shared(((HALF + 1) * D,), "bfloat16")
            values_ub = T.alloc_shared((HALF * D,), "bfloat16")
            out_ub = T.view(values_ub, (HALF, D), "bfloat16")  # after the last tile of a row
            p_ub = T.alloc_shared((TILE * (rows + 1),), "bfloat16")
            high_ub = T.alloc_shared((rows,), "float32")
            alpha_ub = T.alloc_shared((rows,), "float32")
            total_ub = T.alloc_shared((rows,), "float32")
            picks = T.alloc_shared((K,), "int32")
            count = T.alloc_shared((1,), "int32")
            units = T.ceildiv(N * groups - core, CUBES)
            with T.Cube():
                notify("MTE1", "MTE2", 0)
                notify("M", "MTE1", 2)  # 0 and 1 are TileLang's
                for i in T.unroll(buffers, explicit=True):
                    arrive_both("MTE1", KEYS_FREE + i)
                for t in T.serial(units):
                    row = (t * CUBES + core) // groups
                    group = (t * CUBES + core) % groups
                    position = positions[row]
                    low = first_seen(position, window, spans[request[row], 3])
                    tiles = position // TILE - low // TILE + 1 + picked_tiles
                    wait("MTE1", "MTE2", 0)
                    T.copy(q[row, group * heads:(group + 1) * heads, 0:D], q_l1[:, :])
                    notify("MTE2", "MTE1", 0)
                    wait("MTE2", "MTE1", 0)
                    for u in T.serial(tiles):
                        s = u % buffers
                        await_both("MTE1", KEYS + s)
                        # The two products cut L0A and L0B into stages of different sizes, so the
                        # locks of a stage do not keep this one off what the last one still reads.
                        wait("M", "MTE1", 2)
                        T.gemm(q_l1, k_l1[s, :, :], scores_l0c, transpose_B=True, clear_accum=True)
                        notify("M", "FIX", 0)
                        wait("M", "FIX", 0)
                        T.dual_copy(scores_l0c, scores_ub)
                        arrive_both("FIX", SCORES)
                        await_both("MTE1", P)
                        T.gemm(p_l1, v_l1[s, :, :], outputs_l0c, transpose_B=True,
                               clear_accum=True)
                        arrive_both("MTE1", KEYS_FREE + s)
                        notify("M", "MTE1", 2)
                        notify("M", "FIX", 1)
                        wait("M", "FIX", 1)
                        T.dual_copy(outputs_l0c, outputs_ub)
                        arrive_both("FIX", OUTPUTS)
                    notify("MTE1", "MTE2", 0)
                wait("MTE1", "MTE2", 0)
                wait("M", "MTE1", 2)
            with T.Vector() as half:
                notify("MTE3", "V", 0)
                for t in T.serial(units):
                    row = (t * CUBES + core) // groups
                    first_head = (t * CUBES + core) % groups * heads + half * rows
                    position = positions[row]
                    low = first_seen(position, window, spans[request[row], 3])
                    tiles = position // TILE - low // TILE + 1 + picked_tiles
                    with T.SimtVF(threads=THREADS):
                        tx = T.get_thread_binding()
                        if tx < WARP:
                            pack_picks(tx, idx, row, K, picks, count)
                        if tx < rows:
                            high_ub[tx] = -T.infinity("float32")
                            total_ub[tx] = T.float32(0)
                    if buffers == 2:
                        wait("MTE3", "V", 0)
                        gather_tile(0, half, row, positions, request, spans, k, k_sf, ring,
                                    ring_sf, pages, kv, kv_sf, picks, count, keys_ub, values_ub)
                        send_keys(half, 0, keys_ub, values_ub, k_l1, v_l1)
                    for u in T.serial(tiles):
                        if u + buffers - 1 < tiles:
                            ahead = u + buffers - 1
                            wait("MTE3", "V", 0)
                            gather_tile(ahead, half, row, positions, request, spans, k, k_sf,
                                        ring, ring_sf, pages, kv, kv_sf, picks, count, keys_ub,
                                        values_ub)
                            send_keys(half, ahead % buffers, keys_ub, values_ub, k_l1, v_l1)
                        await_("V", SCORES)
                        softmax(u, row, positions, request, spans, count, scores_ub, p_ub,
                                high_ub, alpha_ub, total_ub)
                        notify("V", "MTE3", 1)
                        wait("V", "MTE3", 1)
                        T.ascend_nd2nz_post_copy(T.access_ptr(p_l1[half * rows, 0], "w"),
                                                 T.access_ptr(p_ub[0], "r"), rows, TILE, heads,
                                                 "bfloat16_t")
                        arrive("MTE3", P)
                        await_("V", OUTPUTS)
                        with T.SimtVF(threads=THREADS):
                            tx = T.get_thread_binding()
                            for i in T.serial(rows * D // THREADS):
                                r, c = (i * THREADS + tx) // D, (i * THREADS + tx) % D
                                if u == 0:
                                    sum_ub[r, c] = outputs_ub[r, c]
                                else:
                                    sum_ub[r, c] = sum_ub[r, c] * alpha_ub[r] + outputs_ub[r, c]
                    wait("MTE3", "V", 0)
                    with T.SimtVF(threads=THREADS):
                        tx = T.get_thread_binding()
                        for i in T.serial(rows * D // THREADS):
                            r, c = (i * THREADS + tx) // D, (i * THREADS + tx) % D
                            logit = sink[T.min(first_head + r, H - 1)]
                            out_ub[r, c] = T.cast(
                                sum_ub[r, c] / (total_ub[r] + T.exp(logit - high_ub[r])),
                                "bfloat16")
                    notify("V", "MTE3", 0)
                    wait("V", "MTE3", 0)
                    T.copy(out_ub[0:rows, 0:D], o[row, first_head:first_head + rows, 0:D])
                    notify("MTE3", "V", 0)
                wait("MTE3", "V", 0)
                for i in T.unroll(buffers, explicit=True):
                    await_("MTE3", KEYS_FREE + i)

    return body
