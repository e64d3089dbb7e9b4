"""Lowered texts are kept by content: what is in the key, and that a hit starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.codegen import cache, sources
from deepinfer.codegen.select import instances, select
from tests.codegen import fake_target
from tests.codegen.fake_target import target
from tests.ir.graphs import Ops, small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def instance():
    found = instances(select(small(Ops()), target("scale", "halves", "store")))
    return next(x for s, x in found.items() if s.startswith("halves"))


def lowerings(instance, directory) -> int:
    before = len(fake_target.lowered)
    made = cache.cached_lower(target("halves"), directory)(instance)
    assert made.symbol == instance.symbol and instance.spec.key() in made.text
    assert made.params == (("x", "float*"),) and made.launch == {"grid": [1, 2]}
    return len(fake_target.lowered) - before


def test_a_hit_lowers_nothing(instance, tmp_path):
    assert [lowerings(instance, tmp_path / "new") for _ in range(3)] == [1, 0, 0]
    (file,) = (tmp_path / "new").iterdir()
    for damaged in (b"", b"{", b"[]", b'{"symbol": 1}', b"\xff"):
        file.write_bytes(damaged)
        assert [lowerings(instance, tmp_path / "new") for _ in range(2)] == [1, 0]


def test_what_is_in_the_key(instance, tmp_path, monkeypatch):
    assert lowerings(instance, tmp_path) == 1
    monkeypatch.setattr(cache, "tilelang_version", lambda: "0.0.0")
    assert [lowerings(instance, tmp_path) for _ in range(2)] == [1, 0]
    other = tmp_path / "other.py"
    other.write_text("# a file that the kernel imports\n")
    monkeypatch.setattr(cache, "closure", lambda *files: (*sources.closure(*files), other))
    assert [lowerings(instance, tmp_path) for _ in range(2)] == [1, 0]
    other.write_text("# edited\n")
    assert [lowerings(instance, tmp_path) for _ in range(2)] == [1, 0]


def test_closure():
    """A kernel depends on the files it imports, also on another kernel's and on macros'."""
    kernels = ROOT / "deepinfer/targets/cpu/kernels"
    found = {p.relative_to(ROOT).as_posix()
             for p in sources.closure(kernels / "index_topk_within.py")}
    assert {"deepinfer/targets/cpu/kernels/index_topk.py", "deepinfer/targets/cpu/dialect.py",
            "deepinfer/targets/base.py", "deepinfer/ir/types.py"} <= found
    assert "deepinfer/targets/cpu/kernels/rope.py" not in found
    assert kernels / "_macros.py" in sources.closure(kernels / "rms_norm.py")


def test_a_hit_does_not_import_tilelang(instance, tmp_path):
    """In another process, with the same content key, tilelang stays unloaded."""
    code = f"""
import sys
from pathlib import Path
from deepinfer.codegen.cache import cached_lower
from deepinfer.codegen.select import instances, select
from tests.codegen.fake_target import target
from tests.ir.graphs import Ops, small
fake = target("scale", "halves", "store")
for instance in instances(select(small(Ops()), fake)).values():
    cached_lower(fake, Path({str(tmp_path)!r}))(instance)
from tests.codegen import fake_target
print(len(fake_target.lowered), "tilelang" in sys.modules, "torch" in sys.modules)
"""
    def run() -> str:
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                              text=True, check=True).stdout

    assert run() == "4 False False\n"
    assert run() == "0 False False\n"


def test_a_changed_byte_is_noticed(instance, tmp_path):
    """Still good JSON, but another kernel: it must not be compiled."""
    assert lowerings(instance, tmp_path) == 1
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("float*", "short*"))
    assert [lowerings(instance, tmp_path) for _ in range(2)] == [1, 0]
