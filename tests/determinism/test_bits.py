"""The comparison itself: what counts as equal, how far apart, which element is named."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepinfer.testing.bits import (
    bits,
    first_element,
    flip_last_bit,
    same_bits,
    ulp_distance,
)

F32 = np.float32


def test_equality_is_of_bytes():
    nan = np.array([np.nan, 1], F32)
    assert same_bits(nan, nan.copy())
    assert not same_bits(np.array([0.0], F32), np.array([-0.0], F32))
    assert not same_bits(nan, nan.astype(np.float64)) and not same_bits(nan, nan[:1])


@pytest.mark.parametrize("kind", [F32, np.float64, ml_dtypes.bfloat16])
def test_neighbours_are_one_apart(kind):
    low = np.array([0, 1, -1, 3e-40 if kind is F32 else 2, -0.0], kind)
    high = np.nextafter(low, np.array(np.inf, kind)).astype(kind)
    assert ulp_distance(low, high).tolist() == [1] * 5
    assert ulp_distance(high, low).tolist() == [1] * 5


def test_distance_across_zero_and_of_nan():
    tiny = np.frombuffer(b"\1\0\0\0", F32)
    assert ulp_distance(tiny, -tiny).tolist() == [2]
    nan, one = np.array([np.nan], F32), np.array([1], F32)
    assert ulp_distance(nan, nan).tolist() == [0]
    assert ulp_distance(nan, one).tolist() == [2**64 - 1]
    assert ulp_distance(np.array([np.inf], F32), np.array([-np.inf], F32))[0] == 2 * 0x7F800000


def test_the_first_element_is_named_with_both_bit_patterns():
    a = np.arange(6, dtype=F32).reshape(2, 3)
    b = a.copy()
    b[1, 0] = np.nextafter(F32(3), F32(4))
    b[1, 2] = 9
    found = first_element(a, b)
    assert found is not None and found.index == (1, 0) and found.ulps == 1
    assert (found.expected_bits, found.found_bits) == ("40400000", "40400001")
    assert (found.count, found.size) == (2, 6)
    assert str(found).startswith("element [1, 0]: 3.0000002 (0x40400001), expected 3.0 (0x40400000)"
                                 ", 1 ulp; 2 of 6")
    assert first_element(a, a.copy()) is None


def test_elements_that_are_no_floats_and_nans():
    found = first_element(np.array([1, 2], np.int32), np.array([1, -2], np.int32))
    assert found is not None and found.ulps is None and found.found_bits == "fffffffe"
    found = first_element(np.array([np.nan], F32), np.array([1], F32))
    assert found is not None and found.ulps is None and ", " in str(found)
    with pytest.raises(ValueError, match=r"float32\[2\] against float32\[3\]"):
        first_element(np.zeros(3, F32), np.zeros(2, F32))


def test_a_flip_is_the_smallest_change():
    x = np.array([[1.5, -2.25], [0, 3]], F32)
    assert ulp_distance(x, flip_last_bit(x)).tolist() == [[1, 1], [1, 1]]
    assert same_bits(flip_last_bit(flip_last_bit(x)), x) and bits(x).dtype == np.uint32
