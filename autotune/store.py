"""The tuning database: SQLite, a set of content-addressed rows.

Every row's id is the sha256 of its content, and a row is never changed. So merging databases is the
union of sets: associative, commutative and idempotent. What follows from the rows (who wins, what
is quarantined) is computed when it is asked for.

    kernel   a problem: op, operands, attributes
    key      the content of a measurement key
    record   one (op, shape, dtypes, order digest, schedule) under one measurement key
    sample   all runs of one visit of a record
    fact     what else was found: bits of a gate, a reason for quarantine, a modelled time
    run      runs of this database, with their progress; local, never exported
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.keys import Machine
from autotune.space import Candidate, Problem, Sizes, canonical, digest
from deepinfer.errors import TargetError

SCHEMA = 1
TABLES: dict[str, tuple[str, ...]] = {
    "kernel": ("key", "target", "op", "problem"),
    "key": ("machine", "body"),
    "record": ("kernel", "op", "shape", "dtypes", "order_digest", "schedule", "place", "sizes",
               "measure_key"),
    "sample": ("record", "session", "rung", "visit", "taken_at", "ns"),
    "fact": ("subject", "kind", "detail"),
}
_SQL = """
CREATE TABLE kernel (id TEXT PRIMARY KEY, key TEXT, target TEXT, op TEXT, problem TEXT) STRICT;
CREATE TABLE key (id TEXT PRIMARY KEY, machine TEXT, body TEXT) STRICT;
CREATE TABLE record (id TEXT PRIMARY KEY, kernel TEXT, op TEXT, shape TEXT, dtypes TEXT,
  order_digest TEXT, schedule TEXT, place INTEGER, sizes TEXT, measure_key TEXT) STRICT;
CREATE TABLE sample (id TEXT PRIMARY KEY, record TEXT, session TEXT, rung INTEGER, visit INTEGER,
  taken_at INTEGER, ns TEXT) STRICT;
CREATE TABLE fact (id TEXT PRIMARY KEY, subject TEXT, kind TEXT, detail TEXT) STRICT;
CREATE TABLE run (name TEXT PRIMARY KEY, begun INTEGER, state TEXT, plan TEXT) STRICT;
CREATE TABLE applied (name INTEGER PRIMARY KEY, at INTEGER, path TEXT, before TEXT, after TEXT)
  STRICT;
CREATE INDEX record_kernel ON record (kernel);
CREATE INDEX sample_record ON sample (record);
CREATE INDEX fact_subject ON fact (subject);
CREATE VIEW result AS SELECT r.*, k.key AS kernel_key, m.machine AS machine,
  (SELECT json_group_array(json(s.ns)) FROM sample s WHERE s.record = r.id) AS samples
  FROM record r JOIN kernel k ON k.id = r.kernel LEFT JOIN key m ON m.id = r.measure_key;
"""


class Store:
    """One open database.

    Args:
        path: of the file; it is made on first use.

    Raises:
        TargetError: it cannot be opened, is no tuning database, or one of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        except (OSError, sqlite3.OperationalError) as error:
            raise TargetError(f"it cannot be opened as a tuning database: "
                              f"{getattr(error, 'strerror', None) or error}", where=str(path),
                              next="name a file with --db") from None
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            with self.transaction():
                (found,) = self._db.execute("PRAGMA user_version").fetchone()
                if not found and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for statement in _SQL.split(";")[:-1]:
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version={SCHEMA}")
                    found = SCHEMA
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise TargetError(f"it cannot be opened as a tuning database: {error}", where=str(path),
                              next="name another file with --db") from None
        if found != SCHEMA:
            self._db.close()
            raise TargetError(f"its schema version is {found}, expected {SCHEMA}", where=str(path),
                              next="use the version of deepinfer-tune that wrote it, or name "
                                   "another file with --db")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, for whoever looks and whatever happens."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def add(self, table: str, **row: Any) -> str:
        """Add a content-addressed row unless it is there; returns its id."""
        assert row.keys() == set(TABLES[table]), f"{table} has {TABLES[table]}, got {list(row)}"
        name = digest([table, row])
        self._db.execute(
            f"INSERT OR IGNORE INTO {table} (id, {', '.join(row)}) VALUES "
            f"(?, {', '.join('?' * len(row))})", (name, *row.values()))
        return name

    def query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(sql, values).fetchall()

    def kernel(self, problem: Problem) -> str:
        """The row of a problem."""
        return self.add("kernel", key=problem.key, target=problem.target, op=problem.op,
                        problem=canonical(problem.to_json()))

    def record(self, candidate: Candidate, sizes: Sizes, machine: Machine, source: str) -> str:
        """The row that samples of this schedule at this size belong to."""
        problem, body = candidate.problem, machine.measure_body(source)
        key = self.add("key", machine=machine.id, body=canonical(body))
        return self.add(
            "record", kernel=self.kernel(problem), op=problem.op, shape=problem.shape(sizes),
            dtypes=problem.dtypes(), order_digest=problem.spec().op.order.digest(),
            schedule=str(candidate.schedule), place=candidate.index, sizes=canonical(sizes),
            measure_key=key)

    def add_sample(self, record: str, session: str, rung: int, visit: int, taken_at: int,
                   ns: Sequence[int]) -> None:
        """Keep all runs of one visit; durable once this returns."""
        self.add("sample", record=record, session=session, rung=rung, visit=visit,
                 taken_at=taken_at, ns=canonical(list(ns)))

    def samples(self, record: str, session: str | None = None) -> dict[tuple[str, int, int],
                                                                       tuple[int, ...]]:
        """The runs of each visit by (session, rung, visit), the oldest visit first."""
        rows = self.query("SELECT * FROM sample WHERE record = ? AND (? IS NULL OR session = ?) "
                          "ORDER BY taken_at, id", record, session, session)
        return {(r["session"], r["rung"], r["visit"]): tuple(json.loads(r["ns"])) for r in rows}

    def add_fact(self, subject: str, kind: str, detail: Mapping[str, Any]) -> None:
        """Keep a finding about a record or a build."""
        self.add("fact", subject=subject, kind=kind, detail=canonical(detail))

    def facts(self, subject: str, kind: str) -> list[dict[str, Any]]:
        rows = self.query("SELECT detail FROM fact WHERE subject = ? AND kind = ? ORDER BY id",
                          subject, kind)
        return [json.loads(r["detail"]) for r in rows]

    def save_run(self, name: str, begun: int, state: str, plan: Mapping[str, Any]) -> None:
        self._db.execute("INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?)",
                         (name, begun, state, canonical(plan)))

    def set_state(self, name: str, state: str) -> None:
        self._db.execute("UPDATE run SET state = ? WHERE name = ?", (state, name))

    def runs(self) -> list[tuple[str, int, str, dict[str, Any]]]:
        """All runs, the latest first: name, begun, state, plan."""
        return [(r["name"], r["begun"], r["state"], json.loads(r["plan"]))
                for r in self.query("SELECT * FROM run ORDER BY begun DESC, name DESC")]
