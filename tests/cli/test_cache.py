"""`deepinfer cache` and `deepinfer doctor --model`: what they print and what they refuse."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.cli import main
from deepinfer.commands import cache, probes
from deepinfer.compiler import read_config
from deepinfer.graph.make_model import tiny_config
from deepinfer.runtime.store import PageStore
from deepinfer.runtime.store_gc import LOCK, entry_path
from deepinfer.runtime.weight_store import WeightStore, weights_dir
from tests.runtime import weight_writer
from tests.runtime.fake_device import fake_program
from tests.runtime.store_writer import arrays_of, key_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three entries, a damaged one, and a file of a writer that was killed."""
    for i, (identity, kind, cache_class) in enumerate((
            ("first model", "page", "chat"), ("first model", "snapshot", "agent"),
            ("other", "page", "chat"), ("other", "page", "chat"))):
        assert PageStore(tmp_path, identity).put(kind, key_of(i), arrays_of(i), cache_class)
    (tmp_path / key_of(3).hex()[:2] / f"{key_of(3).hex()}.page").write_bytes(b"x" * 99)
    left = tmp_path / "tmp" / f"{'0' * 8}-1-{'0' * 16}"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    return tmp_path


def test_ls_for_machines(folder, capsys):
    assert main(["cache", "ls", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(folder) and found["leftovers"] == 1
    assert [(e["kind"], e["class"], e["identity"]) for e in found["entries"]] == [
        ("page", "chat", "first model"), ("snapshot", "agent", "first model"),
        ("page", "chat", "other"), ("page", None, None)]
    assert found["bytes"] == sum(e["bytes"] for e in found["entries"]) > 99
    assert all(abs(e["used"] - time.time()) < 600 for e in found["entries"])


def test_ls_for_readers(folder, capsys):
    assert main(["cache", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 entries" in lines[0] and lines[0].endswith("1 files of writers that were killed")
    assert [line.split()[:4] for line in lines[2:]] == [
        ["damaged", "-", "page", "1"], ["first", "model", "agent", "snapshot"],
        ["first", "model", "chat", "page"], ["other", "chat", "page", "1"]]
    assert all(line.endswith("s ago") for line in lines[2:])


def test_gc(folder, capsys):
    assert main(["cache", "gc", str(folder), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert {n: done[n] for n in ("expired", "over_limit", "damaged", "leftovers", "kept")} == {
        "expired": 0, "over_limit": 0, "damaged": 1, "leftovers": 1, "kept": 3}
    old = folder / key_of(1).hex()[:2] / f"{key_of(1).hex()}.snapshot"
    os.utime(old, (1, time.time() - 4 * 86400))
    assert main(["cache", "gc", str(folder), "--max-bytes", str(done["kept_bytes"] // 3)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("B remain") and "1 entries" in out
    assert [line.split()[-1] for line in out.splitlines()[1:]] == ["1", "1", "0", "0"]
    assert len(list(folder.rglob("*.page"))) == 1 and not old.exists()


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0 s"), (59, "59 s"), (90, "1.5 min"),
                                                (7200, "2.0 h"), (3 * 86400, "3.0 d")])
def test_spans(seconds, shown):
    assert cache._span(seconds) == shown


@pytest.mark.parametrize(("argv", "message"), [
    (["ls", "{}/none"], "no directory '{}/none'"),
    (["gc", "{}/none"], "no directory '{}/none'"),
    (["gc", "{}", "--max-bytes", "-1"], "max_bytes is -1, expected at least 0"),
])
def test_what_is_refused(tmp_path, capsys, argv, message):
    assert main(["cache", *(a.format(tmp_path) for a in argv)]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err


def test_gc_gives_up_on_a_process_that_hangs(folder, capsys, monkeypatch):
    monkeypatch.setattr(cache, "GC_TIMEOUT_S", 0.0)
    with open(folder / LOCK, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["cache", "gc", str(folder)]) == 3
    assert "another process has collected for 0 s" in capsys.readouterr().err


def capacity(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["doctor", *argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_capacity_of_the_release(capsys):
    """890 bytes a token (spec §4.2): three layers with half an entry a token, one with a whole."""
    found = capacity(capsys, "--model", "v4.1-flash", "--cache-bytes", "1000000000")
    assert found["bytes_per_token"] == 890 == (288 + 68) * 2.5
    assert found["bytes_per_page_by_cache"] == {"compressed KV": 288 * 320,
                                                "index keys": 68 * 320}
    assert found["rings_per_slot"] == 43 and found["ring_length"] == 134
    assert found["bytes_per_snapshot"] == 43 * 134 * 528
    assert found["bytes_per_snapshot_with_replay"] == 20 * 134 * 528
    assert found["tokens_without_snapshots"] == 10**9 // 113920 * 128
    both = 8 * 113920 + 43 * 134 * 528
    assert found["tokens"] == 10**9 * 8 // both * 128


def test_capacity_of_a_program_is_that_of_its_model(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_json()))
    length = read_config(tmp_path).max_position_embeddings
    of_model = capacity(capsys, "--model", str(tmp_path), "--cache-bytes", "100000")
    (tmp_path / "manifest.json").write_text("{}")
    program = fake_program(page_size=128, max_model_len=length)
    monkeypatch.setattr("deepinfer.program.Program.load", lambda path: program)
    assert capacity(capsys, "--model", str(tmp_path), "--cache-bytes", "100000") == of_model


def test_capacity_for_readers(capsys):
    assert main(["doctor", "--model", "v4.1-flash", "--cache-bytes", "8000000000"]) == 0
    out = capsys.readouterr().out
    assert "890 B" in out and "43 rings of 134 positions" in out
    assert "a snapshot: 3.04 MB; 1.42 MB with decoder replay" in out
    assert "8 GB (--cache-bytes) hold 2,071,936 tokens with a snapshot every 8 pages" in out
    assert main(["doctor", "--model", "v4.1-flash"]) == 0
    assert "(free memory) hold" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "message"), [
    (["--model", "v4.1-flash", "--cache-bytes", "0"], "cache_bytes is 0, expected at least 1"),
    (["--cache-bytes", "5"], "--cache-bytes was given without --model"),
    (["--model", "nothing"], "no model at 'nothing'"),
])
def test_capacity_refuses(capsys, argv, message):
    assert main(["doctor", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def packed(tmp_path, monkeypatch) -> Path:
    """A cache directory with two files of packed weights, one of them damaged in its data."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(weight_writer, "say", lambda *words: None)
    store = WeightStore(weights_dir())
    for key in (b"a" * 32, b"b" * 32):
        assert store.build(replace(weight_writer.PACK, key=key), weight_writer.arrays) is not None
    store.remember(b"s" * 32, "ab" * 32)
    file = entry_path(store.path, "weights", b"b" * 32)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return store.path


def test_packed_weights_are_the_default(packed, capsys):
    assert main(["cache", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(packed) and found["leftovers"] == 0
    assert [(e["kind"], e["class"], e["identity"]) for e in found["entries"]] == [
        ("weights", "weights", "the fingerprint"), ("weights", "weights", "the fingerprint"),
        ("fingerprint", "weights", "")]
    size = sum(e["bytes"] for e in found["entries"])
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out.startswith(f"{packed}: 3 entries, {size / 1000:.0f} KB")
    [row] = [f for f in probes.settings() if f.name == "packed weights"]
    assert row.found and row.detail.startswith(f"{packed}: 2 files, ")


def test_gc_verifies_on_request(packed, capsys):
    for argv, damaged in ((["gc"], 0), (["gc", "--verify"], 1), (["gc", "--verify"], 0)):
        assert main(["cache", *argv, "--json"]) == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["damaged"], done["path"]) == (damaged, str(packed))
    assert done["kept"] == 2


def test_nothing_is_packed_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "none"))
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/none/weights: 0 entries, 0 B\n"
    assert main(["cache", "gc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 0
    assert not (tmp_path / "none").exists()
    [row] = [f for f in probes.settings() if f.name == "packed weights"]
    assert not row.found and row.follows == "the first load of a model makes them"
