"""What is written is read back bit for bit, by this reader and by the safetensors library."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from deepinfer.checkpoint import CheckpointReader, write_checkpoint
from deepinfer.checkpoint.dtypes import READ_DTYPES
from deepinfer.errors import CheckpointError


@pytest.mark.parametrize("max_shard_bytes", [None, 300, 1])
def test_round_trip(tmp_path, tensors, max_shard_bytes):
    write_checkpoint(tmp_path, tensors, max_shard_bytes=max_shard_bytes)
    with CheckpointReader(tmp_path) as reader:
        assert reader.names() == tuple(sorted(tensors))
        assert {reader.info(name).dtype for name in reader.names()} == set(READ_DTYPES)
        for name, array in tensors.items():
            found = reader.raw(name)
            assert found.dtype == (np.uint8 if array.dtype == np.int8 else array.dtype)
            assert found.shape == array.shape and found.tobytes() == array.tobytes()
            assert found.flags.aligned
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes is not None)


def test_a_large_enough_shard_needs_no_index(tmp_path, tensors):
    write_checkpoint(tmp_path, tensors, max_shard_bytes=10**6)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_index(tmp_path, tensors):
    write_checkpoint(tmp_path, iter(tensors.items()), max_shard_bytes=300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    assert index["weight_map"]["embed.weight"] == "model-00001-of-00003.safetensors"
    assert len(list(tmp_path.iterdir())) == 4  # nothing temporary stays


def test_equal_inputs_give_equal_bytes(tmp_path, tensors):
    def files(name, items, **options):
        write_checkpoint(tmp_path / name, items, **options)
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    reverse = dict(reversed(tensors.items()))
    for options in ({}, {"max_shard_bytes": 300}):
        name = str(len(options))
        assert files("a" + name, tensors, **options) == files("b" + name, reverse, **options)


def test_fingerprint(tmp_path, tensors):
    def fingerprint(name, items, **options):
        write_checkpoint(tmp_path / name, items, **options)
        with CheckpointReader(tmp_path / name) as reader:
            return reader.fingerprint()

    single = fingerprint("single", tensors)
    assert single == fingerprint("sharded", tensors, max_shard_bytes=300)
    assert single == fingerprint("metadata", tensors, metadata={"any": "thing"})
    bit = tensors["layers.0.bytes"] ^ np.array([0, 0, 0, 1, 0, 0, 0], np.uint8)
    ids = tensors["ids"]
    changes = {
        "name": {**tensors, "new": np.zeros(0, np.uint8)},
        "bit": {**tensors, "layers.0.bytes": bit},
        "shape": {**tensors, "ids": ids.reshape(3, 2)},
        "dtype": {**tensors, "ids": ids.view(np.float32)},
    }
    found = {name: fingerprint(name, items) for name, items in changes.items()}
    assert len({single, *found.values()}) == 1 + len(changes)


def test_the_library_reads_what_is_written(tmp_path, tensors):
    write_checkpoint(tmp_path, tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    found = dict(safetensors.deserialize(content))  # the library's numpy API knows no fp8
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert bytes(found[name]["data"]) == array.tobytes()
        assert found[name]["shape"] == list(array.shape)
    assert found["layers.0.ffn.experts.0.w1.weight"]["dtype"] == "I8"
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_reads_what_the_library_writes(tmp_path, tensors):
    plain = {n: a for n, a in tensors.items() if a.dtype.name in ("float32", "int64", "int8")}
    safetensors.numpy.save_file(plain, tmp_path / "any.safetensors", {"format": "np"})
    with CheckpointReader(tmp_path) as reader:
        assert reader.names() == tuple(sorted(plain)) and len(plain) == 5
        for name, array in plain.items():
            assert reader.raw(name).tobytes() == array.tobytes()


def test_not_contiguous(tmp_path):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    write_checkpoint(tmp_path, {"t": array.T, "s": array[:, ::2]})
    with CheckpointReader(tmp_path) as reader:
        assert (reader.raw("t") == array.T).all() and (reader.raw("s") == array[:, ::2]).all()


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("a", np.zeros(2))], "dtype float64 has no safetensors code(?s:.*)tensor 'a'"),
        ([("a", np.zeros(2, ">f4"))], "dtype >f4 has no safetensors code"),
        ([("a", np.zeros(2, ml_dtypes.float8_e5m2))], "dtype float8_e5m2 has no"),
        ([("a", np.zeros(2, np.int8))] * 2, "the name is given twice"),
        ([("__metadata__", np.zeros(2, np.int8))], "not a tensor's name"),
    ],
)
def test_refused_tensors_leave_nothing_behind(tmp_path, items, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, items, max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_only_a_single_file_is_replaced(tmp_path, tensors):
    (tmp_path / "config.json").touch()
    write_checkpoint(tmp_path, {"a": tensors["ids"]})
    write_checkpoint(tmp_path, {"b": tensors["ids"]})
    with CheckpointReader(tmp_path) as reader:
        assert reader.names() == ("b",)
    with pytest.raises(CheckpointError, match="already holds weights: model.safetensors"):
        write_checkpoint(tmp_path, tensors, max_shard_bytes=300)
    with CheckpointReader(tmp_path) as reader:
        assert reader.names() == ("b",)
    write_checkpoint(tmp_path / "sharded", tensors, max_shard_bytes=300)
    with pytest.raises(CheckpointError, match="already holds weights: model-00001-of-00003"):
        write_checkpoint(tmp_path / "sharded", {"a": tensors["ids"]})


def test_unwritable(tmp_path, tensors):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written: (File exists|Not a directory)"):
        write_checkpoint(tmp_path / "file", tensors)
