"""What the three attention kernels share: the online softmax, and the tiles of keys of a window.

Scores are computed as keys x heads (the query is packed once as a weight tile of 16 heads), P.V as
heads x channels. Tiles lie in the thread's scratch, ``tiles[0, s]`` as keys (row-major, bf16) and
``tiles[1, s]`` as values (packed like weights). The row after a row of the same request moves the
window by one position, so a range of rows widens each key once. The working arrays of a row are
locals: about 300 KiB of stack at 64 heads of 512 channels.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec
from deepinfer.targets.cpu.dialect import bf16, call, const

TILE = 64  # keys; of Order ONLINE_SOFTMAX
LANES = 16  # of the sum over a tile's P, and heads or channels of a GEMM tile


def tile_slots(window: int) -> int:
    """The tiles that ``window`` positions can touch; one more holds a row's picks."""
    return (window + TILE - 2) // TILE + 1


def tile_bytes(spec: Spec, window: int) -> int:
    """Scratch of ``tiles``."""
    return 2 * 2 * (tile_slots(window) + 1) * TILE * spec.dims["D"]


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
    def attend(tiles, s, first, last, q_pairs, high, total, out):
        """Tile ``s``, of which the lanes first..last-1 are visible; the others are zero values."""
        n = T.alloc_var("int32")
        n = last - first
        scores = T.alloc_local((head_tiles * TILE, LANES), "float32")  # head tiles of n keys
        rounded = T.alloc_local((TILE, LANES), "uint16")
        top = T.alloc_local((LANES,), "float32")
        lanes = T.alloc_local((LANES, LANES), "float32")
        alpha = T.alloc_local((head_tiles, LANES), "float32")
        p = T.alloc_local((head_tiles * LANES, TILE), "uint16")
        call("di_gemm_bf16", T.access_ptr(tiles[0, s, first * D], "r"), D,
             T.access_ptr(q_pairs[0, 0, 0, 0], "r"), D, n, head_tiles,
             T.access_ptr(scores[0, 0], "w"), 0, type="int32")
        for t in T.serial(head_tiles):
            for h in T.serial(LANES):
                top[h] = high[t, h]
            for i in T.serial(t * n, (t + 1) * n):
                for h in T.serial(LANES):
                    scores[i, h] = scores[i, h] * const(scale)
                    top[h] = T.if_then_else(scores[i, h] > top[h], scores[i, h], top[h])
            for h in T.serial(LANES):
                alpha[t, h] = call("di_exp", high[t, h] - top[h])
                high[t, h] = top[h]
            for lane, h in T.grid(LANES, LANES):
                lanes[lane, h] = const(0)
            for lane, h in T.grid(TILE, LANES):
                rounded[lane, h] = T.uint16(0)
            for lane in T.serial(first, last):
                i = t * n + lane - first
                for h in T.serial(LANES):
                    scores[i, h] = call("di_exp", scores[i, h] - top[h])
                    lanes[lane % LANES, h] = lanes[lane % LANES, h] + scores[i, h]
                    rounded[lane, h] = bf16(scores[i, h])
            for h, lane in T.grid(LANES, TILE):
                p[t * LANES + h, lane] = rounded[lane, h]
            for level in T.unroll(4):
                for lane, h in T.grid(8 >> level, LANES):
                    lanes[lane, h] = lanes[lane, h] + lanes[lane + (8 >> level), h]
            for h in T.serial(LANES):
                total[t, h] = total[t, h] * alpha[t, h] + lanes[0, h]
        for t, h, c in T.grid(channel_tiles, H, LANES):
            out[t, h, c] = out[t, h, c] * alpha[h // LANES, h % LANES]
        call("di_gemm_bf16", T.access_ptr(p[0, 0], "r"), TILE, T.access_ptr(tiles[1, s, 0], "r"),
             TILE, H, channel_tiles, T.access_ptr(out[0, 0, 0], "rw"), 1, type="int32")

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


def clear_lanes(D: int):
    """The macro that zeroes the keys of the lanes first..last-1 of tile s."""

    @T.macro
    def clear(tiles, s, first, last):
        for lane in T.serial(first, last):
            for c in T.serial(D):
                tiles[0, s, lane * D + c] = T.uint16(0)

    return clear


def window_macros(D: int, W: int, block: int, slots: int, attend):
    """fill, follow and attend_window over the tiles of a window in ``slots`` tiles."""
    clear = clear_lanes(D)

    @T.macro
    def load(position, start, slot, first, k, k_sf, ring, ring_sf, tiles):
        s = T.truncmod(T.truncdiv(position, TILE), slots)
        at = T.truncmod(position, TILE) * D
        if position < start:
            call("di_key_e4m3", T.access_ptr(ring[slot, position % W, 0], "r"),
                 T.access_ptr(ring_sf[slot, position % W, 0], "r"), D, block,
                 T.access_ptr(tiles[0, s, at], "w"), type="int32")
        else:
            call("di_key_e4m3", T.access_ptr(k[first + position - start, 0], "r"),
                 T.access_ptr(k_sf[first + position - start, 0], "r"), D, block,
                 T.access_ptr(tiles[0, s, at], "w"), type="int32")

    @T.macro
    def fill(low, high_position, start, slot, first, k, k_sf, ring, ring_sf, tiles):
        """All tiles of the positions low..high_position."""
        for t in T.serial(low // TILE, high_position // TILE + 1):
            # Variables: as expressions, these bounds would be copied into every index below.
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            s = T.alloc_var("int32")
            begin = T.max(low - t * TILE, 0)
            end = T.min(high_position + 1 - t * TILE, TILE)
            s = T.truncmod(t, slots)
            clear(tiles, s, 0, begin)
            for lane in T.serial(begin, end):
                load(t * TILE + lane, start, slot, first, k, k_sf, ring, ring_sf, tiles)
            clear(tiles, s, end, TILE)
            call("di_pack_keys", T.access_ptr(tiles[0, s, 0], "r"), D,
                 T.access_ptr(tiles[1, s, 0], "w"), type="int32")

    @T.macro
    def advance(before, low, position, start, slot, first, k, k_sf, ring, ring_sf, tiles):
        """From the window before..position-1 to low..position."""
        for gone in T.serial(before, low):
            call("di_drop_value", T.access_ptr(
                tiles[1, T.truncmod(T.truncdiv(gone, TILE), slots), 0], "rw"), D,
                T.truncmod(gone, TILE), type="int32")
        load(position, start, slot, first, k, k_sf, ring, ring_sf, tiles)
        s = T.truncmod(T.truncdiv(position, TILE), slots)
        if T.truncmod(position, TILE) == 0:
            for c in T.serial(TILE * D):
                tiles[1, s, c] = T.uint16(0)
        call("di_set_value", T.access_ptr(tiles[0, s, T.truncmod(position, TILE) * D], "r"), D,
             T.truncmod(position, TILE), T.access_ptr(tiles[1, s, 0], "rw"), type="int32")

    @T.macro
    def attend_window(low, high_position, tiles, q_pairs, high, total, out):
        for t in T.serial(low // TILE, high_position // TILE + 1):
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            begin = T.max(low - t * TILE, 0)
            end = T.min(high_position + 1 - t * TILE, TILE)
            attend(tiles, T.truncmod(t, slots), begin, end, q_pairs, high, total, out)

    @T.macro
    def follow(item, row, window, low, positions, request, spans, k, k_sf, ring, ring_sf, tiles):
        """The window low.. of a row: moved on from the row before, or filled."""
        r = request[row]
        if follows(item, row, request):
            advance(first_seen(positions[row] - 1, window, spans[r, 3]), low, positions[row],
                    positions[spans[r, 1]], spans[r, 0], spans[r, 1], k, k_sf, ring, ring_sf,
                    tiles)
        else:
            fill(low, positions[row], positions[spans[r, 1]], spans[r, 0], spans[r, 1], k, k_sf,
                 ring, ring_sf, tiles)

    return fill, follow, attend_window


def follows(item, row, request):
    """Whether the row before is in this range of items too, and of the same request."""
    return T.And(item > 0, request[T.max(row - 1, 0)] == request[row])
