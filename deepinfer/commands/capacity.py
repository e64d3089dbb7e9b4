"""`deepinfer doctor --model`: what a model's state takes, and how many tokens a budget holds."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.commands.output import emit, emit_json, size, table
from deepinfer.compiler import build_graphs, facts, read_config
from deepinfer.errors import RequestError
from deepinfer.graph.limits import Limits
from deepinfer.ir.graph import Graph
from deepinfer.ir.types import Sym
from deepinfer.program import Phase, Program, ValueInfo
from deepinfer.runtime.state import PARTS, bytes_per_page, bytes_per_snapshot, state_bytes

INTERVAL = 8  # pages per snapshot, as the engine's default
_KINDS = {"kv": "compressed KV", "index_keys": "index keys", "ring": "window ring",
          "pending": "pending groups"}


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the state of one model takes, in bytes.

    Args:
        page_size: tokens of a page. page: bytes of one by kind of cache. slot: bytes of a request's
            slot by kind. rings: window rings in a slot. ring_length: their slots.
        snapshot: bytes of a snapshot; snapshot_replay: with decoder replay.
        budget: bytes for pages and snapshots. tokens: that fit with snapshots (prefix_cache
            "exact"); tokens_without: with none.
        max_model_len: the longest request.
    """

    model: str
    page_size: int
    page: dict[str, int]
    slot: dict[str, int]
    rings: int
    ring_length: int
    snapshot: int
    snapshot_replay: int
    budget: int
    tokens: int
    tokens_without: int
    max_model_len: int


def run(args: argparse.Namespace) -> int:
    budget = args.cache_bytes if args.cache_bytes is not None else free_memory()
    if budget < 1:
        raise RequestError(f"cache_bytes is {budget}, expected at least 1", where="--cache-bytes",
                           next="give the bytes that the caches may take")
    found = capacity(args.model, program_of(args.model), budget)
    if args.json:
        emit_json(describe(found))
    else:
        emit(text(found, given=args.cache_bytes is not None))
    return 0


def free_memory() -> int:
    """Bytes of memory that nobody uses at the moment."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def program_of(model: str) -> Program:
    """The Program in a directory, or one without code that declares the state of a model."""
    if (Path(model) / "manifest.json").is_file():
        return Program.load(model)
    cfg = read_config(model)
    limits = Limits.for_model(cfg)
    graphs = build_graphs(cfg, limits)
    return Program(Path(model), {"facts": facts(cfg, limits, graphs)},
                   {name: _phase(graph) for name, graph in graphs.items()})


def _phase(graph: Graph) -> Phase:
    values = tuple(ValueInfo(v.name, v.kind.value, v.type.dtype.name, tuple(
        (d.name, d.times) if isinstance(d, Sym) else d for d in v.type.shape), None)
        for v in graph.values())
    return Phase(graph.name, values, (), (), 0, 0, ())


def capacity(model: str, program: Program, budget: int) -> Capacity:
    """What a model's state takes and what ``budget`` bytes hold of it."""
    known = program.manifest["facts"]
    page_size, page = int(known["page_size"]), bytes_per_page(program)
    snapshot = bytes_per_snapshot(program)
    rings = {s["name"].removesuffix("_sf") for s in known["state"] if s["kind"] == "ring"}
    pages = budget * INTERVAL // max(1, page * INTERVAL + snapshot)
    return Capacity(
        model, page_size, _by_kind(state_bytes(program, num_pages=1)),
        _by_kind(state_bytes(program, num_slots=1)), len(rings), int(known["ring"]), snapshot,
        bytes_per_snapshot(program, [p for p in PARTS if p == "encoder"]), budget,
        pages * page_size, budget // max(1, page) * page_size, int(known["max_model_len"]))


def _by_kind(nbytes: dict[str, int]) -> dict[str, int]:
    """Sums over layers by what is kept; scales count with their data."""
    sums: dict[str, int] = {}
    for name, n in nbytes.items():
        kind = re.sub("_sf$", "", name.rsplit(".", 1)[-1])
        sums[_KINDS.get(kind, kind)] = sums.get(_KINDS.get(kind, kind), 0) + n
    return {kind: n for kind, n in sums.items() if n}


def describe(found: Capacity) -> dict[str, Any]:
    """The same for machines."""
    page = sum(found.page.values())
    return {
        "model": found.model, "page_size": found.page_size,
        "bytes_per_page": page, "bytes_per_token": page / found.page_size,
        "bytes_per_page_by_cache": found.page, "bytes_per_slot": sum(found.slot.values()),
        "bytes_per_slot_by_kind": found.slot, "rings_per_slot": found.rings,
        "ring_length": found.ring_length, "bytes_per_snapshot": found.snapshot,
        "bytes_per_snapshot_with_replay": found.snapshot_replay, "snapshot_interval": INTERVAL,
        "cache_bytes": found.budget, "tokens": found.tokens,
        "tokens_without_snapshots": found.tokens_without, "max_model_len": found.max_model_len,
    }


def text(found: Capacity, *, given: bool) -> str:
    """The same for readers."""
    page = sum(found.page.values())
    rows: list[tuple[object, ...]] = [("per token", "per page", "cache")]
    rows += [(_bytes(n / found.page_size), size(n), kind) for kind, n in found.page.items()]
    rows.append((_bytes(page / found.page_size), size(page), "all"))
    slot = ", ".join(f"{kind} {size(n)}" for kind, n in found.slot.items())
    source = "--cache-bytes" if given else "free memory"
    return "\n".join([
        f"model {found.model}: pages of {found.page_size} tokens, requests of up to "
        f"{found.max_model_len:,} tokens",
        table(rows, indent="  "),
        f"a request's slot: {size(sum(found.slot.values()))} ({slot}); {found.rings} rings of "
        f"{found.ring_length} positions",
        f"a snapshot: {size(found.snapshot)}; {size(found.snapshot_replay)} with decoder replay",
        f"{size(found.budget)} ({source}) hold {found.tokens:,} tokens with a snapshot every "
        f"{INTERVAL} pages, {found.tokens_without:,} without",
    ])


def _bytes(n: float) -> str:
    return f"{n:.0f} B" if n == int(n) else f"{n:.1f} B"
