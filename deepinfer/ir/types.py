"""Types of the IR: element types, dims that may be symbolic, tensors, and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer.errors import IRError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its name in the IR, its bits, and how numpy holds it.

    ``e2m1`` is packed: two elements a byte along the last axis, the even one in the low nibble.
    """

    name: str
    bits: int
    numpy: np.dtype[Any]

    def __str__(self) -> str:
        return self.name


F64 = DType("f64", 64, np.dtype(np.float64))
F32 = DType("f32", 32, np.dtype(np.float32))
BF16 = DType("bf16", 16, np.dtype(ml_dtypes.bfloat16))
E4M3 = DType("e4m3", 8, np.dtype(ml_dtypes.float8_e4m3fn))
UE8M0 = DType("ue8m0", 8, np.dtype(ml_dtypes.float8_e8m0fnu))
E2M1 = DType("e2m1", 4, np.dtype(np.uint8))
U8 = DType("u8", 8, np.dtype(np.uint8))
I32 = DType("i32", 32, np.dtype(np.int32))
I64 = DType("i64", 64, np.dtype(np.int64))
U64 = DType("u64", 64, np.dtype(np.uint64))
DTYPES = {d.name: d for d in (F64, F32, BF16, E4M3, UE8M0, E2M1, U8, I32, I64, U64)}


@dataclass(frozen=True, slots=True)
class Sym:
    """A dim known only when a step runs: ``times`` x the size ``name``, at most ``max`` x it."""

    name: str
    max: int
    times: int = 1

    def __mul__(self, k: int) -> Sym:
        return Sym(self.name, self.max, self.times * k)

    def __str__(self) -> str:
        return self.name if self.times == 1 else f"{self.name}*{self.times}"


Dim = int | Sym


def dim_size(dim: Dim, sizes: Mapping[str, int] | None) -> int:
    """The size of ``dim``: under ``sizes``, or its maximum when ``sizes`` is None."""
    if isinstance(dim, int):
        return dim
    if sizes is None:
        return dim.max * dim.times
    if dim.name not in sizes:
        raise IRError(
            f"dim '{dim.name}' has no size; sizes are given for {sorted(sizes)}",
            where="evaluation", next=f"pass a size for '{dim.name}'",
        )
    return sizes[dim.name] * dim.times


@dataclass(frozen=True, slots=True)
class TensorType:
    """A logical shape and an element type, row-major and dense."""

    shape: tuple[Dim, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if self.dtype is E2M1:
            last = self.shape[-1] if self.shape else 1
            if (last if isinstance(last, int) else last.times) % 2:
                raise IRError(f"{self} has half a byte at the end of a row", where="type",
                              next="give e2m1 an even last dim: it holds two elements a byte")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def concrete(self, sizes: Mapping[str, int] | None) -> tuple[int, ...]:
        """The logical shape as ints (the largest one when ``sizes`` is None)."""
        return tuple(dim_size(d, sizes) for d in self.shape)

    def storage(self, sizes: Mapping[str, int] | None) -> tuple[int, ...]:
        """The shape of the numpy array that holds it: e2m1 halves its last axis."""
        shape = self.concrete(sizes)
        return shape if self.dtype is not E2M1 else (*shape[:-1], shape[-1] // 2)

    def nbytes(self, sizes: Mapping[str, int] | None = None) -> int:
        """Bytes held (the largest number of them when ``sizes`` is None)."""
        return int(np.prod(self.storage(sizes), dtype=np.int64)) * self.dtype.numpy.itemsize

    def symbols(self) -> tuple[Sym, ...]:
        return tuple(d for d in self.shape if isinstance(d, Sym))


class Kind(Enum):
    """Where a value comes from and how long it lives."""

    INPUT = "input"  # given with each step
    WEIGHT = "weight"  # constant, from the checkpoint
    STATE = "state"  # lives across steps; the only kind an op may write
    TEMP = "temp"  # lives inside one step


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A named typed value; identity is the object."""

    name: str
    type: TensorType
    kind: Kind

    def __str__(self) -> str:
        return f"{_SIGIL[self.kind]}{self.name}"


_SIGIL = {Kind.INPUT: "$", Kind.WEIGHT: "@", Kind.STATE: "!", Kind.TEMP: "%"}
