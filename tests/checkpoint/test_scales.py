"""Scale checks against a direct float64 dequantisation of every value."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint import check_weight_scales, scales
from deepinfer.errors import CheckpointError

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.finfo(ml_dtypes.bfloat16)


def fp8_tile(code: int) -> np.ndarray:
    tile = np.zeros((33, 40), np.uint8)  # ragged on both axes
    tile[32, 39] = code
    return tile.view(E4M3)


def is_normal(value: float) -> bool:
    return value == 0 or float(BF16.smallest_normal) <= abs(value) <= float(BF16.max)


def accepts(weight, scale, tile) -> bool:
    try:
        check_weight_scales(weight, scale, tile=tile)
    except CheckpointError:
        return False
    return True


# Every scale near the limits of any code, and some between.
SCALES = [*range(13), 100, 127, *range(242, 255)]


@pytest.mark.parametrize("scale", SCALES)
def test_every_e4m3_code(scale):
    sf = np.array([[127, 127], [127, scale]], np.uint8)
    for code in range(256):
        value = float(np.uint8(code).view(E4M3)) * 2.0 ** (scale - 127)
        assert accepts(fp8_tile(code), sf, (32, 32)) == is_normal(value), (scale, code)


@pytest.mark.parametrize("scale", SCALES)
def test_every_pair_of_e2m1_codes(scale):
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float)
    weight = np.zeros((2, 32), np.uint8)
    sf = np.array([[127, 127], [127, scale]], np.uint8)
    for byte in range(256):
        weight[1, 20] = byte
        both = [values[byte & 15] * 2.0 ** (scale - 127), values[byte >> 4] * 2.0 ** (scale - 127)]
        assert accepts(weight, sf, (1, 32)) == all(map(is_normal, both)), (scale, byte)


def test_messages_name_the_place(monkeypatch):
    monkeypatch.setattr(scales, "CHUNK_BYTES", 64)  # so that the third row is a chunk of its own
    weight = np.ones((5, 64), np.uint8).view(E4M3)  # 2^-9 everywhere
    sf = np.full((5, 2), 127, np.uint8).view(ml_dtypes.float8_e8m0fnu)

    def message(code: int) -> str:
        changed = sf.copy()
        changed.view(np.uint8)[2, 1] = code
        with pytest.raises(CheckpointError) as caught:
            check_weight_scales(weight, changed, tile=(1, 32), where="shard 3, tensor w")
        assert caught.value.where == "shard 3, tensor w" and caught.value.next
        return caught.value.what

    check_weight_scales(weight, sf, tile=(1, 32))
    assert message(255) == "scale [2, 1] is the ue8m0 code 255, NaN"
    assert message(9).startswith("tile [2, 1] with ue8m0 code 9 holds values from 2^-127 to 2^-127")
    codes = weight.view(np.uint8).copy()
    codes[2, 40] = 0xFF
    with pytest.raises(CheckpointError, match=r"weight \[2, 40\] is the e4m3 code 0xff, NaN"):
        check_weight_scales(codes.view(E4M3), sf, tile=(1, 32))


def test_e2m1_bytes_are_no_e4m3_nan():
    check_weight_scales(
        np.full((1, 16), 0x7F, np.uint8), np.full((1, 1), 127, np.uint8), tile=(1, 32)
    )


def test_scale_of_another_shape():
    weight = np.zeros((33, 64), E4M3)
    with pytest.raises(CheckpointError, match=r"scale \[1, 2\] does not fit, expected \[2, 2\]"):
        check_weight_scales(weight, np.zeros((1, 2), np.uint8), tile=(32, 32))


def test_empty():
    check_weight_scales(np.zeros((0, 64), E4M3), np.zeros((0, 2), np.uint8), tile=(32, 32))
