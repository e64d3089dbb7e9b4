"""Random values for the tensors of a checkpoint, with the spread a stable test model needs.

The weights are drawn as codes of their stored format. A sublayer's output is kept small against
the residual stream (spec §11.10), so that one flipped rounding does not swamp all that follows, and
scales differ from tile to tile, so that a scale taken from the wrong tile shows.
"""

from __future__ import annotations

import hashlib
import math
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_CHUNK = 1 << 20
_DTYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
# Standard deviation of the e4m3 codes' values: far from both ends of the format.
_E4M3_SPREAD = 32.0
# Root mean square of the e2m1 values, all 16 codes being equally likely.
_E2M1_SPREAD = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
# Root mean square of 2^j, j in {-1, 0, 1}: what the varying scales add.
_JITTER_SPREAD = math.sqrt((0.25 + 1 + 4) / 3)
_SCALE_BIAS = 127

# Gain of a matrix = RMS of its output for inputs of RMS 1, by the end of its name; others have 1.
_GAINS = (
    (".attn.wq_b", 1.5),  # attention scores of about this deviation
    # Small against the residual: else one flipped rounding swamps what comes after it (§11.10).
    (".attn.wo_b", 0.1),
    (".w2", 0.05),
    (".engram.wkv", 0.5),
    (".hc_attn_fn", 0.5),
    (".hc_ffn_fn", 0.5),
    ("head", 2.5),  # logits of this deviation
)
# Tables are looked up by row, so an element's size does not depend on the row's length.
_TABLE = "embed"
# Vectors: mean, deviation.
_VECTORS = (
    ("norm.weight", 1.0, 0.1),
    ("q_weight", 1.0, 0.1),
    ("k_weight", 1.0, 0.1),
    ("attn_sink", 0.0, 1.0),
    (".bias", 0.0, 0.05),
    (".bias_vl", 0.0, 0.05),
    ("_base", 0.0, 0.5),
    ("_scale", 0.5, 0.1),
    ("image_start", 0.0, 1.0),
    ("image_end", 0.0, 1.0),
    ("image_newline", 0.0, 1.0),
)


def random_tensor(name: str, tag: str, shape: tuple[int, ...], seed: int) -> Array:
    """The values of one checkpoint tensor.

    Args:
        name: checkpoint name; with `seed` it alone fixes the stream, and it chooses the spread.
        tag: safetensors dtype; I8 is packed e2m1.
        shape: stored shape.
        seed: 0 .. 2^64 - 1.

    Returns:
        An array of that shape; int8 for I8.
    """
    stream = _stream(name, seed)
    if tag == "I8":
        raw = stream.random_raw(-(-prod(shape) // 8)).view(np.int8)
        return np.ascontiguousarray(raw[: prod(shape)]).reshape(shape)
    if tag == "F8_E8M0":
        return _scales(name, shape, stream)
    mean, deviation = 0.0, _E4M3_SPREAD
    if tag != "F8_E4M3":
        mean, deviation = _moments(name, shape)
    values = np.empty(prod(shape), _DTYPES[tag])
    for begin in range(0, len(values), _CHUNK):
        part = values[begin : begin + _CHUNK]
        part[:] = np.float32(mean) + _normal(stream, len(part)) * np.float32(deviation)
    return values.reshape(shape)


def _stream(name: str, seed: int) -> np.random.Philox:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return np.random.Philox(key=np.array([seed, int.from_bytes(digest, "little")], np.uint64))


def _normal(stream: np.random.Philox, count: int) -> npt.NDArray[np.float32]:
    """Nearly normal values of mean 0 and deviation 1, no larger than 3.5.

    Sums of four 16-bit integers: unlike numpy's own normals these use no libm and are the same
    for every numpy version.
    """
    pieces = stream.random_raw(count).astype("<u8", copy=False).view("<u2").reshape(-1, 4)
    centred = pieces.sum(axis=1, dtype=np.int32) - np.int32(2 * 65535)
    return np.asarray(centred.astype(np.float32) * np.float32(1 / (65536 * math.sqrt(4 / 12))))


def _scales(name: str, shape: tuple[int, ...], stream: np.random.Philox) -> Array:
    """ue8m0 codes around the one that gives the weight its gain."""
    owner = name.removesuffix(".scale")
    routed = ".experts." in owner
    # Both formats have one scale per 32 elements along K.
    inputs = 1 if owner.endswith(_TABLE) else 32 * shape[-1]
    spread = (_E2M1_SPREAD if routed else _E4M3_SPREAD) * _JITTER_SPREAD
    centre = round(math.log2(_gain(owner) / (math.sqrt(inputs) * spread)))
    jitter = (stream.random_raw(prod(shape)) % 3).astype(np.uint8)
    codes = jitter + np.uint8(_SCALE_BIAS + centre - 1)
    return codes.reshape(shape).view(ml_dtypes.float8_e8m0fnu)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of an unquantised tensor."""
    for ending, mean, deviation in _VECTORS:
        if name.endswith(ending):
            return mean, deviation
    owner = name.removesuffix(".weight")
    inputs = 1 if owner.endswith(_TABLE) else shape[-1]
    return 0.0, _gain(owner) / math.sqrt(inputs)


def _gain(owner: str) -> float:
    # The Markov head adds to the lm head's logits and must not drown them.
    if owner.endswith(".markov_head.head"):
        return 1.0
    return next((gain for ending, gain in _GAINS if owner.endswith(ending)), 1.0)
