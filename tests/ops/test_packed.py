"""Packed linears give the plain linears' bits, and the loader's layouts are the ones they read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint import layouts
from deepinfer.errors import CheckpointError, IRError
from deepinfer.ops.gemm import linear, wide_linear_fp4, wide_linear_fp8
from deepinfer.ops.packed import packed_linear_bf16, packed_linear_fp4, packed_linear_fp8
from tests.ops.test_dense import fp4_weight, fp8_weight, rows

E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("m", [1, 16, 40, 64])
def test_packed_linears_are_the_plain_ones(m: int) -> None:
    x, w = rows(3, 64), rows(m, 64, seed=1)
    assert (packed_linear_bf16(x, layouts.tile16_bf16(w), m=m, out="f32").tobytes()
            == linear(x, w, out="f32").tobytes())
    ragged = np.ascontiguousarray(w[:, :40])
    assert (packed_linear_bf16(x[:, :40], layouts.tile16_bf16(ragged), m=m).tobytes()
            == linear(x[:, :40], ragged).tobytes())
    codes, sf, _ = fp8_weight(m, 64)
    assert (packed_linear_fp8(x, layouts.tile16_e4m3(codes), layouts.tile16_e4m3_sf(sf),
                              m=m).tobytes() == wide_linear_fp8(x, codes, sf).tobytes())
    codes, sf, _ = fp4_weight(m, 64)
    assert (packed_linear_fp4(x, layouts.tile16_e2m1(codes), layouts.tile16_e2m1_sf(sf),
                              m=m).tobytes() == wide_linear_fp4(x, codes, sf).tobytes())


def test_layouts_take_stacked_experts_and_refuse_the_unknown() -> None:
    codes, sf, _ = fp4_weight(2 * 24, 64)
    stacked, stacked_sf = codes.reshape(2, 24, 32), sf.reshape(2, 24, 2)
    for made, parts in ((layouts.apply_layout("w|tile16_e2m1", stacked), stacked),
                        (layouts.apply_layout("w|tile16_e2m1_sf", stacked_sf), stacked_sf)):
        layout = layouts.tile16_e2m1 if parts is stacked else layouts.tile16_e2m1_sf
        assert made[1].tobytes() == layout(parts[1]).tobytes()
    assert layouts.apply_layout("w", codes) is codes
    with pytest.raises(CheckpointError, match="unknown layout 'tile8'"):
        layouts.apply_layout("w|tile8", codes)
    with pytest.raises(CheckpointError, match="K is 48, expected a multiple of 32"):
        layouts.tile16_e4m3(np.zeros((16, 48), E4M3))


def test_a_packed_weight_that_is_too_small_is_refused() -> None:
    with pytest.raises(IRError, match="40 outputs in 1 groups do not fit 16 packed rows"):
        packed_linear_bf16(rows(2, 64), layouts.tile16_bf16(rows(16, 64)), m=40)
