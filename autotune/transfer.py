"""Moves measurements between databases: export, merge and collection of what is outdated.

Merging is the union of sets of content-addressed rows, so order, grouping and repetition do not
matter. Each line carries its id and is checked against it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.space import canonical, digest
from autotune.store import SCHEMA, TABLES, Store
from deepinfer.errors import TargetError


def export(store: Store) -> Iterator[str]:
    """Every row as a line of JSON, sorted: equal databases give equal text."""
    yield canonical({"deepinfer_tuning": SCHEMA})
    for table, columns in TABLES.items():
        for row in store.query(f"SELECT * FROM {table} ORDER BY id"):
            yield canonical({"table": table, "id": row["id"],
                             "row": {c: row[c] for c in columns}})


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge did.

    Args:
        added, known: rows. conflicts: kernels of which two machines found different bits.
    """

    added: int
    known: int
    conflicts: tuple[str, ...]


def merge(store: Store, lines: Iterable[str], where: str) -> Merged:
    """Add the rows of an export; all of them or, on an error, none.

    Raises:
        TargetError: a line is not one of ours, or is not as it was written.
    """
    added = known = 0
    with store.transaction():
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            table, name, row = _read(line, f"{where}, line {number}")
            if table:
                before = store.query(f"SELECT 1 FROM {table} WHERE id = ?", name)
                store.add(table, **row)
                added, known = added + (not before), known + bool(before)
    return Merged(added, known, conflicts(store))


def _read(line: str, where: str) -> tuple[str, str, dict[str, Any]]:
    """(table, id, row) of a line, or ("", "", {}) of the first one."""
    try:
        held = json.loads(line)
        if "deepinfer_tuning" in held:
            if held["deepinfer_tuning"] != SCHEMA:
                raise TargetError(f"schema version is {held['deepinfer_tuning']}, expected "
                                  f"{SCHEMA}", where=where,
                                  next="export it with this version of deepinfer-tune")
            return "", "", {}
        table, name, row = held["table"], held["id"], held["row"]
        if row.keys() != set(TABLES[table]) or digest([table, row]) != name:
            raise ValueError("the row does not have the id that it was given")
        return table, name, row
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TargetError(f"it is no row of a tuning database: {error}", where=where,
                          next="export the database again") from None


def read_database(path: Path) -> list[str]:
    """The lines of an export, or of a database file itself.

    Raises:
        TargetError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            is_database = file.read(16).startswith(b"SQLite format 3")
        if not is_database:
            return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"it cannot be read: {error}", where=str(path),
                          next="give a file that `deepinfer-tune export` wrote, or a database"
                          ) from None
    other = Store(path)
    try:
        return list(export(other))
    finally:
        other.close()


def conflicts(store: Store) -> tuple[str, ...]:
    """Kernels whose bits differ between two sources or machines with equal inputs: one of them
    broke the promise of equal bits. Inputs are equal where numpy is."""
    rows = store.query(
        "SELECT k.key, r.shape, json_extract(m.body, '$.versions.numpy') AS numpy, "
        "count(DISTINCT json_extract(f.detail, '$.digest')) AS digests "
        "FROM fact f JOIN record r ON r.id = f.subject JOIN kernel k ON k.id = r.kernel "
        "JOIN key m ON m.id = r.measure_key WHERE f.kind = 'bits' "
        "AND NOT EXISTS (SELECT 1 FROM fact q WHERE q.subject = r.id AND q.kind = 'quarantine') "
        "GROUP BY k.key, r.shape, r.order_digest, numpy HAVING digests > 1 ORDER BY k.key, r.shape")
    return tuple(f"{r['key']} at {r['shape']}" for r in rows)


@dataclass(frozen=True, slots=True)
class Collected:
    """What was, or would be, removed: rows, and files with their bytes."""

    rows: int
    files: int
    nbytes: int


def collect(store: Store, folders: Sequence[Path], *, days: float, failures: bool,
            dry_run: bool, now: float | None = None) -> Collected:
    """Remove what newer measurements replaced, and libraries that nobody used for some days.

    A record goes if the same schedule at the same point of the same machine has samples of a later
    source, and its own are older than ``days``. With ``failures``, quarantine is lifted, too.
    Of the first of ``folders`` all that is old goes; of the others, only directories that killed
    builds left behind.
    """
    now = time.time() if now is None else now
    limit = int((now - days * 86400) * 1e9)
    old = [r["id"] for r in store.query(
        "WITH last AS (SELECT r.id, r.kernel, r.schedule, r.sizes, m.machine, "
        "max(s.taken_at) AS at FROM record r JOIN key m ON m.id = r.measure_key "
        "JOIN sample s ON s.record = r.id GROUP BY r.id) "
        "SELECT a.id FROM last a JOIN last b USING (kernel, schedule, sizes, machine) "
        "WHERE a.at < b.at AND a.at < ? GROUP BY a.id ORDER BY a.id", limit)]
    facts = [r["id"] for r in store.query("SELECT id FROM fact WHERE kind = 'quarantine'")
             if failures]
    files, nbytes = 0, 0
    for path in [p for f in folders for p in sorted(f.glob("*")) if f == folders[0] or p.is_dir()]:
        stat = path.stat()
        if max(stat.st_mtime, stat.st_atime) < now - days * 86400:
            files, nbytes = files + 1, nbytes + stat.st_size
            if not dry_run:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    rows = len(old) + len(facts)
    with store.transaction():
        for name in old:
            for table, column in (("sample", "record"), ("fact", "subject"), ("record", "id")):
                found = store.query(f"SELECT count(*) AS n FROM {table} WHERE {column} = ?", name)
                rows += found[0]["n"] if table != "record" else 0
                if not dry_run:
                    store.query(f"DELETE FROM {table} WHERE {column} = ?", name)
        for name in facts if not dry_run else []:
            store.query("DELETE FROM fact WHERE id = ?", name)
    return Collected(rows, files, nbytes)
