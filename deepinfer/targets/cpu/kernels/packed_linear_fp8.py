"""packed_linear_fp8 on cpu: an item is tiles of 16 outputs, over a range of the rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.kernels._macros import store_tiles
from deepinfer.targets.cpu.kernels._packed import ITEMS, linear_fp8, space


@kernel("packed_linear_fp8", items=ITEMS, space=space)
def packed_linear_fp8(spec: Spec):
    m, out = spec.attrs["m"], spec.attrs["out"]

    @T.macro
    def store(y, acc, row, n, first, count):
        store_tiles(y, acc, row, n, first, count, m, out)

    return linear_fp8(spec, out, 1, store)
