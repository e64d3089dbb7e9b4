"""Export and merge: a union of sets, whatever the order, the grouping and the repetition."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.store import Store
from autotune.transfer import collect, conflicts, export, merge, read_database
from deepinfer.errors import TargetError
from tests.autotune.fakes import MACHINE, FakeRunner, run_search, task, temporary, use_space

OTHER = replace(MACHINE, cpu="another")


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


# A small world of possible rows: what three machines could have measured.
FINDINGS = st.lists(st.tuples(
    st.sampled_from([MACHINE, OTHER]), st.integers(0, 3), st.sampled_from(["text", "edited"]),
    st.sampled_from(["s", "t"]), st.integers(0, 2), st.integers(1, 4)), max_size=6)


def database(folder: Path, name: str, findings) -> Store:
    store = Store(folder / name)
    for machine, index, source, session, visit, ns in findings:
        record = store.record(task().candidates()[index], task().points[0], machine, source)
        store.add_sample(record, session, 0, visit, ns, (ns, ns))
        store.add_fact(record, "bits", {"digest": "same"})
    return store


def lines(store: Store) -> list[str]:
    return list(export(store))


@settings(max_examples=25)
@given(FINDINGS, FINDINGS, FINDINGS)
def test_merge_is_a_union(a, b, c):
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = [lines(database(folder, f"{i}", f)) for i, f in enumerate((a, b, c))]

        def merged(name: str, *parts) -> list[str]:
            store = Store(folder / name)
            for part in parts:
                merge(store, part, name)
            return lines(store)

        ab, bc = merged("ab", *texts[:2]), merged("bc", *texts[1:])
        whole = merged("abc", *texts)
        assert merged("ab+c", ab, texts[2]) == merged("a+bc", texts[0], bc) == whole  # associative
        assert merged("cba", *texts[::-1]) == whole  # commutative
        assert merged("twice", whole, texts[1], whole) == whole  # idempotent
        assert set(whole) == {line for text in texts for line in text}


def test_counts_and_database_files(tmp_path):
    run_search(FakeRunner(lambda c, s: 1000.0 + c.index), temporary(tmp_path, "a.db"))
    text = read_database(tmp_path / "a.db")
    rows = len(text) - 1
    store = temporary(tmp_path, "b.db")
    first, again = (merge(store, text, "a.db") for _ in range(2))
    assert (first.added, first.known) == (rows, 0) and (again.added, again.known) == (0, rows)
    (tmp_path / "a.jsonl").write_text("\n".join(text))
    assert read_database(tmp_path / "a.jsonl") == text == lines(store)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda t: t.replace('"place":1', '"place":2', 1), "does not have the id"),
    (lambda t: t[:len(t) // 2], "no row of a tuning database"),
    (lambda t: t + "\n[1, 2]", "no row of a tuning database"),
    (lambda t: t.replace('"deepinfer_tuning":1', '"deepinfer_tuning":7'), "version is 7"),
    (lambda t: t + '\n{"table":"run","id":"x","row":{}}', "no row of a tuning database"),
])
def test_a_damaged_export_adds_nothing(tmp_path, damage, message):
    made = database(tmp_path, "a.db", [(MACHINE, 1, "text", "s", 0, 1)])
    text, store = "\n".join(lines(made)), temporary(tmp_path, "b.db")
    assert damage(text) != text
    with pytest.raises(TargetError, match=message):
        merge(store, damage(text).splitlines(), "a.jsonl")
    assert lines(store) == lines(temporary(tmp_path, "empty.db"))


def test_other_bits_on_another_machine_are_a_conflict(tmp_path):
    store = temporary(tmp_path)
    for machine, bits in ((MACHINE, "same"), (OTHER, "same")):
        run_search(FakeRunner(lambda c, s: 1.0e4, machine=machine, bits={1: bits},
                              reference_bits="same"), store, machine.cpu)
    assert conflicts(store) == ()
    third = replace(MACHINE, cpu="broken")
    run_search(FakeRunner(lambda c, s: 1.0e4, machine=third, reference_bits="wrong",
                          bits=dict.fromkeys(range(16), "wrong")), store, "third")
    found = conflicts(store)
    assert len(found) == 4 and all("silu_mul" in name for name in found)
    assert merge(store, lines(store), "itself").conflicts == found


def test_gc_keeps_what_counts(tmp_path):
    """Of two sources the earlier goes once it is old; libraries go by age."""
    store, day = temporary(tmp_path), 86400 * 10**9
    for source, at in (("text", 1 * day), ("edited", 2 * day)):
        record = store.record(task().candidates()[0], task().points[0], MACHINE, source)
        store.add_sample(record, "s", 0, 0, at, (5,))
        store.add_fact(record, "quarantine", {"kind": "x", "reason": "y", "kernel": "k",
                                              "schedule": "z"})
    folder = tmp_path / "libraries"
    folder.mkdir()
    scratch = tmp_path / "objects" / "tmpkilled"
    scratch.mkdir(parents=True)
    (tmp_path / "objects" / "kept.o").write_bytes(b"")
    for name, age in (("old.so", 50), ("new.so", 1)):
        (folder / name).write_bytes(b"12345")
        os.utime(folder / name, ns=((100 - age) * day, (100 - age) * day))
    for path in (scratch, tmp_path / "objects" / "kept.o"):
        os.utime(path, ns=(day, day))

    def gc(now, **more):
        given = {"days": 30.0, "failures": False, "dry_run": False} | more
        got = collect(store, (folder, tmp_path / "objects"), now=float(now * 86400), **given)
        return got.rows, got.files, got.nbytes

    assert gc(100, dry_run=True)[:2] == (3, 2) == gc(100)[:2]
    assert not scratch.exists() and (tmp_path / "objects" / "kept.o").exists()
    assert gc(100) == (0, 0, 0) and [p.name for p in folder.iterdir()] == ["new.so"]
    (row,) = store.query("SELECT * FROM result")
    assert json.loads(row["samples"]) == [[5]]
    assert gc(100, failures=True)[0] == 1
    assert store.query("SELECT * FROM fact WHERE kind = 'quarantine'") == []
