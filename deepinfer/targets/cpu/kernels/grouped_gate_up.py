"""grouped_gate_up on cpu: an item is tiles of 16 columns of one expert, for all of its rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16
from deepinfer.targets.cpu.kernels._experts import COLUMNS, ITEMS, gate_up, outputs, space


@kernel("grouped_gate_up", items=ITEMS, space=space)
def grouped_gate_up(spec: Spec):
    m = spec.attrs["m"]

    @T.macro
    def store(a, acc, row, first, at, stride, tiles):
        for t in T.serial(tiles):
            for c in T.serial(outputs(m, first + t)):
                a[row, (first + t) * COLUMNS + c] = bf16(acc[at + t * stride + c])

    return gate_up(spec, store)
