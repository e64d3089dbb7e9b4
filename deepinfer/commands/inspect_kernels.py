"""`deepinfer inspect kernels`: of each op and target, how far it is: native, compiled, ... missing.

What is said is what was looked at: a Program's launches and binaries, the kernels that a target
declares, and the graphs before and after each pass.
"""

from __future__ import annotations

import argparse

from deepinfer.commands.inspect import all_ops
from deepinfer.commands.output import emit, emit_json, say, table
from deepinfer.commands.targets import absent_targets, open_targets
from deepinfer.errors import DeepInferError, ProgramError
from deepinfer.graph.config import ModelConfig
from deepinfer.ir.graph import Graph
from deepinfer.program import Program
from deepinfer.targets.base import Target

LEGEND = (
    ("native", "compiled, and this machine can run it"),
    ("compiled", "in the Program as a binary that this machine cannot run"),
    ("generated", "in the Program as source only"),
    ("declared", "a kernel is declared, no Program that holds it was looked at"),
    ("fused by / rewritten by", "that pass leaves no node of it"),
    ("unused", "no kernel, and no graph of this model has it"),
    ("missing", "no kernel, and lowered graphs still have it"),
)


def run(args: argparse.Namespace) -> int:
    from deepinfer.compiler import read_config
    from deepinfer.graph.make_model import tiny_config

    cfg = read_config(args.config) if args.config else tiny_config()
    given = Program.load(args.program) if args.program else None
    targets = open_targets(args.target or (given.target if given else None))
    if given is not None and given.target != targets[0].name:
        raise ProgramError(f"target is '{given.target}', expected '{targets[0].name}'",
                           where=f"Program {given.path}", next="leave --target out")
    found: dict[str, dict[str, str]] = {}
    for target in targets:
        program = given or cached_program(cfg, target)
        if program is not None:
            say(f"{target.name}: Program {program.path}")
        found[target.name] = statuses(cfg, target, program)
    if args.json:
        emit_json({"kernels": found, "absent": absent_targets()})
    else:
        emit(table([("op", *found), *((op, *(column[op] for column in found.values()))
                                      for op in all_ops())]))
        said = {s.partition(" by ")[0] for column in found.values() for s in column.values()}
        say("\n" + table([row for row in LEGEND if said & set(row[0].split())]))
    if args.target is None and absent_targets():
        say(f"not in this version: {', '.join(absent_targets())}")
    return 0


def cached_program(cfg: ModelConfig, target: Target) -> Program | None:
    """The Program that compiling ``cfg`` here would find in the cache."""
    from deepinfer.compiler import content_key, default_levels
    from deepinfer.graph.limits import Limits
    from deepinfer.settings import cache_dir

    try:
        levels = default_levels()
        key = content_key(cfg, Limits.for_model(cfg), target, levels)
        return Program.load(cache_dir() / "programs" / key[:32])
    except DeepInferError:  # no compiler, so no key; or no Program, or a damaged one
        return None


def statuses(cfg: ModelConfig, target: Target, program: Program | None) -> dict[str, str]:
    """By op: how it runs on the target; the words are those of LEGEND."""
    built = built_as(program) if program is not None else ""
    launched = {op for p in program.phases.values() for op, _, _ in p.launches} if program else {}
    source, left, gone = lowering(cfg, target)
    found = {}
    for op in all_ops():
        if op in launched:
            found[op] = built
        elif op in target.kernels:
            found[op] = "declared"
        elif op in left:
            found[op] = "missing"
        elif op in gone:
            found[op] = f"{'fused' if gone[op].startswith('fuse_') else 'rewritten'} by {gone[op]}"
        else:
            assert op not in source
            found[op] = "unused"
    return found


def built_as(program: Program) -> str:
    """How far a Program's kernels are on this machine."""
    from deepinfer.runtime.devices.isa import host_levels

    if not any(name.startswith("bin/") for name in program.manifest["files"]):
        return "generated"
    runs_here = program.target == "cpu" and set(program.manifest["isa"]) & set(host_levels())
    return "native" if runs_here else "compiled"


def lowering(cfg: ModelConfig, target: Target) -> tuple[set[str], set[str], dict[str, str]]:
    """Ops of the source graphs, ops of the lowered ones, and by op the pass that removed the last.

    An op that a pass makes and a later one removes counts as removed too.
    """
    from deepinfer.codegen.emit import lower_graph
    from deepinfer.compiler import build_graphs
    from deepinfer.graph.limits import Limits

    graphs = build_graphs(cfg, Limits.for_model(cfg))
    source = set().union(*map(_ops, graphs.values()))
    left: set[str] = set()
    removed: dict[str, set[str]] = {}
    for graph in graphs.values():
        before = [_ops(graph)]

        def after(name: str, now: Graph, before: list[set[str]] = before) -> None:
            for op in before[0] - _ops(now):
                removed.setdefault(op, set()).add(name)
            before[0] = _ops(now)

        left |= _ops(lower_graph(graph, target, after))
    order = [p.name for p in target.passes]
    gone = {op: max(names, key=order.index) for op, names in removed.items() if op not in left}
    return source, left, gone


def _ops(graph: Graph) -> set[str]:
    return {n.op.name for n in graph.nodes}
