"""Compiling: byte for byte the same anywhere, killed or not, at most once, and never by halves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from deepinfer.compiler import compile, content_key
from deepinfer.errors import ProgramError, TargetError, ToolchainError
from deepinfer.graph.limits import Limits
from deepinfer.program import Program
from deepinfer.settings import cache_dir
from deepinfer.targets.base import load_target
from deepinfer.targets.cpu import toolchain
from tests.forward.cases import Case
from tests.program.conftest import files_of

ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
from deepinfer.compiler import compile
from deepinfer.graph.limits import Limits
model, limits, out = sys.argv[1:]
made = compile(model, limits=Limits(**json.loads(limits)), out=out or None, isa=("generic",),
               jobs=2)
print(made.digest, "tilelang" in sys.modules, "torch" in sys.modules)
"""


def compiler_script(path: Path, otherwise: str) -> Path:
    """A compiler that answers --version as the real one; what it does otherwise is given."""
    real = toolchain.compiler()
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real} --version; fi\n'
                    + otherwise.replace("REAL", real))
    path.chmod(0o755)
    return path


def compile_elsewhere(case: Case, cwd: Path, out: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", COMPILE, str(case.path), json.dumps(asdict(case.limits)), out],
        cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env})


def test_killed_then_compiled_elsewhere(case, program, tmp_path):
    """In another directory with another cache, killed -9 in the middle and started again: the
    bytes of every file are those of the first Program, and what was compiled is not compiled
    again."""
    calls, cache, out = tmp_path / "calls", tmp_path / "a cache", tmp_path / "out" / "p"
    calls.mkdir()
    killer = compiler_script(tmp_path / "killer", f"""
if [ $(ls '{calls}' | wc -l) -ge 9 ]; then kill -9 $PPID; exit 1; fi
REAL "$@" && : > '{calls}'/$$
""")
    env = {"DEEPINFER_CACHE_DIR": str(cache)}
    done = compile_elsewhere(case, tmp_path, str(out), CXX=str(killer), **env)
    assert done.returncode == -9 and not out.exists()
    objects = set((cache / "objects").glob("*.o"))
    assert 7 <= len(objects) < len(list((program.path / "src").glob("*.cc")))
    counter = compiler_script(tmp_path / "counter", f": > '{calls}'/again.$$\nexec REAL \"$@\"\n")
    done = compile_elsewhere(case, tmp_path, str(out), CXX=str(counter), **env)
    assert done.returncode == 0, done.stderr
    again = len(list(calls.glob("again.*")))
    everything = set((cache / "objects").glob("*.o"))
    assert objects < everything and again == len(everything - objects) + 1  # the link
    assert files_of(out) == files_of(program.path)
    assert os.listdir(out.parent) == ["p"]


def test_the_second_compile_compiles_nothing(case, program, tmp_path):
    """With a compiler that only tells its version, and without loading TileLang."""
    broken = compiler_script(tmp_path / "broken", "echo no compiling today >&2\nexit 7\n")
    done = compile_elsewhere(case, tmp_path, "", CXX=str(broken))
    assert (done.returncode, done.stdout) == (0, f"{program.digest} False False\n"), done.stderr


def test_a_failing_compiler(case, tmp_path, monkeypatch):
    """The control of the test above: that compiler cannot compile, and says why."""
    broken = compiler_script(tmp_path / "broken", "echo no compiling today >&2\nexit 7\n")
    monkeypatch.setattr(toolchain, "compiler", lambda: str(broken))
    with pytest.raises(ToolchainError, match="broken failed with 7:\nno compiling today") as caught:
        toolchain.compile_library({"probe": "int x;"}, "generic", tmp_path / "x.so", tmp_path)
    assert caught.value.where in ("probe (generic)", "micro (generic)")
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob("*.o"))


@pytest.fixture
def fresh_toolchain():
    """The compiler is looked up once a process."""
    for each in (toolchain.compiler, toolchain.compiler_version):
        each.cache_clear()
    yield
    for each in (toolchain.compiler, toolchain.compiler_version):
        each.cache_clear()


def test_no_compiler(case, monkeypatch, tmp_path, fresh_toolchain):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match="no C[+][+] compiler found") as caught:
        compile(case.cfg, limits=case.limits)
    assert "apt-get install g++" in caught.value.next


@pytest.mark.parametrize(("script", "message"), [
    (None, "CXX is '.*cxx', no such program"),
    ("#!/bin/sh\necho it is broken >&2\nexit 3\n", "cxx --version` failed with 3: it is broken"),
    ("#!/bin/sh\n", "failed with 0: "),
    ("#!/not/there\n", "cxx cannot be run"),
])
def test_a_compiler_that_does_not_start(monkeypatch, tmp_path, fresh_toolchain, script, message):
    path = tmp_path / "cxx"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(ToolchainError, match=message) as caught:
        toolchain.compiler_version()
    assert "CXX" in caught.value.next


@pytest.mark.parametrize("isa", [("sse9",), ("generic", "x"), (), "native"])
def test_unknown_levels_are_refused_first(case, isa, tmp_path):
    with pytest.raises(TargetError, match="no ISA level .*expected some of generic, avx2"):
        compile(case.cfg, limits=case.limits, isa=isa, out=tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_a_directory_of_something_else_is_refused_first(case, tmp_path, monkeypatch):
    """Before anything is lowered."""
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr("deepinfer.compiler.build_graphs", lambda *a: pytest.fail("it built"))
    with pytest.raises(ProgramError, match="it is no Program, it holds notes.txt"):
        compile(case.cfg, limits=case.limits, isa=("generic",), out=tmp_path)


def test_what_the_key_covers(case, program, monkeypatch):
    cpu = load_target("cpu")

    def key(cfg=case.cfg, limits=case.limits, isa=("generic",)) -> str:
        return content_key(cfg, limits, cpu, isa)

    base = key()
    assert base == program.manifest["key"] == key()
    assert program.path == cache_dir() / "programs" / base[:32]
    keys = {base, key(isa=("generic", "avx2")), key(limits=Limits(max_num_seqs=3))}
    monkeypatch.setattr("deepinfer.compiler.tilelang_version", lambda: "0")
    keys.add(key())
    monkeypatch.undo()
    monkeypatch.setattr("deepinfer.compiler.source_digest", lambda target: "edited")
    keys.add(key())
    assert len(keys) == 5


def test_nothing_of_this_machine_is_in_it(program):
    """No absolute path in any file, binaries included, and no name of this clone or its caches."""
    places = [str(p).encode() for p in (ROOT, cache_dir(), Path.home(), sys.prefix)
              if str(p) != "/"]
    pattern = re.compile(rb"(?<![\w/.*])/(?:home|root|tmp|usr|opt|Users|var|work|mnt|etc)/[\w.]+")
    for name, data in files_of(program.path).items():
        assert [p for p in places if p in data] == [], name
        assert pattern.findall(data) == [], name
    assert pattern.findall(b"\x00/tmp/kernel.cc\x00 -I/usr/include") == [b"/tmp/kernel.cc"]
    assert Program.load(program.path).digest == program.digest
