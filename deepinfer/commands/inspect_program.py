"""`deepinfer inspect program`: check a Program's files and say what is in it."""

from __future__ import annotations

import argparse
from collections import Counter

from deepinfer.commands.output import emit, emit_json, size, table
from deepinfer.errors import RequestError
from deepinfer.program import Phase, Program


def run(args: argparse.Namespace) -> int:
    program = Program.load(args.path)
    if args.phase is not None and args.phase not in program.phases:
        raise RequestError(f"the Program has no phase '{args.phase}', it has "
                           f"{', '.join(program.phases)}", where=f"Program {args.path}",
                           next="choose one of them")
    if args.json:
        emit_json(describe(program, args.phase))
    elif args.phase is not None:
        emit(table([("#", "op", "kernel", "at"),
                    *((i, *launch) for i, launch in
                      enumerate(program.phases[args.phase].launches))]))
    else:
        emit(text(program))
    return 0


def describe(program: Program, phase: str | None = None) -> dict[str, object]:
    """What a Program is, for machines; the launches of one phase only on request."""
    m = program.manifest
    found = {key: m[key] for key in
             ("digest", "key", "format", "abi", "target", "isa", "versions", "limits", "facts")}
    found["phases"] = {n: {"launches": len(p.launches), "kernels": len(_kernels(p)),
                           "arena_bytes": p.arena_bytes, "scratch_bytes": p.scratch_bytes,
                           "sizes": dict(p.sizes), "outputs": list(p.outputs)}
                       for n, p in program.phases.items()}
    found["files"] = dict(m["files"])
    if phase is not None:
        found["launches"] = [dict(zip(("op", "kernel", "at"), x, strict=True))
                             for x in program.phases[phase].launches]
    return found


def text(program: Program) -> str:
    """What a Program is, for readers."""
    m = program.manifest
    model = m["model"].get("text_config", {})
    kernels = set().union(*(_kernels(p) for p in program.phases.values()))
    head = [
        ("digest", program.digest),
        ("target", f"{program.target}, ISA levels {', '.join(m['isa'])}"),
        ("model", f"{model.get('num_hidden_layers')} layers, hidden {model.get('hidden_size')}, "
                  f"vocabulary {model.get('vocab_size')}"),
        ("limits", ", ".join(f"{k} {v}" for k, v in m["limits"].items())),
        ("versions", ", ".join(f"{k} {v}" for k, v in m["versions"].items())),
        ("kernels", f"{len(kernels)} for {len({k for k in m['orders']})} ops"),
        ("weights", f"{len(m['weights']['values'])} values to load; none are in the Program"),
        ("files", f"{len(m['files'])}, all as written (sha256 checked)"),
        *((f"  {n}", size((program.path / n).stat().st_size))
          for n in m["files"] if n.startswith("bin/")),
    ]
    rows: list[tuple[object, ...]] = [("phase", "launches", "kernels", "arena", "scratch a thread",
                                       "most launched")]
    for name, p in program.phases.items():
        most = Counter(op for op, _, _ in p.launches).most_common(3)
        rows.append((name, len(p.launches), len(_kernels(p)), size(p.arena_bytes),
                     size(p.scratch_bytes), ", ".join(f"{op} {n}" for op, n in most)))
    return f"Program {program.path}\n{table(head, indent='  ')}\n\n{table(rows, indent='  ')}\n"


def _kernels(phase: Phase) -> set[str]:
    return {symbol for _, symbol, _ in phase.launches}
