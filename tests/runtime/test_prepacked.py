"""Packed weights from disk are those that are packed in memory, and never another checkpoint's."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer.checkpoint import CheckpointReader, layouts, write_checkpoint
from deepinfer.errors import CheckpointError
from deepinfer.llm import LLM
from deepinfer.runtime import prepacked, weights
from deepinfer.runtime.devices import memory
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.prepacked import open_weights, weight_layout
from deepinfer.runtime.store_gc import entries
from deepinfer.runtime.weight_store import SETTLED_S, WeightStore
from deepinfer.runtime.weights import is_stored, load_weights
from deepinfer.testing.invariance.model import ModelSubject

SETTLED = -1e9  # files that were written right now are as good as old ones


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy of the tiny checkpoint, which a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def packings(monkeypatch) -> list[str]:
    """Names of the values that are laid out or derived from now on."""
    seen, real = [], weights._make

    def make(name, table, reader):
        if not is_stored(name, table):
            seen.append(name)
        return real(name, table, reader)

    monkeypatch.setattr(weights, "_make", make)
    return seen


@pytest.fixture
def readings(monkeypatch) -> list[Path]:
    """Checkpoints that are read as a whole from now on."""
    seen, real = [], CheckpointReader.fingerprint

    def fingerprint(self):
        seen.append(self.path)
        return real(self)

    monkeypatch.setattr(CheckpointReader, "fingerprint", fingerprint)
    return seen


def open_store(path: Path) -> WeightStore:
    return WeightStore(path / "weights", settled_s=SETTLED)


def same(found, expected) -> bool:
    assert found.keys() == expected.keys()
    return all((found[n].dtype, found[n].shape, found[n].tobytes())
               == (a.dtype, a.shape, a.tobytes()) for n, a in expected.items())


def kinds(store: WeightStore) -> list[str]:
    return sorted(e.kind for e in entries(store.path)) if store.path.exists() else []


def test_with_and_without_the_cache(model, compiled, tmp_path, packings, readings):
    """Cold, warm and without: the same bits. Warm, nothing is packed, derived or read whole."""
    expected = load_weights(compiled.manifest["weights"], model)
    unpacked = {n for n in expected if is_stored(n, compiled.manifest["weights"])}
    assert set(packings) == expected.keys() - unpacked
    assert len(unpacked) > 10 and len(packings) > 10
    packings.clear()
    cold = open_weights(compiled, model, open_store(tmp_path))
    assert set(packings) == expected.keys() - unpacked and readings == [model]
    assert kinds(open_store(tmp_path)) == ["fingerprint", "weights", "weights"]
    packings.clear()
    warm = open_weights(compiled, model, open_store(tmp_path))
    assert packings == [] and readings == [model]
    without = open_weights(compiled, model, None)
    assert len(packings) > 10 and without.fingerprint == ""
    for found in (cold, warm, without):
        assert same(found.arrays, expected)
    with CheckpointReader(model) as reader:
        assert cold.fingerprint == warm.fingerprint == reader.fingerprint()


def test_the_engine_is_the_same(model, compiled, tmp_path, monkeypatch, readings):
    """Logits and tokens of cold and warm loads, in large and in small pages, without the cache."""
    monkeypatch.setattr(WeightStore, "default", lambda: open_store(tmp_path))
    found, prompt = [], [3, 5, 7, 11, 13, 17]
    for cached, huge in ((True, 1 << 12), (True, 1 << 12), (True, 1 << 60), (False, 1 << 12),
                         (False, 1 << 60)):
        monkeypatch.setattr(memory, "HUGE", huge)
        with LLM(model, program=compiled, cache_weights=cached, progress=False) as llm:
            out = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=1.0, seed=3))
            found.append((llm.score(prompt).tobytes(), tuple(out[0].token_ids)))
            read = len(readings)
            assert len(llm.engine.fingerprint) == 64
            assert len(readings) == read + (not cached)  # it is known already
    assert len(found) == 5 and len(set(found)) == 1 and readings[0] == model


def test_the_harness_uses_the_cache(model, compiled, tmp_path, monkeypatch, packings):
    monkeypatch.setattr(WeightStore, "default", lambda: open_store(tmp_path))
    cold = ModelSubject(model, compiled)
    assert packings
    packings.clear()
    warm = ModelSubject(model, compiled)
    assert packings == [] and same(warm._weights, cold._weights)
    assert cold.fingerprint == warm.fingerprint


def change_one_byte(path: Path) -> None:
    """In the data of a packed tensor; size and times as before."""
    with CheckpointReader(path) as reader:
        info = reader.info("head.weight")
    file, state = info.file, info.file.stat()
    while file.stat().st_ctime_ns == state.st_ctime_ns:  # until the file system's clock ticks
        with open(file, "r+b") as out:
            out.seek(info.begin)
            [old] = out.read(1)
            out.seek(info.begin)
            out.write(bytes([(old + 1) % 256]))
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file.stat().st_mtime_ns == state.st_mtime_ns


def test_a_changed_checkpoint_is_never_taken_for_the_old_one(model, compiled, tmp_path, readings):
    store = open_store(tmp_path)
    before = open_weights(compiled, model, store)
    packed = {n: a for n, a in before.arrays.items() if "|" in n}
    kept, seen = {n: a.copy() for n, a in packed.items()}, {before.fingerprint}
    for _ in range(4):
        change_one_byte(model)
        after = open_weights(compiled, model, store)
        assert same(after.arrays, load_weights(compiled.manifest["weights"], model))
        seen.add(after.fingerprint)
    assert len(readings) == 5 and len(seen) == 5
    assert same(packed, kept)  # whoever has mapped the old file keeps it


def test_a_damaged_fingerprint_is_made_again(model, compiled, tmp_path, packings, readings):
    store = open_store(tmp_path)
    first = open_weights(compiled, model, store)
    packings.clear()
    [file] = [e.path for e in entries(store.path) if e.kind == "fingerprint"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="packed weights, damaged entry"):
        again = open_weights(compiled, model, open_store(tmp_path))
    assert again.fingerprint == first.fingerprint and len(readings) == 2 and packings == []


def test_a_copy_is_read_and_not_packed(model, compiled, tmp_path, packings, readings):
    """The same tensors elsewhere, in other shards: the same file of packed weights."""
    store = open_store(tmp_path)
    first = open_weights(compiled, model, store)
    packings.clear()
    copy = tmp_path / "copy"
    copy.mkdir()
    with CheckpointReader(model) as reader:
        infos = {n: reader.info(n) for n in reader.names()}
        codes = {i.dtype for i in infos.values()}
        write_checkpoint(copy, {n: stored(reader, n) for n in infos}, max_shard_bytes=10**6)
    assert "I8" in codes and len(list(copy.glob("*.safetensors"))) > 1
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model / name, copy / name)
    second = open_weights(compiled, copy, store)
    assert packings == [] and readings == [model, copy]
    assert second.fingerprint == first.fingerprint and same(second.arrays, first.arrays)
    os.utime(model / "config.json")
    (model / "tokenizer.json").touch()
    open_weights(compiled, model, store)
    assert packings == [] and len(readings) == 2


def stored(reader: CheckpointReader, name: str) -> np.ndarray:
    array = reader.raw(name)
    return array.view(np.int8) if reader.info(name).dtype == "I8" else array


def test_the_key_changes_with_all_that_matters(model, compiled, tmp_path, packings, monkeypatch):
    """A Program with other layouts or derived tables, another tokenizer, other code."""
    store = open_store(tmp_path)
    open_weights(compiled, model, store)
    packings.clear()
    table = compiled.manifest["weights"]
    derived = {n for n, how in table["values"].items() if "derive" in how}
    rope = next(n for n in derived if "rope" in n)
    packed = {n for n in table["values"] if not is_stored(n, table)} - derived
    values = table["values"] | {rope: table["values"][rope] | {"base": 12345.0}}
    other = replace(compiled, manifest={**compiled.manifest, "weights": {**table,
                                                                        "values": values}})
    open_weights(other, model, store)
    assert set(packings) == derived
    packings.clear()

    fewer = {n: replace(p, values=tuple(v for v in p.values if v.name != min(packed)))
             for n, p in compiled.phases.items()}
    open_weights(replace(compiled, phases=fewer), model, store)
    assert set(packings) == packed - {min(packed)}
    packings.clear()

    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text + " ")
    open_weights(compiled, model, store)
    assert set(packings) == derived
    packings.clear()

    monkeypatch.setattr("tokenizers.__version__", "0.0")
    open_weights(compiled, model, store)
    assert set(packings) == derived
    packings.clear()

    code = prepacked._code()
    monkeypatch.setattr(prepacked, "_code", lambda: code[::-1])
    open_weights(compiled, model, store)
    assert set(packings) == derived | packed


def test_the_code_is_all_that_makes_weights(tmp_path, monkeypatch):
    package = tmp_path / "deepinfer"
    for name in ("checkpoint", "numerics", "runtime"):
        shutil.copytree(prepacked._PACKAGE / name, package / name)
    before = prepacked._code()
    monkeypatch.setattr(prepacked, "_PACKAGE", package)

    def code() -> str:
        prepacked._code.cache_clear()
        return prepacked._code()

    assert code() == before
    seen = {before}
    for name in ("checkpoint/layouts.py", "checkpoint/scales.py", "checkpoint/token_map.py",
                 "numerics/rope.py", "numerics/functions.py", "runtime/weights.py"):
        with open(package / name, "a") as file:
            file.write("\n")
        seen.add(code())
    assert len(seen) == 7
    monkeypatch.undo()
    assert code() == before


def test_a_checkpoint_that_changed_just_now_is_not_kept(model, compiled, tmp_path):
    """Its state need not show the next change. What does not depend on it is kept."""
    with CheckpointReader(model) as reader:
        age = reader.age()
    store = WeightStore(tmp_path / "weights", settled_s=age + 60)
    assert WeightStore("x").settled_s == SETTLED_S == 2
    found = open_weights(compiled, model, store)
    assert found.fingerprint == "" and kinds(store) == ["weights"]
    assert same(found.arrays, load_weights(compiled.manifest["weights"], model))


@pytest.mark.parametrize("cached", [True, False])
def test_a_change_while_it_is_packed_is_an_error(model, compiled, tmp_path, monkeypatch, cached):
    store = open_store(tmp_path) if cached else None
    real, changed = layouts.LAYOUTS["tile16_bf16"], []

    def tile(array):
        if not changed:
            changed.append(change_one_byte(model))
        return real(array)

    monkeypatch.setitem(layouts.LAYOUTS, "tile16_bf16", tile)
    with pytest.raises(CheckpointError, match="the file changed while it was read"):
        open_weights(compiled, model, store)
    assert changed
    if cached:
        assert kinds(store) == ["fingerprint"]  # of the state before
        found = open_weights(compiled, model, store)
        assert same(found.arrays, load_weights(compiled.manifest["weights"], model))


def test_a_change_while_it_is_read_is_an_error(model, compiled, tmp_path, monkeypatch):
    real, store = CheckpointReader.fingerprint, open_store(tmp_path)

    def fingerprint(self):
        found = real(self)
        change_one_byte(model)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointReader, "fingerprint", fingerprint)
        with pytest.raises(CheckpointError, match="the file changed while it was read"):
            open_weights(compiled, model, store)
    assert kinds(store) == []


def test_a_bad_checkpoint_is_refused_every_time(model, compiled, tmp_path, monkeypatch):
    """The check of the weights is done by whoever packs: nothing is kept of what fails it."""
    store = open_store(tmp_path)

    def bad(*args, **given):
        raise CheckpointError("a scale is NaN")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "check_weight_scales", bad)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="a scale is NaN"):
                open_weights(compiled, model, store)
        assert "weights" not in kinds(store)
        with pytest.raises(CheckpointError, match="a scale is NaN"):
            open_weights(compiled, model, None)
    open_weights(compiled, model, store)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "check_weight_scales", bad)
        open_weights(compiled, model, store)  # it was checked when it was packed


def test_without_a_writable_directory(model, compiled, tmp_path):
    (tmp_path / "weights").write_bytes(b"a file")
    with pytest.warns(RuntimeWarning, match="packed weights, unwritable") as caught:
        found = open_weights(compiled, model, open_store(tmp_path))
    assert len(caught) == 1
    assert same(found.arrays, load_weights(compiled.manifest["weights"], model))


def test_the_layout_is_the_programs(compiled):
    layout = weight_layout(compiled)
    assert layout.keys() == compiled.manifest["weights"]["values"].keys()
    assert any(d == np.float32 for d, _ in layout.values())
