"""No damage to a file's head ends in anything but a CheckpointError or a readable checkpoint."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint import CheckpointReader, write_checkpoint
from deepinfer.errors import CheckpointError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    items = {"a.weight": np.ones((2, 3), ml_dtypes.bfloat16), "b": np.ones(5, np.int8)}
    write_checkpoint(path, items)
    content = (path / "model.safetensors").read_bytes()
    return path, content, 8 + int.from_bytes(content[:8], "little")


def opens(path, content: bytes) -> bool:
    file = path / "model.safetensors"
    file.unlink()  # a new inode: truncating a file that is still mapped would kill its reader
    file.write_bytes(content)
    try:
        with CheckpointReader(path) as reader:
            for name in reader.names():
                reader.raw(name).tobytes()
            reader.fingerprint()
    except CheckpointError as error:
        str(error).encode()  # the message itself can be printed
        return False
    return True


def test_every_single_byte(written):
    path, content, head = written
    outcomes = {
        opens(path, content[:i] + bytes([value]) + content[i + 1 :])
        for i in range(head)
        for value in {content[i] ^ 1, content[i] ^ 0x80, ord("9"), ord('"')} - {content[i]}
    }
    assert outcomes == {True, False}  # a changed name still opens, most else does not


@given(data=st.data())
def test_several_bytes(written, data):
    path, content, head = written
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(2, 5))):
        damaged[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    opens(path, bytes(damaged))


def test_every_truncation(written):
    path, content, _ = written
    assert not any(opens(path, content[:size]) for size in range(len(content)))
    assert opens(path, content)
