"""A Program on disk: written at once, checked when opened, never written over other things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer import program as artifact
from deepinfer.errors import ProgramError
from deepinfer.program import Program, check_replaceable, first_difference, save
from tests.program.conftest import files_of

ROOT = Path(__file__).parents[2]
PHASE = {"values": [
    {"name": "x", "kind": "input", "dtype": "i32", "shape": [["num_tokens", 1]]},
    {"name": "q", "kind": "temp", "dtype": "e2m1", "shape": [["num_tokens", 2], 32], "offset": 64}],
    "sizes": [["num_tokens", 8]], "outputs": ["q"], "arena_bytes": 4096, "scratch_bytes": 0,
    "launches": [["probe", "probe_00", "layers.0"]], "graph_digest": "00"}
MANIFEST = {"key": "k", "target": "cpu", "isa": ["generic"], "model": {"layers": [1, 2]},
            "phases": {"prefill": PHASE}}
FILES = {"src/step.cc": b"int x;\n", "graphs/prefill.txt": b"graph prefill\n",
         "bin/generic.so": b"\x7fELF and so on"}


def write(path: Path, **changes: object) -> Program:
    return save(path, {**MANIFEST, **changes}, FILES)


def test_save_and_load(tmp_path):
    made = write(tmp_path / "deep" / "p")
    loaded = Program.load(str(tmp_path / "deep" / "p"))
    assert made.digest == loaded.digest and made.path == loaded.path
    assert made.phases == loaded.phases and loaded.target == "cpu"
    phase = loaded.phases["prefill"]
    assert phase.launches == (("probe", "probe_00", "layers.0"),)
    assert phase.sizes == (("num_tokens", 8),)
    value = phase.value("q")
    assert value.logical({"num_tokens": 3}) == (6, 32) and value.offset == 64
    assert value.storage({"num_tokens": 3}) == (6, 16)
    with pytest.raises(ProgramError, match="phase 'prefill' has no value 'z'"):
        phase.value("z")
    assert os.listdir(tmp_path / "deep") == ["p"]  # nothing is left beside it
    assert files_of(loaded.path).keys() == {*FILES, "manifest.json"}
    assert write(tmp_path / "other").digest == made.digest
    assert write(tmp_path / "third", key="k2").digest != made.digest


def cut(data: bytes) -> bytes:
    return data[:len(data) // 2]


def flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("manifest.json", None, "cannot read manifest.json"),
    ("manifest.json", cut, "cannot read manifest.json"),
    ("manifest.json", lambda data: b"", "cannot read manifest.json"),
    ("manifest.json", lambda data: b"\xff" + data, "cannot read manifest.json"),
    ("manifest.json", lambda data: b"[]", "format is <class 'list'>, expected 1"),
    ("manifest.json", lambda data: b"{}", "format is None, expected 1"),
    ("manifest.json", lambda data: data.replace(b'"format": 1', b'"format": 2'),
     "format is 2, expected 1"),
    ("manifest.json", lambda data: data.replace(b'"offset": 64', b'"offset": 65'),
     "manifest.json says digest"),
    ("manifest.json", lambda data: data.replace(b'"digest"', b'"digets"'),
     "manifest.json says digest None"),
    *((name, None, f"file {name} cannot be read") for name in FILES),
    *((name, damage, f"file {name} has sha256 .*, expected ")
      for name in FILES for damage in (cut, flip, lambda data: data + b"\n")),
])
def test_damage(tmp_path, name, damage, message):
    path = write(tmp_path / "p").path
    data = (path / name).read_bytes()
    if damage is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(damage(data))
        assert (path / name).read_bytes() != data
    with pytest.raises(ProgramError, match=message) as caught:
        Program.load(path)
    assert str(path) in caught.value.where and "compile it again" in caught.value.next
    if name != "manifest.json":
        assert write(path).digest == Program.load(path).digest  # it may be written anew


def test_every_flipped_byte_of_the_manifest(tmp_path):
    """Whatever byte is damaged, the Program is refused or, for a space, the same."""
    made = write(tmp_path / "p")
    file = made.path / "manifest.json"
    data = file.read_bytes()
    refused = 0
    for at in range(0, len(data), 7):
        file.write_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1:])
        try:
            assert Program.load(made.path).manifest == made.manifest
        except ProgramError:
            refused += 1
    assert refused > len(data) // 7 // 2


def test_require(tmp_path):
    made = write(tmp_path / "p")
    made.require(target="cpu", model={"layers": (1, 2)})
    for expected, message in (
            ({"target": "sm100"}, "field target is 'cpu', expected 'sm100'"),
            ({"model": {"layers": [1, 3]}}, r"field model.layers\[1\] is 2, expected 3"),
            ({"model": {"layers": [1]}}, r"field model.layers is \[1, 2\], expected \[1\]"),
            ({"model": {"layers": [1, 2], "heads": 4}}, "field model.heads is None, expected 4"),
            ({"model": {}}, r"field model.layers is \[1, 2\], expected None"),
            ({"weights": "w"}, "field weights is None, expected 'w'")):
        with pytest.raises(ProgramError, match=message) as caught:
            made.require(**expected)
        assert str(made.path) in caught.value.where and "compile a Program" in caught.value.next
    assert first_difference({"a": [1]}, {"a": (1,)}, "x") is None


def test_a_program_is_replaced_whole(tmp_path):
    old = write(tmp_path / "p")
    (old.path / "src/step.cc").unlink()  # a damaged one too
    new = save(tmp_path / "p", {**MANIFEST, "key": "new"}, {"bin/avx2.so": b"1"})
    assert Program.load(tmp_path / "p").digest == new.digest != old.digest
    assert files_of(new.path).keys() == {"manifest.json", "bin/avx2.so"}
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert sorted(os.listdir(tmp_path)) == ["empty", "p"]


def test_the_same_program_is_kept(tmp_path):
    old = write(tmp_path / "p")
    inode = (old.path / "manifest.json").stat().st_ino
    assert write(tmp_path / "p").digest == old.digest
    assert (old.path / "manifest.json").stat().st_ino == inode


@pytest.mark.parametrize("files", [
    {"notes.txt": "mine"},
    {"manifest.json": '{"name": "a web app"}', "src/index.js": "alert()"},
    {"manifest.json": "[]"},
    {"src/main.cc": "int main() {}"},
    {"graphs/plot.png": "", "bin/tool": ""},
    {"manifest.json": '{"format": 1, "abi": 1, "files": {}}', "notes.txt": "mine"},
    {"manifest.json": "{ torn", "src/index.js": ""},
], ids=lambda files: "+".join(files))
def test_other_directories_are_left_alone(tmp_path, files):
    path = tmp_path / "theirs"
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    before = files_of(tmp_path)
    for attempt in (check_replaceable, write):
        with pytest.raises(ProgramError, match="it is no Program, it holds ") as caught:
            attempt(path)
        assert caught.value.next == "give an empty or a new directory"
    assert files_of(tmp_path) == before and os.listdir(tmp_path) == ["theirs"]


def test_a_file_is_left_alone(tmp_path):
    (tmp_path / "p").write_text("mine")
    with pytest.raises(ProgramError, match="it is no Program, it holds p"):
        write(tmp_path / "p")
    assert (tmp_path / "p").read_text() == "mine"
    check_replaceable(tmp_path / "new")


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    """The old Program stays whole, and no half of the new one is beside it."""
    old = write(tmp_path / "p")
    before = files_of(tmp_path)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "p", key="new")
    monkeypatch.undo()
    assert files_of(tmp_path) == before and Program.load(old.path).digest == old.digest


@pytest.mark.parametrize("keys", [("same", "same"), ("one", "other")])
def test_two_processes_write_at_once(tmp_path, keys):
    """Neither fails, whichever wins, and what is there in the end is whole."""
    code = """
import sys
from pathlib import Path
from tests.program.test_artifact import write
sys.stdin.readline()
for _ in range(60):
    write(Path(sys.argv[1]), key=sys.argv[2])
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "p"), key], cwd=ROOT,
                                stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for key in keys]
    for writer in writers:  # both have started before either writes
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert Program.load(tmp_path / "p").manifest["key"] in keys
    assert os.listdir(tmp_path) == ["p"]


def test_the_manifest_is_documented(program):
    """Every field is in the module's text, and the documented files are those there are."""
    text = artifact.__doc__
    missing = [name for name in program.manifest if f"``{name}``" not in text]
    assert missing == []
    manifest = json.loads((program.path / "manifest.json").read_text())
    assert manifest["format"] == artifact.FORMAT and manifest["abi"] == artifact.ABI
    names = files_of(program.path).keys()
    assert names == manifest["files"].keys() | {"manifest.json"}
    assert {"graphs/prefill.txt", "graphs/decode.txt", "src/step.cc", "bin/generic.so"} <= names
    assert {n.partition("/")[0] for n in names} == {"manifest.json", "graphs", "src", "bin"}
