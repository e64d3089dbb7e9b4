"""What sm100 kernels say in TileLang: dims, exact bit casts, and shared pieces of programs.

Kernels are synchronised by hand: explicit mbarriers, a CTA barrier before tensor memory is freed,
``tcgen05_after_thread_sync`` before it is read. Sums whose order the op declares are written as
plain loops; nvcc is told not to contract them (see ``toolchain``).
"""

from typing import Any

import tilelang.language as T

from deepinfer.ir.types import Sym
from deepinfer.targets.base import Spec

WARP = 32


def dims(spec: Spec, *names: str) -> Any:
    """The dims by name: ints, or dynamic variables for what only a step knows."""
    got = [T.dynamic(n, "int32") if isinstance(spec.dims[n], Sym) else spec.dims[n]
           for n in names]
    return got[0] if len(got) == 1 else got


def bits_of(x: Any) -> Any:
    """float32 -> its bits as uint32."""
    return T.reinterpret(x, "uint32")


def float_of(bits: Any) -> Any:
    """uint32 bits -> float32."""
    return T.reinterpret(bits, "float32")


def ue8m0_ceil(x: Any) -> Any:
    """The ue8m0 code of 2^ceil(log2(x)), x > 0 and normal, as uint32."""
    return (bits_of(x) + T.uint32(0x7FFFFF)) >> T.uint32(23)


def inverse_scale(code: Any) -> Any:
    """2^(127 - code) of a ue8m0 code below 254, as float32."""
    return float_of((T.uint32(254) - code) << T.uint32(23))
