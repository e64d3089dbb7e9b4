"""window_attention on cpu: an item is a row, whose heads share each tile of keys.

Scores are computed as keys x heads (the query is packed once as a weight tile of 16 heads), P.V as
heads x channels. The macros are those of the three attention kernels. The working arrays of a row
are locals: about 350 KiB of stack at 64 heads of 512 channels.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, call, const, dims

TILE = 64  # keys; of Order ONLINE_SOFTMAX
LANES = 16  # of the sum over a tile's P, and heads or channels of a GEMM tile


def softmax_macros(H: int, D: int, scale: float):
    """start, attend and finish of one row's online softmax, for H heads of D channels."""
    head_tiles, channel_tiles = -(-H // LANES), D // LANES

    @T.macro
    def start(q, row, q_pairs, high, total, out):
        for t, j, n, i in T.grid(head_tiles, D // 2, LANES, 2):
            q_pairs[t, j, n, i] = T.uint16(0)
            if t * LANES + n < H:
                q_pairs[t, j, n, i] = q[row, (t * LANES + n) * D + 2 * j + i]
        for t, n in T.grid(head_tiles, LANES):
            high[t, n] = const(float("-inf"))
            total[t, n] = const(0)
        for t, h, c in T.grid(channel_tiles, H, LANES):
            out[t, h, c] = const(0)

    @T.macro
    def attend(keys, first, last, q_pairs, high, total, out):
        """One tile, of which the lanes first..last-1 are visible and the others ignored."""
        scores = T.alloc_local((TILE, LANES), "float32")
        rounded = T.alloc_local((TILE, LANES), "uint16")
        top = T.alloc_local((LANES,), "float32")
        lanes = T.alloc_local((LANES, LANES), "float32")
        alpha = T.alloc_local((head_tiles, LANES), "float32")
        p = T.alloc_local((head_tiles * LANES, TILE), "uint16")
        values = T.alloc_local((TILE // 2, LANES, 2), "uint16")
        for lane in T.serial(first):
            for c in T.serial(D):
                keys[lane, c] = T.uint16(0)
        for lane in T.serial(TILE - last):
            for c in T.serial(D):
                keys[last + lane, c] = T.uint16(0)
        for t in T.serial(head_tiles):
            call("di_gemm_bf16", T.access_ptr(keys[first, 0], "r"), D,
                 T.access_ptr(q_pairs[t, 0, 0, 0], "r"), D, last - first,
                 T.access_ptr(scores[first, 0], "w"), 0, type="int32")
            for n in T.serial(LANES):
                top[n] = high[t, n]
            for lane in T.serial(first, last):
                for n in T.serial(LANES):
                    scores[lane, n] = scores[lane, n] * const(scale)
                    top[n] = T.if_then_else(scores[lane, n] > top[n], scores[lane, n], top[n])
            for n in T.serial(LANES):
                alpha[t, n] = call("di_exp", high[t, n] - top[n])
                high[t, n] = top[n]
            for lane, n in T.grid(LANES, LANES):
                lanes[lane, n] = const(0)
            for lane, n in T.grid(TILE, LANES):
                rounded[lane, n] = T.uint16(0)
            for lane in T.serial(first, last):
                for n in T.serial(LANES):
                    scores[lane, n] = call("di_exp", scores[lane, n] - top[n])
                    lanes[lane % LANES, n] = lanes[lane % LANES, n] + scores[lane, n]
                    rounded[lane, n] = bf16(scores[lane, n])
            for n, lane in T.grid(LANES, TILE):
                p[t * LANES + n, lane] = rounded[lane, n]
            for level in T.unroll(4):
                for lane, n in T.grid(8 >> level, LANES):
                    lanes[lane, n] = lanes[lane, n] + lanes[lane + (8 >> level), n]
            for n in T.serial(LANES):
                total[t, n] = total[t, n] * alpha[t, n] + lanes[0, n]
        for t in T.serial(channel_tiles):
            for h, c in T.grid(H, LANES):
                out[t, h, c] = out[t, h, c] * alpha[h // LANES, h % LANES]
            for j, c, i in T.grid(TILE // 2, LANES, 2):
                values[j, c, i] = keys[2 * j + i, t * LANES + c]
            call("di_gemm_bf16", T.access_ptr(p[0, 0], "r"), TILE,
                 T.access_ptr(values[0, 0, 0], "r"), TILE, H,
                 T.access_ptr(out[t, 0, 0], "rw"), 1, type="int32")

    @T.macro
    def finish(sink, row, high, total, out, o):
        for h in T.serial(H):
            denominator = total[h // LANES, h % LANES] + call(
                "di_exp", sink[h] - high[h // LANES, h % LANES])
            for t, c in T.grid(channel_tiles, LANES):
                o[row, h * D + t * LANES + c] = bf16(out[t, h, c] / denominator)

    return start, attend, finish


def first_seen(position, window: int, floor):
    """The first position in a window: none before the floor but its own."""
    return T.min(T.max(position - (window - 1), floor), position)


def window_macro(D: int, W: int, block: int, attend):
    """Attend to the positions low..high of a request, in absolute tiles."""

    @T.macro
    def attend_window(low, high_position, start, slot, first, k, k_sf, ring, ring_sf, keys,
                      q_pairs, high, total, out):
        for t in T.serial(low // TILE, high_position // TILE + 1):
            # Variables: as expressions, these bounds would be copied into every index below.
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            begin = T.max(low - t * TILE, 0)
            end = T.min(high_position + 1 - t * TILE, TILE)
            for lane in T.serial(begin, end):
                position = t * TILE + lane
                if position < start:
                    call("di_key_e4m3", T.access_ptr(ring[slot, position % W, 0], "r"),
                         T.access_ptr(ring_sf[slot, position % W, 0], "r"), D, block,
                         T.access_ptr(keys[lane, 0], "w"), type="int32")
                else:
                    call("di_key_e4m3", T.access_ptr(k[first + position - start, 0], "r"),
                         T.access_ptr(k_sf[first + position - start, 0], "r"), D, block,
                         T.access_ptr(keys[lane, 0], "w"), type="int32")
            attend(keys, begin, end, q_pairs, high, total, out)

    return attend_window


@kernel("window_attention", items="N")
def window_attention(spec: Spec):
    N, H, D, S, W, F, R = dims(spec, "N", "H", "D", "S", "W", "F", "R")
    window = spec.attrs["window"]
    start, attend, finish = softmax_macros(H, D, spec.attrs["scale"])
    attend_window = window_macro(D, W, D // F, attend)

    @T.prim_func
    def body(q: T.Tensor((N, H * D), "uint16"), k: T.Tensor((N, D), "uint8"),
             k_sf: T.Tensor((N, F), "uint8"), ring: T.Tensor((S, W, D), "uint8"),
             ring_sf: T.Tensor((S, W, F), "uint8"), sink: T.Tensor((H,), "float32"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), o: T.Tensor((N, H * D), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            q_pairs = T.alloc_local((-(-H // LANES), D // 2, LANES, 2), "uint16")
            keys = T.alloc_local((TILE, D), "uint16")
            high = T.alloc_local((-(-H // LANES), LANES), "float32")
            total = T.alloc_local((-(-H // LANES), LANES), "float32")
            out = T.alloc_local((D // LANES, H, LANES), "float32")
            slot = spans[request[row], 0]
            first = spans[request[row], 1]
            position = positions[row]
            low = T.alloc_var("int32")
            low = first_seen(position, window, spans[request[row], 3])
            start(q, row, q_pairs, high, total, out)
            attend_window(low, position, positions[first], slot, first, k, k_sf, ring, ring_sf,
                          keys, q_pairs, high, total, out)
            finish(sink, row, high, total, out, o)

    return body
