"""Comparing arrays bit by bit: equality, distance in units of the last place, first difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Element:
    """One element that two arrays have different bits for.

    Args:
        index: where. expected, found: the values as text; expected_bits, found_bits: in hex.
        ulps: representable numbers between the two; None where there is no such count (a NaN, or
            elements that are no floats).
        count: elements of the arrays that differ, this one included. size: elements in all.
    """

    index: tuple[int, ...]
    expected: str
    found: str
    expected_bits: str
    found_bits: str
    ulps: int | None
    count: int
    size: int

    def __str__(self) -> str:
        far = "" if self.ulps is None else f", {self.ulps} ulp"
        return (f"element {list(self.index)}: {self.found} (0x{self.found_bits}), expected "
                f"{self.expected} (0x{self.expected_bits}){far}; {self.count} of {self.size} "
                "elements differ")


def bits(x: Array) -> Array:
    """The elements of ``x`` as unsigned integers of the same width, whatever their type."""
    kind = _UNSIGNED[x.dtype.itemsize]
    return np.ascontiguousarray(x).view(kind).reshape(x.shape)


def same_bits(a: Array, b: Array) -> bool:
    """Equal shape, type and bytes. Unlike ==, a NaN equals itself and -0 differs from 0."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def ulp_distance(a: Array, b: Array) -> Array:
    """How many representable numbers lie between each element of ``a`` and of ``b``.

    Both are mapped to integers in the order of the numbers (-0 and 0 to the same one), so that
    neighbours are 1 apart, also across 0 and the denormals.

    Args:
        a, b: equal shape and float type (f64, f32, bf16, e4m3 or a scale).

    Returns:
        u64, the largest one where exactly one of the two is NaN; 0 where both are.
    """
    width = a.dtype.itemsize * 8
    nan_a, nan_b = np.isnan(a.astype(np.float64)), np.isnan(b.astype(np.float64))
    far = np.abs(_ordered(a, width).astype(object) - _ordered(b, width).astype(object))
    far = far.astype(np.uint64)
    far[nan_a & nan_b] = 0
    far[nan_a ^ nan_b] = np.iinfo(np.uint64).max
    return np.asarray(far)


def _ordered(x: Array, width: int) -> Array:
    raw = bits(x).astype(np.uint64)
    sign = np.uint64(1) << np.uint64(width - 1)
    size = (raw & (sign - np.uint64(1))).astype(np.int64)
    return np.where(raw & sign, -size, size)


def first_element(expected: Array, found: Array) -> Element | None:
    """The first element, in row-major order, whose bits differ; None if none does.

    Raises:
        ValueError: the arrays differ in shape or type, so that no element can be named.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise ValueError(f"{found.dtype}{list(found.shape)} against "
                         f"{expected.dtype}{list(expected.shape)}")
    a, b = bits(expected), bits(found)
    wrong = np.flatnonzero(a.reshape(-1) != b.reshape(-1))
    if not len(wrong):
        return None
    index = tuple(int(i) for i in np.unravel_index(wrong[0], expected.shape))
    digits = expected.dtype.itemsize * 2
    return Element(index, str(expected[index]), str(found[index]), f"{int(a[index]):0{digits}x}",
                   f"{int(b[index]):0{digits}x}", _ulps(expected[index], found[index]),
                   len(wrong), expected.size)


def _ulps(a: Any, b: Any) -> int | None:
    x, y = np.asarray(a).reshape(1), np.asarray(b).reshape(1)
    if x.dtype.kind in "iub" or np.isnan([float(x[0]), float(y[0])]).any():
        return None
    return int(ulp_distance(x, y)[0])


def flip_last_bit(x: Array) -> Array:
    """A copy with the lowest bit of every element inverted: the smallest change there is."""
    flipped: Array = (bits(x) ^ _UNSIGNED[x.dtype.itemsize](1)).view(x.dtype)
    return flipped.reshape(x.shape)
