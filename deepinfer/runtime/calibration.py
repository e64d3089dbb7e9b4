"""Temperatures that make the draft's confidences match how often its drafts are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.errors import CheckpointError

KEY = "dspark_confidence_temperatures"  # in generation_config.json
_F32 = np.finfo(np.float32)


def load_calibration(model: Path | str, block: int) -> tuple[float, ...]:
    """Temperatures of the draft's confidences, one per position of a block; 1 where none are given.

    Args:
        model: the checkpoint directory; generation_config.json may hold them under
            "dspark_confidence_temperatures".

    Raises:
        CheckpointError: they are not ``block`` numbers above 0.

    Source: spec §5.5 "STS".
    """
    path = Path(model) / "generation_config.json"
    if not path.exists():
        return (1.0,) * block
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"it cannot be read: {error}", where=str(path),
                              next="mend or remove the file") from None
    given = config.get(KEY) if isinstance(config, dict) else None
    if given is None:
        return (1.0,) * block
    good = isinstance(given, list) and len(given) == block and all(map(_is_temperature, given))
    if not good:
        raise CheckpointError(f"{KEY} is {given!r}, expected {block} numbers above 0",
                              where=str(path), next="correct them or take them out")
    return tuple(float(t) for t in given)


def _is_temperature(value: Any) -> bool:
    """A number that fp32 holds: the compiled confidence divides by it. NaN compares as false."""
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and float(_F32.tiny) <= value <= float(_F32.max))
