"""sparse_attention on sm100: a block is 64 heads of a row; both products run on tcgen05 in bf16.

All threads gather and dequantise a tile of 64 keys into shared memory, which serves as K of the
scores and, untransposed, as V of the outputs. Scores and outputs live in tensor memory; the online
softmax is done in registers, and outputs are rescaled in place. With two buffers the keys of the
next tile are gathered while the scores of this one are computed. The order of tiles is the op's;
within a tile the sums have tcgen05's order, and the order of P's sum is that of the layout below,
which no schedule changes.
"""

import tilelang.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.sm100.dialect import WARP, dims, float_of

TILE, ROWS, THREADS = 64, 64, 256
LOAD = 8  # channels a thread converts at a time: one 16-byte store


@T.macro
def power_of_two(scale, code):
    """2^(code - 127) of a ue8m0 code; code 0 is the denormal 2^-127."""
    bits = T.cast(code, "int32") << 23
    scale[0] = float_of(T.if_then_else(bits == 0, 0x400000, bits))


def e2m1(nibble):
    """float32 of an e2m1 code: a sign, two bits of exponent, one of significand."""
    exponent, odd = nibble // 2 % 4, nibble % 2
    twice = T.if_then_else(exponent == 0, odd, (2 + odd) << T.max(exponent - 1, 0))
    return T.cast(T.if_then_else(nibble >= 8, -twice, twice), "float32") * T.float32(0.5)


@T.macro
def pack_picks(lane, idx, row, K, picks, count):
    """One warp: the entries that are picks, in order, and how many there are."""
    filled = T.alloc_var("int32")
    entry = T.alloc_var("int32")
    filled = 0
    for c in T.serial(T.ceildiv(K, WARP)):
        entry = -1
        if c * WARP + lane < K:
            entry = idx[row, c * WARP + lane]
        taken = T.alloc_var("uint32")
        taken = T.ballot(entry >= 0)
        if entry >= 0:
            lower = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
            picks[filled + T.cast(T.popcount(taken & lower), "int32")] = entry
        filled = filled + T.cast(T.popcount(taken), "int32")
    if lane == 0:
        count[0] = filled


@kernel("sparse_attention", items="N", space=lambda spec: grid(buffers=(2, 1)))
def sparse_attention(spec: Spec):
    N, H, D, S, W, F, R, P, E, K = dims(spec, "N", "H", "D", "S", "W", "F", "R", "P", "E", "K")
    pages_total = dims(spec, "T")
    window, scale, buffers = spec.attrs["window"], spec.attrs["scale"], spec.schedule["buffers"]
    if D % TILE or D % (THREADS // TILE * LOAD):
        raise TargetError(f"head_dim = {D}, expected a multiple of {TILE}",
                          where="kernel sparse_attention on sm100", next="use cpu")
    width = 128 if D % 128 == 0 else 64  # columns of one accumulator
    parts, block = D // width, D // F
    per_key = THREADS // TILE

    @T.macro
    def gather(u, tx, place, row_of, k, k_sf, ring, ring_sf, picks, count,
               pages, kv, kv_sf, keys, codes, pairs, factor, converted):
        """Tile u into its buffer as bf16; keys that the row does not see become zeros.

        place: (first position seen, last one, number of window tiles).
        row_of: (index into spans, slot, first row, position of that row).
        """
        low, position, window_tiles = place
        request_row, slot, first, start = row_of
        key = tx // per_key
        at = (low // TILE + u) * TILE + key  # a position, in a window tile
        rank = (u - window_tiles) * TILE + key  # among the picks, in the others
        for g in T.serial(D // (per_key * LOAD)):
            c = (g * per_key + tx % per_key) * LOAD
            for e in T.unroll(LOAD):
                converted[e] = T.bfloat16(0)
            if u < window_tiles:
                if T.And(at >= low, at <= position):
                    if at >= start:  # older positions are in the ring
                        for e in T.vectorized(LOAD):
                            codes[e] = k[first + at - start, c + e]
                        power_of_two(factor, k_sf[first + at - start, c // block])
                    else:
                        for e in T.vectorized(LOAD):
                            codes[e] = ring[slot, at % W, c + e]
                        power_of_two(factor, ring_sf[slot, at % W, c // block])
                    for e in T.unroll(LOAD):
                        converted[e] = T.cast(T.cast(codes[e], "float32") * factor[0], "bfloat16")
            elif rank < count[0]:
                page = pages[request_row, picks[rank] // E]
                for e in T.vectorized(LOAD // 2):
                    pairs[e] = kv[page, picks[rank] % E, c // 2 + e]
                factor[0] = T.cast(kv_sf[page, picks[rank] % E, c // 16], "float32")
                for e in T.unroll(LOAD):
                    nibble = (T.cast(pairs[e // 2], "int32") >> (4 * (e % 2))) & 15
                    converted[e] = T.cast(e2m1(nibble) * factor[0], "bfloat16")
            for e in T.vectorized(LOAD):
                keys[u % buffers * parts + c // width, key, c % width + e] = converted[e]

    @T.macro
    def wait_outputs(summed, u):
        """The outputs of tile u are in: its keys and P may be overwritten."""
        T.mbarrier_wait_parity(summed, u % 2)
        T.tcgen05_after_thread_sync()

    @T.prim_func
    def body(q: T.Tensor((N, H * D), "bfloat16"), k: T.Tensor((N, D), "float8_e4m3fn"),
             k_sf: T.Tensor((N, F), "uint8"), ring: T.Tensor((S, W, D), "float8_e4m3fn"),
             ring_sf: T.Tensor((S, W, F), "uint8"), sink: T.Tensor((H,), "float32"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), idx: T.Tensor((N, K), "int32"),
             pages: T.Tensor((R, P), "int32"), kv: T.Tensor((pages_total, E, D // 2), "uint8"),
             kv_sf: T.Tensor((pages_total, E, D // 16), "float8_e4m3fn"),
             o: T.Tensor((N, H * D), "bfloat16")):
        with T.Kernel(T.ceildiv(H, ROWS), N, threads=THREADS) as (group, row):
            q_shared = T.alloc_shared((parts, ROWS, width), "bfloat16")
            keys = T.alloc_shared((buffers * parts, TILE, width), "bfloat16")
            p_shared = T.alloc_shared((ROWS, TILE), "bfloat16")
            picks = T.alloc_shared((K,), "int32")
            count = T.alloc_shared((1,), "int32")
            scores = T.alloc_tmem((ROWS, TILE), "float32")
            outputs = T.alloc_tmem((parts, ROWS, width), "float32")
            scored = T.alloc_barrier(1)
            summed = T.alloc_barrier(1)
            p = T.alloc_fragment((ROWS, TILE), "float32")
            high = T.alloc_fragment((ROWS,), "float32")
            before = T.alloc_fragment((ROWS,), "float32")
            alpha = T.alloc_fragment((ROWS,), "float32")
            tile_sum = T.alloc_fragment((ROWS,), "float32")
            total = T.alloc_fragment((ROWS,), "float32")
            part = T.alloc_fragment((ROWS, width), "float32")
            codes = T.alloc_local((LOAD,), "float8_e4m3fn")
            pairs = T.alloc_local((LOAD // 2,), "uint8")
            factor = T.alloc_local((1,), "float32")
            converted = T.alloc_local((LOAD,), "bfloat16")
            tx = T.get_thread_binding()

            position, request_row = positions[row], request[row]
            slot, first = spans[request_row, 0], spans[request_row, 1]
            low = T.min(T.max(position - (window - 1), spans[request_row, 3]), position)
            window_tiles = position // TILE - low // TILE + 1
            if tx < WARP:
                pack_picks(tx, idx, row, K, picks, count)
            for b, i, c in T.Parallel(parts, ROWS, width):
                q_shared[b, i, c] = T.if_then_else(
                    group * ROWS + i < H, q[row, (group * ROWS + i) * D + b * width + c],
                    T.bfloat16(0))
            T.fill(high, -T.infinity("float32"))
            T.fill(total, 0)
            T.sync_threads()
            tiles = window_tiles + T.ceildiv(count[0], TILE)
            place = (low, position, window_tiles)
            row_of = (request_row, slot, first, positions[first])

            gather(0, tx, place, row_of, k, k_sf, ring, ring_sf, picks, count,
                   pages, kv, kv_sf, keys, codes, pairs, factor, converted)
            for u in T.serial(tiles):
                if buffers == 1:
                    if u > 0:
                        wait_outputs(summed, u - 1)
                        gather(u, tx, place, row_of, k, k_sf, ring, ring_sf, picks, count,
                               pages, kv, kv_sf, keys, codes, pairs, factor, converted)
                T.fence_proxy_async()
                T.tcgen05_before_thread_sync()
                T.sync_threads()
                if tx < WARP:
                    T.tcgen05_after_thread_sync()
                    for b in T.unroll(parts):
                        T.tcgen05_gemm(q_shared[b, :, :], keys[u % buffers * parts + b, :, :],
                                       scores, transpose_B=True, mbar=None, clear_accum=b == 0)
                    T.tcgen05_mma_arrive(scored)
                if buffers == 2:
                    if u > 0:
                        wait_outputs(summed, u - 1)
                    if u + 1 < tiles:
                        gather(u + 1, tx, place, row_of, k, k_sf, ring, ring_sf, picks, count,
                               pages, kv, kv_sf, keys, codes, pairs, factor, converted)
                T.mbarrier_wait_parity(scored, u % 2)
                T.tcgen05_after_thread_sync()
                T.copy(scores, p)
                T.copy(high, before)
                for i, j in T.Parallel(ROWS, TILE):
                    at = (low // TILE + u) * TILE + j
                    visible = T.if_then_else(
                        u < window_tiles, T.And(at >= low, at <= position),
                        (u - window_tiles) * TILE + j < count[0])
                    p[i, j] = T.if_then_else(visible, p[i, j] * scale, -T.infinity("float32"))
                T.reduce_max(p, high, dim=1, clear=False)
                for i in T.Parallel(ROWS):
                    alpha[i] = T.exp(before[i] - high[i])
                for i, j in T.Parallel(ROWS, TILE):
                    p[i, j] = T.exp(p[i, j] - high[i])  # of -inf: +0
                T.reduce_sum(p, tile_sum, dim=1)
                for i in T.Parallel(ROWS):
                    total[i] = total[i] * alpha[i] + tile_sum[i]
                T.copy(p, p_shared)
                if u > 0:
                    for b in T.unroll(parts):
                        T.copy(outputs[b, :, :], part)
                        for i, j in T.Parallel(ROWS, width):
                            part[i, j] = part[i, j] * alpha[i]
                        T.copy(part, outputs[b, :, :])
                T.fence_proxy_async()
                T.tcgen05_before_thread_sync()
                T.sync_threads()
                if tx < WARP:
                    T.tcgen05_after_thread_sync()
                    for b in T.unroll(parts):
                        T.tcgen05_gemm(p_shared, keys[u % buffers * parts + b, :, :],
                                       outputs[b, :, :], mbar=None, clear_accum=u == 0)
                    T.tcgen05_mma_arrive(summed)
            wait_outputs(summed, tiles - 1)
            for b in T.unroll(parts):
                T.copy(outputs[b, :, :], part)
                for i, j in T.Parallel(ROWS, width):
                    if group * ROWS + i < H:
                        o[row, (group * ROWS + i) * D + b * width + j] = T.cast(
                            part[i, j] / (total[i] + T.exp(sink[group * ROWS + i] - high[i])),
                            "bfloat16")
            T.tcgen05_before_thread_sync()
            T.sync_threads()  # nobody reads tensor memory any more: it may be freed
            T.tcgen05_after_thread_sync()

    return body
