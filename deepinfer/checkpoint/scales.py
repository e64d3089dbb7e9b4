"""Check quantised weights: every dequantised value must be zero or a normal bf16 number.

The GEMM's declared order (DESIGN §5) takes dequantised weights as exact bf16 operands and flushes
denormals: a weight outside bf16's normal range would vanish or overflow without a word.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deepinfer.errors import CheckpointError

NAN_SCALE = 255
SCALE_BIAS = 127  # ue8m0 code e is 2^(e - 127)
MIN_EXPONENT, MAX_EXPONENT = -126, 127  # of bf16's normal numbers, whose mantissas hold all ours
CHUNK_BYTES = 1 << 20  # looked at in one go, so that the temporaries stay in the cache

Exponents = npt.NDArray[np.int16]


def _exponent_tables(values: npt.NDArray[np.float32]) -> tuple[Exponents, Exponents]:
    """Smallest and largest floor(log2|v|) of the non-zero values in each byte.

    Args: values: [256, values in one byte]. A byte without a non-zero value gets 999 and -999.
    """
    nonzero = values != 0
    exponents = np.frexp(values)[1] - 1
    smallest = np.where(nonzero, exponents, 999).min(axis=1)
    largest = np.where(nonzero, exponents, -999).max(axis=1)
    return smallest.astype(np.int16), largest.astype(np.int16)


_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
_E2M1_PAIRS = np.stack([_BYTES & 15, _BYTES >> 4], axis=1).view(ml_dtypes.float4_e2m1fn)
_E4M3_EXPONENTS = _exponent_tables(np.nan_to_num(_E4M3))
_E2M1_EXPONENTS = _exponent_tables(_E2M1_PAIRS.astype(np.float32))


def check_weight_scales(
    weight: npt.NDArray[Any],
    scale: npt.NDArray[Any],
    *,
    tile: tuple[int, int],
    where: str = "",
) -> None:
    """Check that W[i,k] = weight[i,k] · 2^(scale[i//rows, k//columns] - 127) is exact in bf16.

    Reads the weight once for e4m3 (NaN codes), and for e2m1 only under extreme scales.

    Args:
        weight: e4m3 [N, K], or packed e2m1 uint8 [N, K/2] (low nibble first).
        scale: ue8m0 (or its uint8 codes) [ceil(N/rows), ceil(K/columns)].
        tile: (rows, columns) in elements that share a scale: (32, 32) for fp8 weights,
            (1, 32) for MXFP4 experts and for the Engram tables.
        where: file and tensor, for messages.
    Raises: CheckpointError for a scale of the wrong shape, a NaN scale or weight, or a non-zero
        value outside [2^-126, largest bf16] in magnitude; it names the first such tile.
    Source: spec §6.2, DESIGN §5.
    """
    packed = weight.dtype.itemsize == 1 and weight.dtype.kind in "iu"
    tables = _E2M1_EXPONENTS if packed else _E4M3_EXPONENTS
    rows, columns = tile[0], tile[1] // 2 if packed else tile[1]  # columns: in bytes from here
    codes, scales = weight.view(np.uint8), scale.view(np.uint8)
    expected = (-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
    if scales.shape != expected:
        raise CheckpointError(
            f"scale {list(scales.shape)} does not fit, expected {list(expected)} for weight bytes "
            f"{list(codes.shape)} in tiles of {rows}x{columns}",
            where=where,
            next="check that the weights and config.json are of the same release",
        )
    step = max(1, CHUNK_BYTES // max(1, rows * codes.shape[1]))  # whole rows of tiles
    for first in range(0, scales.shape[0], step):
        chunk = codes[first * rows : (first + step) * rows]
        _check_chunk(chunk, scales[first : first + step], first, (rows, columns), tables, where)


def _check_chunk(
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    first: int,
    tile: tuple[int, int],
    tables: tuple[Exponents, Exponents],
    where: str,
) -> None:
    rows, columns = tile
    if tables is _E4M3_EXPONENTS and (codes & 0x7F).max(initial=0) == 0x7F:
        i, k = np.argwhere((codes & 0x7F) == 0x7F)[0]
        raise CheckpointError(
            f"weight [{first * rows + i}, {k}] is the e4m3 code {codes[i, k]:#04x}, NaN",
            where=where,
            next="download the file again; if it stays, the checkpoint itself is damaged",
        )
    if scales.max(initial=0) == NAN_SCALE:
        i, j = np.argwhere(scales == NAN_SCALE)[0]
        raise CheckpointError(
            f"scale [{first + i}, {j}] is the ue8m0 code {NAN_SCALE}, NaN",
            where=where,
            next="download the file again; if it stays, the checkpoint itself is damaged",
        )
    # Only a scale that some non-zero code could carry out of range needs its data looked at.
    smallest, largest = tables
    shifts = scales.astype(np.int16) - SCALE_BIAS
    low, high = shifts + smallest.min() < MIN_EXPONENT, shifts + largest.max() > MAX_EXPONENT
    extreme = np.argwhere(low | high)
    if not extreme.size:
        return
    whole = np.zeros((scales.shape[0] * rows, scales.shape[1] * columns), np.uint8)
    whole[: codes.shape[0], : codes.shape[1]] = codes
    tiles = whole.reshape(scales.shape[0], rows, scales.shape[1], columns)
    chosen = tiles.transpose(0, 2, 1, 3)[low | high].reshape(len(extreme), -1)
    shift = shifts[low | high]
    below = smallest[chosen].min(axis=1) + shift
    above = largest[chosen].max(axis=1) + shift
    bad = np.flatnonzero((below < MIN_EXPONENT) | (above > MAX_EXPONENT))
    if bad.size:
        i, j = extreme[bad[0]]
        raise CheckpointError(
            f"tile [{first + i}, {j}] with ue8m0 code {scales[i, j]} holds values from "
            f"2^{below[bad[0]]} to 2^{above[bad[0]]}, expected them within "
            f"2^{MIN_EXPONENT} and 2^{MAX_EXPONENT} (bf16's normal numbers)",
            where=where,
            next="re-quantise this weight: DeepInfer's GEMM would flush or overflow such values",
        )
