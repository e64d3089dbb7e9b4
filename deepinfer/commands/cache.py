"""`deepinfer cache`: list or collect packed weights, or a persistent prefix cache."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer.commands.output import emit, emit_json, size, table
from deepinfer.errors import RequestError, ToolchainError
from deepinfer.runtime.store_gc import Collected, collect, entries, header_of, leftovers
from deepinfer.runtime.weight_store import weights_dir

GC_TIMEOUT_S = 10.0  # for another process that collects


def run(args: argparse.Namespace) -> int:
    root = Path(args.path) if args.path is not None else weights_dir()
    if args.path is not None and not root.is_dir():
        raise RequestError(f"no directory '{args.path}'", where="prefix cache",
                           next="give the directory that was cache_dir")
    return list_entries(root, args) if args.action == "ls" else collect_garbage(root, args)


def list_entries(root: Path, args: argparse.Namespace) -> int:
    """Print what is in the cache; damaged data only show when they are read."""
    now = time.time()
    found: list[dict[str, Any]] = []
    for entry in entries(root) if root.is_dir() else ():
        header = header_of(entry)
        found.append({
            "key": entry.key, "kind": entry.kind, "bytes": entry.nbytes, "used": entry.used,
            "class": header.cache_class if header is not None else None,
            "identity": header.identity if header is not None else None})
    left = len(leftovers(root, now))
    if args.json:
        emit_json({"path": str(root), "bytes": sum(e["bytes"] for e in found), "entries": found,
                   "leftovers": left})
        return 0
    emit(f"{root}: {len(found)} entries, {size(sum(e['bytes'] for e in found))}"
         + (f", {left} files of writers that were killed" if left else ""))
    if found:
        emit(table([("model", "class", "kind", "entries", "bytes", "last used"),
                    *_groups(found, now)], indent="  "))
    return 0


def _groups(found: list[dict[str, Any]], now: float) -> list[tuple[object, ...]]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for e in found:
        name = "damaged" if e["identity"] is None else e["identity"][:16] or "-"
        groups.setdefault((name, e["class"] or "-", e["kind"]), []).append(e)
    return [(*name, len(es), size(sum(e["bytes"] for e in es)),
             f"{_span(now - max(e['used'] for e in es))} ago") for name, es in
            sorted(groups.items())]


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0, seconds):.0f} s"


def collect_garbage(root: Path, args: argparse.Namespace) -> int:
    """Remove what is too old, too much, damaged, or left over by killed writers."""
    if args.max_bytes is not None and args.max_bytes < 0:
        raise RequestError(f"max_bytes is {args.max_bytes}, expected at least 0",
                           where="--max-bytes", next="give the bytes that may remain")
    done: Collected | None = Collected()
    if root.is_dir():
        done = collect(root, max_bytes=args.max_bytes, timeout_s=GC_TIMEOUT_S, check_all=True,
                       verify=args.verify)
    if done is None:
        raise ToolchainError(f"another process has collected for {GC_TIMEOUT_S:.0f} s",
                             where=str(root), next="try again later, or end that process")
    if args.json:
        emit_json({"path": str(root), **asdict(done)})
        return 0
    emit(f"{root}: removed {size(done.nbytes)}; {done.kept} entries of {size(done.kept_bytes)} "
         "remain")
    emit(table([("expired", done.expired), ("over the size limit", done.over_limit),
                ("damaged", done.damaged), ("of killed writers", done.leftovers)], indent="  "))
    return 0
