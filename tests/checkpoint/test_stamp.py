"""The stamp of a checkpoint: another one after whatever may have changed a byte of its data."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from deepinfer.checkpoint import CheckpointReader, write_checkpoint
from deepinfer.errors import CheckpointError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of three shards."""
    path = tmp_path / "model"
    arrays = {f"t{i}": np.arange(100 * i, 100 * i + 100, dtype=np.float32) for i in range(3)}
    write_checkpoint(path, arrays, max_shard_bytes=400)
    assert len(shards(path)) == 3
    return path


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def stamp(path: Path) -> bytes:
    with CheckpointReader(path) as reader:
        return reader.stamp()


def until_it_moves(file: Path, change) -> None:
    """Change a file again and again until its ctime shows it: file systems' clocks are coarse."""
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:
        change()


def test_same_files_same_stamp(model):
    before = stamp(model)
    for file in shards(model):
        file.read_bytes()
    (model / "notes.txt").write_text("not of the checkpoint")
    assert stamp(model) == before and len(before) == 32
    assert stamp(model.parent / "." / "model") == before


def overwrite_in_place(file: Path) -> None:
    """Another last byte, the same size, and the times put back: what a copying tool may do."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with open(file, "r+b") as out:
        out.seek(-1, os.SEEK_END)
        out.write(b"\x01")
    os.utime(file, ns=times)
    assert file.stat().st_mtime_ns == times[1]


def replace_by_a_copy(file: Path) -> None:
    copy = file.with_suffix(".copy")
    shutil.copy2(file, copy)
    os.replace(copy, file)


@pytest.mark.parametrize("change", [
    overwrite_in_place, replace_by_a_copy, lambda file: file.chmod(file.stat().st_mode ^ 4),
    lambda file: os.utime(file, (1, time.time() % 1e6))])
@pytest.mark.parametrize("which", range(3))
def test_a_change_of_any_file_is_another_stamp(model, change, which):
    with CheckpointReader(model) as reader:
        before = reader.stamp()
        reader.require_unchanged()
        file = shards(model)[which]
        until_it_moves(file, lambda: change(file))
        assert reader.stamp() == before  # it is the state in which they were opened
        with pytest.raises(CheckpointError, match=(
                r"the file changed while it was read: inode, bytes, mtime and ctime are \(\d+, .*"
                r"were \(\d+, .*\n  where: .*-0000\d-of-00003.*\n  next:  load .* when nothing")):
            reader.require_unchanged()
    assert stamp(model) != before


def test_another_place_is_another_stamp(model):
    before = stamp(model)
    moved = model.rename(model.parent / "moved")
    assert stamp(moved) != before


def test_a_missing_file_is_a_change(model):
    with CheckpointReader(model) as reader:
        shards(model)[1].unlink()
        with pytest.raises(CheckpointError, match="ctime are None, were"):
            reader.require_unchanged()


def test_age(model, monkeypatch):
    """From the last change, whatever the mtime says, to the opening, whatever comes after it."""
    now = max(file.stat().st_ctime for file in shards(model))
    for file in shards(model):
        os.utime(file, (1, 1))
    now = max(file.stat().st_ctime for file in shards(model))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 3)
        with CheckpointReader(model) as reader:
            patch.setattr(time, "time", lambda: now + 9)
            assert reader.age() == pytest.approx(3, abs=1e-6)


def test_released_memory_is_read_again(model):
    with CheckpointReader(model) as reader:
        view = reader.raw("t1")
        total = float(view.sum())
        assert resident(shards(model)[1]) in (None, 4)
        reader.release()
        assert resident(shards(model)[1]) in (None, 0)
        assert float(view.sum()) == total == float(np.arange(100, 200).sum())


def resident(file: Path) -> int | None:
    """Kilobytes of a mapped file that this process holds, where the system says."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    after = smaps.read_text().partition(str(file))[2]
    return int(after.partition("Rss:")[2].split()[0])
