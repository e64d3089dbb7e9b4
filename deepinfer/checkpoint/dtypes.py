"""The tensor dtypes of a checkpoint file and the numpy dtypes that hold them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# safetensors code -> numpy dtype that `CheckpointReader.raw` hands out, little-endian as stored.
# I8 in the release is never an integer: it is two e2m1 codes, read as a byte with two nibbles.
READ_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I8": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}

# numpy dtype -> safetensors code that `write_checkpoint` stores: the inverse, except that int8
# means I8 and uint8 means U8 (packed fp4 is written as `packed.view(np.int8)`).
WRITE_CODES: dict[np.dtype[np.generic], str] = {
    **{dtype: code for code, dtype in READ_DTYPES.items() if code != "I8"},
    np.dtype(np.int8): "I8",
}
