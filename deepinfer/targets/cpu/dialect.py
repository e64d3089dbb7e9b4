"""What CPU kernels say in TileLang: storage types, exact constants, and calls of micro-kernels.

The C backend has no bf16 or fp8 types: buffers hold their bits (``uint16``, ``uint8``) and the
inline functions of ``micro/formats.h`` and ``micro/functions.h`` convert.
"""

from typing import Any

import numpy as np
import tilelang.language as T

from deepinfer.ir.types import DTYPES, Sym
from deepinfer.ops.norm import ROW_SUM
from deepinfer.targets.base import Spec

STORAGE = {"f64": "float64", "f32": "float32", "bf16": "uint16", "e4m3": "uint8",
           "ue8m0": "uint8", "e2m1": "uint8", "u8": "uint8", "i32": "int32", "i64": "int64",
           "u64": "uint64"}
assert STORAGE.keys() == DTYPES.keys()

LANES = dict(ROW_SUM.params)["lanes"]  # of every row sum


def dims(spec: Spec, *names: str) -> Any:
    """The dims by name: ints, or dynamic variables for what only a step knows."""
    got = [T.symbolic(n, "int32") if isinstance(spec.dims[n], Sym) else spec.dims[n]
           for n in names]
    return got[0] if len(got) == 1 else got


def const(value: float) -> Any:
    """An exact float32 constant. A plain literal would be printed with seven digits."""
    return T.reinterpret("float32", T.uint32(int(np.float32(value).view(np.uint32))))


def f32(bits: Any) -> Any:
    """bf16 bits -> float32."""
    return T.call_extern("float32", "di_bf16_to_f32", bits)


def bf16(x: Any) -> Any:
    """float32 -> bf16 bits, to nearest even."""
    return T.call_extern("uint16", "di_f32_to_bf16", x)


def call(name: str, *args: Any, type: str = "float32") -> Any:
    """Call the inline function ``name`` of the micro headers."""
    return T.call_extern(type, name, *args)


@T.macro  # type: ignore[untyped-decorator]
def fold_lanes(acc: Any) -> None:
    """The tree of ``lane_sum`` over 16 lanes, in place; the sum is in ``acc[0]``."""
    for i in T.serial(8):
        acc[i] = acc[i] + acc[i + 8]
    for i in T.serial(4):
        acc[i] = acc[i] + acc[i + 4]
    for i in T.serial(2):
        acc[i] = acc[i] + acc[i + 2]
    acc[0] = acc[0] + acc[1]
