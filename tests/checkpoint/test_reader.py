"""Every way a checkpoint can be damaged is an error that says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from deepinfer.checkpoint import CheckpointReader, check_closed, write_checkpoint
from deepinfer.checkpoint.header import METADATA
from deepinfer.errors import CheckpointError


def field(begin, end, shape, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": field(0, 4, [4]), "b": field(4, 12, [2], "F32")}


def test_reads_a_hand_made_file_in_place(write_raw):
    data = bytes(range(4)) + np.array([1.5, -2], "<f4").tobytes()
    with CheckpointReader(write_raw({METADATA: {"format": "pt"}, **GOOD}, data)) as reader:
        assert reader.names() == ("a", "b")
        info = reader.info("b")
        assert (info.dtype, info.shape, info.end - info.begin) == ("F32", (2,), 8)
        assert info.file.read_bytes()[info.begin : info.end] == data[4:]
        view = reader.raw("b")
        assert view.tolist() == [1.5, -2] and not view.flags.owndata and not view.flags.writeable
        assert np.shares_memory(view, reader.raw("b"))
    assert view.tolist() == [1.5, -2]  # a view outlives its reader
    with pytest.raises(CheckpointError, match="reader is closed"):
        reader.raw("b")


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (b"{not json", 0, "header is not JSON"),
        (b'{"\xff": 1}', 0, "header is not JSON.*utf-8"),
        (b"[" * 100_000, 0, "header is not JSON.*recursion"),
        (b"[]", 0, "header is a JSON list, expected an object"),
        (b'{"a": {}, "a": {}}', 0, "names 'a' twice"),
        ({METADATA: {"format": 1}}, 0, "__metadata__ is not an object of strings"),
        ({"a": {"dtype": "U8"}}, 0, r"expected dtype, shape and data_offsets, found \['dtype'\]"),
        ({"a": field(0, 4, [4], "F4")}, 4, "unknown dtype 'F4', expected one of F8_E4M3"),
        ({"a": field(0, 4, [4], ["U8"])}, 4, "unknown dtype"),
        ({"a": field(0, 4, [-4])}, 4, r"shape \[-4\] is not"),
        ({"a": field(0, 4, [4.0])}, 4, r"shape \[4.0\] is not"),
        ({"a": field(0, 4, [True])}, 4, r"shape \[True\] is not"),
        ({"a": field(0, 0, [0, 2**62, 2**62])}, 0, r"shape .* is not"),
        ({"a": field(0, 1, [1] * 99)}, 1, "at most 32 sizes"),
        ({"a": field(4, 0, [4])}, 4, r"data_offsets \[4, 0\] are not \[begin, end\]"),
        ({"a": field(0, 4, [3])}, 4, r"4 bytes of data, expected 3 for U8\[3\]"),
        ({"a": field(0, 4, [4], "F32")}, 4, r"4 bytes of data, expected 16 for F32\[4\]"),
        ({**GOOD, "c": field(8, 16, [8])}, 16, "overlaps the tensor before it.*expected"),
        ({**GOOD, "c": field(14, 16, [2])}, 16, "leaves a hole before it"),
        (GOOD, 11, "file is truncated: the data ends at byte"),
        (GOOD, 15, "3 bytes after the last tensor belong to none"),
        ({"\ud800": field(0, 4, [4])}, 4, "characters that cannot be printed"),
    ],
)
def test_damaged_file(write_raw, header, size, message):
    path = write_raw(header, b"\0" * size)
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(path)
    assert str(path / "model.safetensors") in caught.value.where and caught.value.next


@pytest.mark.parametrize("size", [0, 7])
def test_file_without_a_header_length(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(b"\1" * size)
    with pytest.raises(CheckpointError, match=f"has {size} bytes, expected at least 8"):
        CheckpointReader(tmp_path)


def test_header_length_past_the_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((99).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="header is 99 bytes long, the file has 10"):
        CheckpointReader(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no model.safetensors"):
        CheckpointReader(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not a directory"):
        CheckpointReader(tmp_path / "file")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="missing shard"):
        CheckpointReader(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path, tensors) -> Path:
    write_checkpoint(tmp_path / "sharded", tensors, max_shard_bytes=300)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) == 3
    return tmp_path / "sharded"


def edit_index(path: Path, edit) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    message = "missing shard: 1 of 3 files, the first is model-00002-of-00003"
    with pytest.raises(CheckpointError, match=message + "(?s:.*)index.json names it"):
        CheckpointReader(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=message + "(?s:.*)another shard's name counts it"):
        CheckpointReader(sharded)


def test_tensor_in_two_shards(sharded, tensors):
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "z.safetensors").write_bytes(
        (sharded / "model-00001-of-00003.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="'empty' is in two shards(?s:.*)z.safe"):
        CheckpointReader(sharded)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("ids"), "'ids' of model-00001-of-00003.safetensors is not in the index"),
        (lambda m: m.update(ghost=m["ids"]), "'ghost' is in .*, but no shard holds it"),
        (
            lambda m: m.update(ids="model-00002-of-00003.safetensors"),
            "'ids' is in model-00002.*, but it is in model-00001",
        ),
        (lambda m: m.update(ids="absent.safetensors"), "missing shard: .* absent.safetensors"),
        (lambda m: m.update(ids="../x.safetensors"), "expected the name of a .* file"),
        (lambda m: m.update(ids=3), "expected the name of a .* file"),
        (lambda m: m.clear(), "no weight_map object with tensors"),
    ],
)
def test_index_that_does_not_fit(sharded, edit, message):
    edit_index(sharded, edit)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(sharded)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"{}"])
def test_malformed_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="the index (is not readable JSON|has no weight_map)"):
        CheckpointReader(sharded)


def test_require(write_raw):
    path = write_raw(GOOD, b"\0" * 12)
    reader = CheckpointReader(path)
    assert reader.require("b", "F32", (2,)).shape == (2,)
    for dtype, shape in [("F32", (1, 2)), ("BF16", (2,))]:
        message = re.escape(f"expected {dtype}{list(shape)}, found F32[2]")
        with pytest.raises(CheckpointError, match=message) as caught:
            reader.require("b", dtype, shape)
        assert caught.value.where == f"{path / 'model.safetensors'}, tensor 'b'"
    with pytest.raises(CheckpointError, match="no tensor 'c' among the 2"):
        reader.require("c", "F32", (2,))


def test_check_closed(write_raw):
    names = [f"t{i}" for i in range(7)]
    reader = CheckpointReader(write_raw({n: field(0, 0, [0]) for n in names}))
    check_closed(reader, names, [])
    check_closed(reader, names[:5], {"t5": "vision", "t6": "vision", "t9": "not there either"})
    with pytest.raises(CheckpointError, match="1 missing tensor: x; 2 extra tensors: t5, t6"):
        check_closed(reader, [*names[:5], "x"], [])
    with pytest.raises(CheckpointError, match="7 extra tensors: t0, t1, t2, t3, t4, ...\n"):
        check_closed(reader, [], [])
