"""Packed weights on disk: complete and right, or a miss, whoever dies or interferes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import warnings
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer.errors import CheckpointError, ProgramError, TargetError
from deepinfer.runtime import weight_store
from deepinfer.runtime.store_gc import collect, entry_path
from deepinfer.runtime.weight_file import KIND, PAGE
from deepinfer.runtime.weight_store import LOCK, TIMEOUT_S, WeightStore
from tests.runtime import weight_writer
from tests.runtime.nursery import Nursery
from tests.runtime.weight_writer import PACK


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(weight_writer, "say", lambda *words: None)


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def file_of(store: WeightStore) -> Path:
    return entry_path(store.path, KIND, PACK.key)


def build(store: WeightStore, pack=PACK):
    return store.build(pack, weight_writer.arrays)


def is_right(found) -> bool:
    return found is not None and list(found) == list(PACK.layout) and all(
        (found[n].dtype, found[n].shape, found[n].tobytes()) == (a.dtype, a.shape, a.tobytes())
        for n, a in weight_writer.arrays())


def never():
    raise AssertionError("it is there: nothing is to be packed")


def half_written(path: Path) -> int:
    return len(list((path / "tmp").iterdir())) if (path / "tmp").is_dir() else 0


def test_what_is_built_is_mapped(tmp_path, no_warning):
    store = WeightStore(tmp_path / "a" / "b")
    assert store.open(PACK) is None and not (tmp_path / "a").exists()
    made = build(store)
    again = WeightStore(store.path).build(PACK, never)
    assert is_right(made) and is_right(again) and half_written(store.path) == 0
    for array in again.values():
        assert not array.flags.writeable and not array.flags.owndata
    addresses = [a.ctypes.data % PAGE for n, a in again.items() if a.size]
    assert addresses == [0] * 4
    maps = Path("/proc/self/maps")
    if maps.exists():  # two mappings of one file, both shared and read-only
        lines = [x.split() for x in maps.read_text().splitlines() if str(file_of(store)) in x]
        assert [x[1] for x in lines] == ["r--s"] * 2
    raw = file_of(store).read_bytes()
    assert len(raw) % PAGE == 0 and made["c"].tobytes() in raw
    assert collect(store.path, verify=True).kept == 1


def test_a_damaged_head_is_a_miss(tmp_path):
    """Each byte of the header flipped, the file cut or longer: packed again, with a warning."""
    store = WeightStore(tmp_path)
    build(store)
    good = file_of(store).read_bytes()
    end = good.index(PACK.key.hex().encode()[:8])  # somewhere in the header
    head = range(0, PAGE)
    assert end in head and good[PAGE - 40:PAGE - 32] == b" " * 8  # the header is one page
    damaged = [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1:] for i in head]
    damaged += [good[:-1], good[:PAGE], good[:100], b"", good + b"\0", good + bytes(PAGE), good[1:]]
    for data in damaged:
        file_of(store).write_bytes(data)
        with pytest.warns(RuntimeWarning, match="packed weights, (damaged|another format) entry"):
            assert WeightStore(tmp_path).open(PACK) is None
        assert not file_of(store).exists()
    file_of(store).write_bytes(damaged[0])
    with pytest.warns(RuntimeWarning, match="removed and the weights are packed again"):
        assert is_right(build(WeightStore(tmp_path)))


def test_damaged_data_show_when_they_are_verified(tmp_path):
    store = WeightStore(tmp_path)
    build(store)
    good = file_of(store).read_bytes()
    for at in (PAGE, len(good) // 2, len(good) - 1):  # data, and the zeros behind them
        file_of(store).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1:])
        assert store.open(PACK) is not None  # nobody reads everything
        assert collect(tmp_path, check_all=True).damaged == 0
        assert collect(tmp_path, verify=True).damaged == 1
        assert not file_of(store).exists()
    assert is_right(build(store))


def test_a_foreign_file_is_a_miss(tmp_path):
    """Another key, model, order, name, shape or type, under the right name."""
    layout = dict(PACK.layout)
    others = [replace(PACK, key=b"x" * 32), replace(PACK, identity="other")]
    arrays = dict(weight_writer.arrays())
    for changed in (dict(reversed(layout.items())), {n + "x": v for n, v in layout.items()},
                    layout | {"a": (np.dtype(np.float32), (3, 2))},
                    layout | {"a": (np.dtype(np.int32), (2, 3))}):
        others.append(replace(PACK, layout=changed))
    for i, other in enumerate(others):
        store = WeightStore(tmp_path / str(i))
        made = [(n, arrays[n.removesuffix("x")].view(d).reshape(s))
                for n, (d, s) in other.layout.items()]
        assert store.build(other, lambda made=made: made) is not None
        there = entry_path(store.path, KIND, other.key)
        file_of(store).parent.mkdir(exist_ok=True)
        there.rename(file_of(store))
        with pytest.warns(RuntimeWarning, match="foreign entry"):
            assert store.open(PACK) is None
        assert is_right(build(store))


@pytest.mark.parametrize("wrong", [
    [("a", np.zeros((2, 3), np.float64))], [("a", np.zeros((3, 2), np.float32))],
    [("b", np.zeros((2, 3), np.float32))]])
def test_weights_that_are_not_the_programs(tmp_path, wrong):
    store = WeightStore(tmp_path)
    with pytest.raises(ProgramError, match=r"weight '[ab]' is float.*, expected 'a', float32\[2, 3"
                                           r"\]\n.*packing weights\n.*compile the Program again"):
        store.build(PACK, lambda: [*wrong, *list(weight_writer.arrays())[1:]])
    assert not file_of(store).exists() and half_written(tmp_path) == 0


def test_what_the_packing_raises_is_raised(tmp_path):
    def bad():
        yield from list(weight_writer.arrays())[:3]
        raise CheckpointError("a bad scale")

    store = WeightStore(tmp_path)
    with pytest.raises(CheckpointError, match="a bad scale"):
        store.build(PACK, bad)
    assert not file_of(store).exists() and half_written(tmp_path) == 0
    assert is_right(build(store))


@pytest.mark.parametrize(("code", "at"), [
    (errno.ENOSPC, "fsync"), (errno.ENOSPC, "pwrite"), (errno.EROFS, "replace"),
    (errno.EACCES, "mkdir")])
def test_a_full_or_read_only_disk(tmp_path, monkeypatch, code, at):
    """One warning, no file; what is there is still mapped."""
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    store = WeightStore(tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "mkdir") if at == "mkdir" else (os, at)), refuse)
        with pytest.warns(RuntimeWarning) as caught:
            assert build(store) is None
            store.remember(b"s" * 32, "ab" * 32)
            assert build(store) is None
    assert len(caught) == 1
    first, where, then = str(caught[0].message).splitlines()
    assert first.startswith("cache of packed weights, unwritable") and os.strerror(code) in first
    assert str(store.path) in where and then.endswith("or set DEEPINFER_CACHE_DIR")
    assert not file_of(store).exists() and half_written(store.path) == 0
    assert is_right(build(store))
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("utime", "replace", "fsync"):
            patch.setattr(os, name, refuse)
        assert is_right(store.build(PACK, never) if at == "mkdir" else store.open(PACK))


def test_room_is_made_and_some_is_left(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    now = [1e9]
    store = WeightStore(tmp_path, clock=lambda: now[0])
    packs = [replace(PACK, key=bytes([i]) * 32) for i in range(4)]
    for pack in packs[:3]:
        now[0] += 60
        assert build(store, pack) is not None
    size = entry_path(tmp_path, KIND, packs[0].key).stat().st_size
    store.open(packs[0])
    free = 1000 * size // weight_store.RESERVE + PACK.nbytes - size // 2  # short of half a file
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000 * size, 0, free))
    assert build(store, packs[3]) is not None
    assert [store.contains(KIND, p.key) for p in packs] == [True, False, True, True]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000 * size, 0, 0))
    with pytest.warns(RuntimeWarning, match="leave less than a 20th of the disk free"):
        assert build(store, packs[1]) is None
    assert [store.contains(KIND, p.key) for p in packs] == [True, False, True, True]
    monkeypatch.undo()
    now[0] += 31 * 86400
    assert build(store, packs[1]) is not None  # and what nobody has used for a month goes
    assert [store.contains(KIND, p.key) for p in packs] == [False, True, False, False]


def test_whoever_waits_gets_the_others_file(tmp_path, no_warning):
    """The other process packs; and one that never ends is waited for in vain."""
    other, now = WeightStore(tmp_path), [1e9]
    tmp_path.mkdir(exist_ok=True)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if not ends or now[0] < 1e9 + 5:
            return
        fcntl.flock(lock, fcntl.LOCK_UN)
        build(other)

    for ends in (True, False):
        with open(tmp_path / LOCK, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now[0] = 1e9
            store = WeightStore(tmp_path, clock=lambda: now[0], sleep=sleep)
            assert is_right(store.build(PACK, never if ends else weight_writer.arrays))
        waited = now[0] - 1e9
        assert 5 <= waited < 6 if ends else TIMEOUT_S <= waited < TIMEOUT_S + 1
        file_of(store).unlink()


POINTS = [*(("array", i) for i in range(1, 6)), ("fsync", 1), ("pwrite", 1), ("replace", 1)]


def test_killed_writers_leave_the_old_state(tmp_path, no_warning):
    """Killed before each array, the true header, the flush and the rename: no file. Killed right
    after the rename: the whole file."""
    with Nursery("tests.runtime.weight_writer") as nursery:
        for n, (call, after) in enumerate([*POINTS, ("utime", 2)]):
            path = tmp_path / str(n)
            nursery.ask("pack", path, call, after)
            assert nursery.wait(nursery.read("pid")) == signal.SIGKILL
            store = WeightStore(path)
            if call == "utime":
                assert half_written(path) == 0 and is_right(store.build(PACK, never))
                continue
            assert half_written(path) == 1 and store.open(PACK) is None
            assert is_right(build(store))
            assert half_written(path) == 0  # collected


def test_of_many_processes_at_once_one_packs(tmp_path, no_warning):
    """All map the file of one of them; if that one is killed, another one takes its place."""
    with Nursery("tests.runtime.weight_writer") as nursery:
        for victims in (0, 1):
            path = tmp_path / str(victims)
            seen = {"pid": [], "inode": [], "array": []}
            for n in range(4):
                nursery.ask("pack", path, *(("fsync", 1) if n < victims else ("never", 0)))
                while n < victims and not seen["array"]:  # it has the lock
                    see(seen, nursery)
            while len(seen["inode"]) < 4 - victims:
                see(seen, nursery)
            ends = [nursery.wait(pid) for pid in seen["pid"]]
            assert ends == [signal.SIGKILL] * victims + [0] * (4 - victims)
            assert len(set(seen["inode"])) == 1
            assert seen["array"] == list(range(1, 6)) * (1 + victims)
            assert is_right(WeightStore(path).open(PACK))


def see(seen: dict[str, list[int]], nursery: Nursery) -> None:
    kind, number = nursery.line()
    seen[kind].append(number)


def test_a_user_without_a_cache(monkeypatch):
    def none():
        raise TargetError("this user has no home directory for the cache", where="environment",
                          next="set DEEPINFER_CACHE_DIR")

    monkeypatch.setattr(weight_store, "cache_dir", none)
    with pytest.warns(RuntimeWarning, match="packed weights are not kept: this user has no home"):
        assert WeightStore.default() is None
