"""Emulated tests need g++ on x86-64: the emulators switch fibers with its instructions."""

from __future__ import annotations

import platform
import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "" if shutil.which("g++") else "no g++"
    if platform.machine() != "x86_64":
        missing = f"machine is {platform.machine()}, not x86_64"
    if missing:
        for item in items:
            if item.path.parent.name == "emulated":
                item.add_marker(pytest.mark.skip(reason=f"emulators cannot be built: {missing}"))
