"""Options and settings of the whole test suite."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Programs and objects that tests compile are kept by content, apart from the user's own.
os.environ.setdefault("DEEPINFER_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "tests"))

# The same examples on every run and machine: a failure that CI sees can be seen again.
hypothesis.settings.register_profile(
    "deterministic", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes long; runs with --full (make test-all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long: runs with --full (make test-all)"))
