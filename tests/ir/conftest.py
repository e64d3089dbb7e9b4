"""Ops that only these tests know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer.ir import OPS


@pytest.fixture(autouse=True)
def own_ops() -> Iterator[None]:
    """Ops that a test declares are gone after it."""
    yield
    for name, op in list(OPS.items()):
        if not op.reference.__module__.startswith("deepinfer."):
            del OPS[name]
