"""Objects are kept between builds, wherever the build runs, and a damaged one is not linked."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from deepinfer.errors import ToolchainError
from deepinfer.targets.cpu.toolchain import compile_library

SOURCE = {"answer": 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'}


def answer(out: Path) -> int:
    return int(ctypes.CDLL(str(out)).answer())


def test_a_relative_cache_directory(tmp_path, monkeypatch):
    """The compiler runs in a directory of its own, where a relative path would lead elsewhere."""
    monkeypatch.chdir(tmp_path)
    compile_library(SOURCE, "generic", tmp_path / "a.so", Path("a cache é"))
    assert answer(tmp_path / "a.so") == 42 and len(list(tmp_path.glob("a cache é/*.o"))) == 2


@pytest.mark.parametrize("damage", [
    lambda good: b"",  # as a power cut leaves a file whose name was written before its data
    lambda good: good[:-1],
    lambda good: good.replace(b"\x2a\x00\x00\x00", b"\x2b\x00\x00\x00"),  # links, and answers 43
])
def test_a_damaged_object_is_made_anew(damage, tmp_path):
    cache = tmp_path / "cache"
    compile_library(SOURCE, "generic", tmp_path / "first.so", cache)
    good = {file: file.read_bytes() for file in cache.glob("*.o")}
    assert any(damage(data) != data for data in good.values())
    for file, data in good.items():
        file.write_bytes(damage(data))
    compile_library(SOURCE, "generic", tmp_path / "second.so", cache)
    assert answer(tmp_path / "second.so") == 42
    assert {file: file.read_bytes() for file in cache.glob("*.o")} == good


def test_a_symbol_that_nothing_defines_is_an_error_of_the_build(tmp_path):
    source = {"probe": 'int missing(); extern "C" int probe() { return missing(); }'}
    with pytest.raises(ToolchainError, match="missing"):
        compile_library(source, "generic", tmp_path / "x.so", tmp_path)
    assert not (tmp_path / "x.so").exists()
