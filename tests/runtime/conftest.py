"""Programs and models that the tests of the runtime share, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.compiler import compile, read_config
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import make_model
from deepinfer.program import Program
from tests.runtime.fake_device import fake_program


@pytest.fixture(scope="session")
def program() -> Program:
    """A Program without code."""
    return fake_program()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny checkpoint."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", path, seed=7)
    return path


@pytest.fixture(scope="session")
def compiled(tiny: Path) -> Program:
    """The tiny model compiled with small pages, so that requests have many of them."""
    cfg = read_config(tiny)
    return compile(cfg, limits=Limits.for_model(cfg, page_size=16, max_num_seqs=8,
                                                max_num_batched_tokens=64))
