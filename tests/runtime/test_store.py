"""The persistent tier: a damaged, foreign or half-written file is a miss, never a wrong answer."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.store import RETRY_S, PageStore
from deepinfer.runtime.store_gc import LEFTOVER_S, LOCK, collect, entries, leftovers
from tests.runtime.nursery import Nursery
from tests.runtime.store_writer import arrays_of, key_of, layout_of, size_of

DAY = 86400.0
LAYOUT = layout_of()


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def open_store(path: Path | str, identity: str = "weights", **given) -> PageStore:
    return PageStore(path, identity, **given)


def equal(found, expected) -> bool:
    return list(found) == list(expected) and all(
        found[n].dtype == expected[n].dtype and found[n].shape == expected[n].shape
        and found[n].tobytes() == expected[n].tobytes() for n in expected)


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != LOCK)


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_is_put_is_got(tmp_path, no_warning):
    store = open_store(tmp_path / "a" / "b")
    assert not store.contains("page", key_of(1)) and store.get("page", key_of(1), LAYOUT) is None
    assert store.put("page", key_of(1), arrays_of(1), "chat")
    assert store.put("snapshot", key_of(1), arrays_of(2), "agent")
    for again in (store, open_store(tmp_path / "a" / "b")):
        assert again.contains("page", key_of(1)) and not again.contains("page", key_of(2))
        assert equal(again.get("page", key_of(1), LAYOUT), arrays_of(1))
        assert equal(again.get("snapshot", key_of(1), LAYOUT), arrays_of(2))
    assert len(files(tmp_path)) == 2  # no temporary file is left
    before = [f.read_bytes() for f in files(tmp_path)]
    assert store.put("page", key_of(1), arrays_of(9), "chat")  # there is one: kept
    assert [f.read_bytes() for f in files(tmp_path)] == before


def test_every_damaged_byte_is_noticed(tmp_path):
    """Each byte flipped, the file cut at each length, and bytes added: a miss, and it is gone."""
    store = open_store(tmp_path)
    store.put("page", key_of(1), arrays_of(1, 16), "chat")
    file, layout = files(tmp_path)[0], layout_of(16)
    good = file.read_bytes()
    damaged = [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1:] for i in range(len(good))]
    damaged += [good[:i] for i in range(0, len(good), 3)] + [good + b"\0", good * 2, b"x" * 40]
    for data in damaged:
        file.write_bytes(data)
        fresh = open_store(tmp_path)
        with pytest.warns(RuntimeWarning, match="prefix cache, (damaged|another format) entry"):
            assert fresh.get("page", key_of(1), layout) is None
        assert not file.exists()
    file.write_bytes(good)
    assert equal(store.get("page", key_of(1), layout), arrays_of(1, 16))


def test_a_foreign_entry_is_a_miss(tmp_path):
    """Another model's, another page's, another kind's, another layout's, under the right name."""
    foreign = [
        ({"identity": "other"}, "page", key_of(1), arrays_of(1)),
        ({}, "page", key_of(2), arrays_of(1)),
        ({}, "snapshot", key_of(1), arrays_of(1)),
        ({}, "page", key_of(1), arrays_of(1, 256)),
        ({}, "page", key_of(1), dict(reversed(arrays_of(1).items()))),
        ({}, "page", key_of(1), {n: a.view(np.int8) for n, a in arrays_of(1).items()}),
        ({}, "page", key_of(1), {"kv": arrays_of(1)["kv"]}),
    ]
    for number, (given, kind, key, arrays) in enumerate(foreign):
        path = tmp_path / str(number)
        open_store(path, **given).put(kind, key, arrays, "chat")
        there = path / key_of(1).hex()[:2] / f"{key_of(1).hex()}.page"
        there.parent.mkdir(exist_ok=True)
        files(path)[0].rename(there)
        with pytest.warns(RuntimeWarning, match="foreign entry"):
            assert open_store(path).get("page", key_of(1), LAYOUT) is None
        assert not there.exists()


def test_one_warning_of_each_kind(tmp_path):
    store = open_store(tmp_path)
    for i in range(4):
        store.put("page", key_of(i), arrays_of(i), "chat")
    for file in files(tmp_path):
        file.write_bytes(b"DI")
    with pytest.warns(RuntimeWarning) as caught:
        assert [store.get("page", key_of(i), LAYOUT) for i in range(4)] == [None] * 4
    assert len(caught) == 1
    first, where, nxt = str(caught[0].message).splitlines()
    assert first.startswith("prefix cache, damaged entry") and str(tmp_path) in where
    assert nxt.startswith("  next:  nothing: it was removed")


def test_ages_by_class(tmp_path, no_warning):
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    for i, cache_class in enumerate(("agent", "chat", "agent", "chat", "unknown")):
        store.put("page", key_of(i), arrays_of(i), cache_class)
    clock.now += 2.9 * DAY
    assert store.gc().expired == 0
    store.get("page", key_of(2), LAYOUT)
    store.touch("page", key_of(3))
    clock.now += 0.2 * DAY
    done = store.gc()
    assert (done.expired, done.kept) == (2, 3)  # the unused agent's, the class nobody knows
    assert [store.contains("page", key_of(i)) for i in range(5)] == [False, True, True, True, False]
    clock.now += 4 * DAY
    store.gc()
    assert [store.contains("page", key_of(i)) for i in range(5)] == [False] * 3 + [True, False]


def test_the_size_limit_removes_what_was_used_least_recently(tmp_path, no_warning):
    clock = Clock()
    one = open_store(tmp_path / "x")
    one.put("page", key_of(0), arrays_of(0, 4096), "chat")
    size = files(tmp_path / "x")[0].stat().st_size
    store = open_store(tmp_path / "y", max_bytes=6 * size, clock=clock)
    for i in range(30):
        clock.now += 1
        if i >= 5:
            assert store.get("page", key_of(0), layout_of(4096)) is not None  # in use: it stays
        assert store.put("page", key_of(i), arrays_of(i, 4096), "chat")
        assert sum(f.stat().st_size for f in files(tmp_path / "y")) <= 6 * size
    kept = {int(bytes.fromhex(e.key)[:8]) for e in entries(tmp_path / "y")}
    assert kept >= {0, 27, 28, 29} and len(kept) <= 6
    assert not store.put("page", key_of(99), arrays_of(99, 8 * size), "chat")
    assert {int(bytes.fromhex(e.key)[:8]) for e in entries(tmp_path / "y")} == kept
    with pytest.raises(RequestError, match="max_bytes is 0, expected at least 1"):
        open_store(tmp_path, max_bytes=0)


def test_files_of_others_are_left_alone(tmp_path):
    store = open_store(tmp_path)
    store.put("page", key_of(1), arrays_of(1), "chat")
    mine = files(tmp_path)
    others = [tmp_path / name for name in (
        "README", "ab/" + "c" * 64 + ".page", "ab/" + "ab" * 32 + ".pages", "zz/" + "a" * 64
        + ".page", "tmp/notes", "tmp/" + "a" * 8 + "-x-" + "0" * 16, mine[0].parent.name + "/x")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "cd").write_bytes(b"a file where a folder could be")
    done = collect(tmp_path, max_bytes=0, clock=lambda: 1e12, check_all=True)
    assert done.kept == 0 and not mine[0].exists() and all(p.exists() for p in others)


def test_a_collection_waits_for_another_one(tmp_path):
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    store.put("page", key_of(1), arrays_of(1), "chat")
    with open(tmp_path / LOCK, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert store.gc() is None
        begun = clock.now
        assert collect(tmp_path, clock=clock, sleep=clock.sleep, timeout_s=7) is None
        assert 7 <= clock.now - begun < 8
        assert equal(store.get("page", key_of(1), LAYOUT), arrays_of(1))  # readers do not wait
        assert store.put("page", key_of(2), arrays_of(2), "chat")  # nor do writers
    assert store.gc().kept == 2


def test_leftovers(tmp_path, monkeypatch):
    """A file whose writer lives is not one; one of another host is when it is old."""
    store = open_store(tmp_path)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 16)
    seen = []

    def crash(fd: int) -> None:
        seen.append(leftovers(tmp_path, 1e12))
        assert [f.parent.name for f in files(tmp_path)] == ["tmp"]
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        store.put("page", key_of(1), arrays_of(1), "chat")
    assert seen == [[]] and files(tmp_path) == []  # alive; then it cleaned up after itself
    dead = folder / f"{'0' * 8}-1-{'a' * 16}"
    dead.write_bytes(b"half")
    now = dead.stat().st_mtime
    assert leftovers(tmp_path, now + LEFTOVER_S - 1) == []
    assert leftovers(tmp_path, now + LEFTOVER_S + 1) == [dead]
    assert collect(tmp_path, clock=lambda: now + LEFTOVER_S + 1).leftovers == 1


@pytest.mark.parametrize(("code", "at"), [(errno.ENOSPC, "fsync"), (errno.EROFS, "replace"),
                                          (errno.EACCES, "mkdir")])
def test_case_h1_a_full_or_read_only_disk(tmp_path, monkeypatch, code, at):
    """One warning; what is there is still read; writing is tried again later."""
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    store.put("page", key_of(1), arrays_of(1), "chat")

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "mkdir") if at == "mkdir" else (os, at)), refuse)
        with pytest.warns(RuntimeWarning, match="unwritable") as caught:
            for i in range(2, 6):
                assert not store.put("page", key_of(i), arrays_of(i), "chat")
                assert not store.writable
            clock.now += RETRY_S
            assert not store.put("page", key_of(2), arrays_of(2), "chat")
        assert len(caught) == 1 and os.strerror(code) in str(caught[0].message)
        assert equal(store.get("page", key_of(1), LAYOUT), arrays_of(1))
    clock.now += RETRY_S
    assert store.writable and store.put("page", key_of(2), arrays_of(2), "chat")
    assert len(files(tmp_path)) == 2


def test_case_h1_no_directory_can_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="unwritable entry or directory"):
        store = open_store(tmp_path / "file" / "cache")
    assert not store.put("page", key_of(1), arrays_of(1), "chat")
    assert store.get("page", key_of(1), LAYOUT) is None and not store.touch("page", key_of(1))


def test_case_h1_the_directory_is_removed_while_in_use(tmp_path):
    store = open_store(tmp_path / "c")
    store.put("page", key_of(1), arrays_of(1), "chat")
    (tmp_path / "c").rename(tmp_path / "gone")
    assert store.get("page", key_of(1), LAYOUT) is None
    assert store.put("page", key_of(1), arrays_of(1), "chat")
    assert equal(store.get("page", key_of(1), LAYOUT), arrays_of(1))


def test_a_writer_whose_file_was_collected_writes_again(tmp_path, monkeypatch, no_warning):
    store = open_store(tmp_path)
    replace, lost = os.replace, []

    def collected(source, target):
        if not lost:
            lost.append(source)
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", collected)
    assert store.put("page", key_of(1), arrays_of(1), "chat") and lost
    assert equal(store.get("page", key_of(1), LAYOUT), arrays_of(1))


def read_all(path: Path) -> int:
    """How many entries there are; each must be right."""
    store, found = open_store(path), list(entries(path))
    for e in found:
        key = bytes.fromhex(e.key)
        i = int(key[:8])
        arrays = store.get("page", key, layout_of(size_of(i)))
        assert arrays is not None and equal(arrays, arrays_of(i, size_of(i)))
    return len(found)


def killed(path: Path, times: int) -> tuple[int, int]:
    """Kill a writer this often: every other one at a seeded number of entries and wherever it is in
    writing the next one, the others right before their file is flushed or gets its name. Gives
    (entries read, half-written files found)."""
    rng, half, total = random.Random(times), 0, 0
    with Nursery() as nursery:
        for round_ in range(times):
            first, entry = 10**5 * round_ + rng.randrange(7), rng.randrange(1, 8)
            if round_ % 2:
                call = ("fsync", "replace")[round_ // 2 % 2]
                pid = nursery.start(path, first, 10**5, call, entry)
            else:
                pid = nursery.start(path, first, 10**5)
                nursery.let_write(entry)
                os.kill(pid, signal.SIGKILL)
            assert nursery.wait(pid) == signal.SIGKILL
            half += len(files(path / "tmp"))
            total += read_all(path)  # opening the store has collected
            assert files(path / "tmp") == []
            collect(path, max_bytes=300_000)
    return total, half


def test_killed_writers_leave_no_wrong_entry(tmp_path, no_warning):
    total, half = killed(tmp_path, 20)
    assert total >= 20 and half >= 10  # every other one was killed in the middle of a file


@pytest.mark.full
def test_200_killed_writers_leave_no_wrong_entry(tmp_path, no_warning):
    total, half = killed(tmp_path, 200)
    assert total >= 100 and half >= 100


def test_case_h1_many_processes_one_cache(tmp_path, no_warning):
    """Four write the same entries at once, one of them is killed; all entries are there."""
    with Nursery() as nursery:
        pids = [nursery.start(tmp_path, 0, 14) for _ in range(4)]
        os.kill(pids[0], signal.SIGKILL)
        assert [nursery.wait(pid) for pid in pids][1:] == [0, 0, 0]
    assert read_all(tmp_path) == 14 and len(files(tmp_path)) == 14
