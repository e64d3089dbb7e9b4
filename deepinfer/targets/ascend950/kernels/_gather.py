"""Keys of sparse_attention: which ones a row picked, and a tile of them dequantised to bf16."""

import tilelang.ascend.language as T

from deepinfer.targets.ascend950.dialect import WARP
from deepinfer.targets.ascend950.kernels._macros import count_bits, e2m1, power_of_two

TILE, THREADS = 64, 256
HALF = TILE // 2  # keys of a tile that one vector core gathers
LOAD = 8  # channels a thread converts at a time


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


def first_seen(position, window, floor):
    """The first position in a window: none before the floor but its own."""
    return T.min(T.max(position - (window - 1), floor), position)


def gatherer(D, F, W, E, window):
    """The macro that gathers one vector core's keys of a tile, for these dims of the op."""
    block, per_key = D // F, D // LOAD

    @T.macro
    def gather_tile(u, half, row, positions, request, spans, k, k_sf, ring, ring_sf, pages, kv,
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
            low = first_seen(position, window, spans[request[row], 3])
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

    return gather_tile
