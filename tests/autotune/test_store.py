"""The database: rows by content, versions, and what a merge may do."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest

from autotune.store import SCHEMA, Store
from deepinfer.errors import TargetError
from tests.autotune.fakes import MACHINE, SPACE, problem, task, temporary, use_space


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


@pytest.fixture
def store(tmp_path):
    made = temporary(tmp_path)
    yield made
    made.close()


def test_one_row_a_schedule_with_all_samples(store):
    candidate, (small, _) = task().candidates()[1], task().points
    record = store.record(candidate, small, MACHINE, "text")
    assert store.record(candidate, small, MACHINE, "text") == record
    store.add_sample(record, "s", 0, 0, 1, (10, 11, 12))
    store.add_sample(record, "s", 99, 0, 2, (9, 9))
    (row,) = store.query("SELECT * FROM result")
    assert (row["op"], row["shape"], row["dtypes"]) == ("silu_mul", "N=1 I=64", "bf16,bf16->bf16")
    assert row["schedule"] == "a=0,b=1" and row["place"] == 1
    assert row["order_digest"] == problem().spec().op.order.digest()
    assert json.loads(row["samples"]) == [[10, 11, 12], [9, 9]]
    assert store.samples(record) == {("s", 0, 0): (10, 11, 12), ("s", 99, 0): (9, 9)}
    assert store.samples(record, "t") == {}


def test_each_part_of_the_key_makes_another_row(store):
    candidate, other = task().candidates()[:2]
    small, large = task().points
    machines = [replace(MACHINE, **{k: v}) for k, v in (
        ("cpu", "x"), ("isa", "avx2"), ("threads", 2), ("cores", 2), ("cache_bytes", 1),
        ("versions", (("numpy", "9"),)))]
    machines.append(replace(MACHINE, policy=replace(MACHINE.policy, cold_bytes=5)))
    rows = [store.record(candidate, small, MACHINE, "text"),
            store.record(candidate, large, MACHINE, "text"),
            store.record(other, small, MACHINE, "text"),
            store.record(candidate, small, MACHINE, "edited"),
            store.record(task(width=128).candidates()[0], small, MACHINE, "text"),
            *(store.record(candidate, small, m, "text") for m in machines)]
    assert len(set(rows)) == len(rows) == 12


def test_a_row_never_changes(store):
    store.add_fact("x", "k", {"a": 1})
    store.add_fact("x", "k", {"a": 1})
    store.add_fact("x", "k", {"a": 2})
    assert store.facts("x", "k") in ([{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}])


def test_write_ahead_log_and_version(store):
    assert store.query("PRAGMA journal_mode")[0][0] == "wal"
    assert store.query("PRAGMA user_version")[0][0] == SCHEMA


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "t.db"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={SCHEMA + 1}")
    with pytest.raises(TargetError, match=f"schema version is {SCHEMA + 1}, expected {SCHEMA}"):
        Store(path)


def test_something_else_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary " * 100)
    with pytest.raises(TargetError, match="cannot be opened as a tuning database"):
        Store(path)
    assert path.read_text().startswith("dear diary")
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE birds (name TEXT)")
    with pytest.raises(TargetError, match="schema version is 0"):
        Store(tmp_path / "other.db")


def test_a_transaction_is_all_or_nothing(store):
    with pytest.raises(RuntimeError), store.transaction():
        store.add_fact("x", "k", {})
        raise RuntimeError
    assert store.facts("x", "k") == []


def test_runs(store):
    store.save_run("a", 1, "running", {"tasks": []})
    store.save_run("b", 2, "running", {"tasks": []})
    store.set_state("b", "done")
    assert [(n, s) for n, _, s, _ in store.runs()] == [("b", "done"), ("a", "running")]


def test_schedule_ids_are_places(store):
    assert [c.index for c in task().candidates()] == list(range(len(SPACE)))


@pytest.mark.parametrize("name", ["", "notes.txt/t.db"])
def test_a_place_for_no_file_is_refused(tmp_path, name):
    (tmp_path / "notes.txt").write_text("dear diary")
    with pytest.raises(TargetError, match="cannot be opened as a tuning database: ") as caught:
        Store(tmp_path / name)
    assert caught.value.next == "name a file with --db" and str(tmp_path) in caught.value.where
