"""Smoke test of the whole in seconds: a model on disk, its graph, its logits; nothing is compiled.

To begin with after a change: ``pytest tests/test_tiny.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.forward.cases import inputs, make_case, same_bits, tokens_for


def test_a_tiny_model_from_disk_to_logits(tmp_path: Path) -> None:
    """Five tokens at once, and cut in 2 and 3: finite logits, the same bits."""
    case = make_case(tmp_path / "tiny")
    tokens = tokens_for(case, 5)

    def logits(*cuts: int) -> np.ndarray:
        device = case.source()
        parts = [device.run("prefill", inputs(case, [(0, tokens, start, end)]),
                            trace=["head.logits"])["head.logits"]
                 for start, end in zip((0, *cuts), (*cuts, 5), strict=True)]
        assert device.calls == len(cuts) + 1
        return np.concatenate(parts)

    whole = logits()
    assert whole.shape == (5, case.cfg.vocab_size) and whole.dtype == np.float32
    assert np.isfinite(whole).all() and len(np.unique(whole, axis=0)) == 5
    assert same_bits(logits(2), whole)
