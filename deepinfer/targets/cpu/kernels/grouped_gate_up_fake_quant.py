"""grouped_gate_up_fake_quant on cpu: as grouped_gate_up, an item's tiles are whole blocks."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16
from deepinfer.targets.cpu.kernels._experts import COLUMNS, ITEMS, gate_up, space
from deepinfer.targets.cpu.kernels._macros import fake_quantize_fp8_block


@kernel("grouped_gate_up_fake_quant", items=ITEMS,
        space=lambda spec: space(spec, spec.attrs["block"] // COLUMNS))
def grouped_gate_up_fake_quant(spec: Spec):
    block = spec.attrs["block"]
    span = block // COLUMNS  # tiles of a block

    @T.macro
    def store(a, acc, row, first, at, stride, tiles):
        values = T.alloc_local((1, block), "uint16")
        for g in T.serial(tiles // span):
            for t, c in T.grid(span, COLUMNS):
                values[0, t * COLUMNS + c] = bf16(acc[at + (g * span + t) * stride + c])
            fake_quantize_fp8_block(values, 0, 0, a, row, first * COLUMNS + g * block, block)

    return gate_up(spec, store)
