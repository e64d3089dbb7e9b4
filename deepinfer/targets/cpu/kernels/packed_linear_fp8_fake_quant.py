"""packed_linear_fp8_fake_quant on cpu: as packed_linear_fp8, an item's tiles are whole blocks."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16
from deepinfer.targets.cpu.kernels._macros import TILE, fake_quantize_fp8_block
from deepinfer.targets.cpu.kernels._packed import ITEMS, linear_fp8, space


@kernel("packed_linear_fp8_fake_quant", items=ITEMS,
        space=lambda spec: space(spec, least=spec.attrs["block"] // TILE))
def packed_linear_fp8_fake_quant(spec: Spec):
    block = spec.attrs["block"]
    span = block // TILE  # tiles of a block

    @T.macro
    def store(y, acc, row, n, first, count):
        values = T.alloc_local((1, block), "uint16")
        for g, i in T.grid(count // span, n):
            for t, c in T.grid(span, TILE):
                values[0, t * TILE + c] = bf16(acc[((g * span + t) * n + i) * TILE + c])
            fake_quantize_fp8_block(values, 0, 0, y, row + i, first * TILE + g * block, block)

    return linear_fp8(spec, "bf16", span, store)
