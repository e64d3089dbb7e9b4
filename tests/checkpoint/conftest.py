"""Small checkpoints, well-formed and otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """One tensor of each dtype the format knows here, an odd, an empty and a scalar one too."""
    rng = np.random.default_rng(0)

    def codes(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, shape, dtype=np.uint8)

    return {
        "embed.weight": rng.standard_normal((6, 8)).astype(ml_dtypes.bfloat16),
        "layers.0.attn.wq_a.weight": codes(32, 32).view(ml_dtypes.float8_e4m3fn),
        "layers.0.attn.wq_a.scale": codes(1, 1).view(ml_dtypes.float8_e8m0fnu),
        "layers.0.attn.attn_sink": rng.standard_normal(3).astype(np.float32),
        "layers.0.ffn.experts.0.w1.weight": codes(4, 16).view(np.int8),
        "layers.0.bytes": codes(7),
        "half": rng.standard_normal(5).astype(np.float16),
        "ids": rng.integers(-9, 9, (2, 3), dtype=np.int32),
        "long_ids": rng.integers(-9, 9, 2, dtype=np.int64),
        "empty": np.empty((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }


@pytest.fixture
def write_raw(tmp_path: Path) -> Callable[..., Path]:
    """Write a safetensors file byte by byte as told, however wrong; returns its directory."""

    def write(header: Any, data: bytes = b"", *, file: str = "model.safetensors") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (tmp_path / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
        return tmp_path

    return write
