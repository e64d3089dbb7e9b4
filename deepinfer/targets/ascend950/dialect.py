"""What ascend950 kernels say in TileLang: dims, exact bit casts, and shared pieces of programs.

Kernels are synchronised by hand: the auto-scheduler is off (see ``lower``), every event and flag is
in the program. A pipe runs its instructions in order; ``notify(a, b, id)`` lets pipe b pass the
matching ``wait`` once a has done all before it. ``arrive`` and ``await_`` do the same between the
cube core and its two vector cores. Sums whose order the op declares are written as plain loops;
bisheng is told not to contract them (see ``toolchain``).
"""

from typing import Any

import tilelang.ascend.language as T

from deepinfer.ir.types import Sym
from deepinfer.targets.base import Spec

WARP = 32
CUBES, VECTORS = 32, 64  # cores of a launch; more rows or tiles than that take turns
INTRA = 4  # the mode of flags between a cube core and its vector cores
UNIT = 32  # bytes: copies of UB and L1 start at multiples
SECOND = 16  # flags of the second vector core, seen from the cube core


def dims(spec: Spec, *names: str) -> Any:
    """The dims by name: ints, or dynamic variables for what only a step knows."""
    got = [T.dynamic(n, "int32") if isinstance(spec.dims[n], Sym) else spec.dims[n]
           for n in names]
    return got[0] if len(got) == 1 else got


def notify(source: str, target: str, event: Any) -> Any:
    """Pipe ``source`` sets event ``event`` of the pair when it has done what was issued before."""
    return T.ascend_set_flag(f"{source}_{target}", event)


def wait(source: str, target: str, event: Any) -> Any:
    """Pipe ``target`` does nothing issued later before ``source`` has set the event."""
    return T.ascend_wait_flag(f"{source}_{target}", event)


def arrive(pipe: str, flag: Any) -> Any:
    """Set a flag of the other kind of core, after what the pipe was issued before."""
    return T.ascend_cross_core_set_flag(INTRA, f"PIPE_{pipe}", flag)


def await_(pipe: str, flag: Any) -> Any:
    """The pipe waits for a flag that the other kind of core sets."""
    return T.ascend_cross_core_wait_flag(INTRA, f"PIPE_{pipe}", flag)


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
