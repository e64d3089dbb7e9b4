"""`deepinfer inspect kernels`: of each op and target, how far it is: native, compiled, ... missing.

What is said is what was looked at: a Program's launches and binaries, the texts and binaries in the
cache, the kernels that a target declares, and the graphs before and after each pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deepinfer.commands.inspect import all_ops
from deepinfer.commands.output import emit, emit_json, say, table
from deepinfer.errors import DeepInferError, ProgramError, ToolchainError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.limits import Limits
from deepinfer.graph.single import single_op_graphs
from deepinfer.ir.graph import Graph
from deepinfer.program import Program
from deepinfer.settings import cache_dir
from deepinfer.targets.base import TARGETS, Target, load_target

LEGEND = (
    ("native", "in the Program as a binary that this machine can run"),
    ("compiled", "in the Program or the cache as a binary, which does not run here"),
    ("generated", "in the Program or the cache as source only"),
    ("declared", "a kernel is declared; neither a Program nor the cache has its source"),
    ("fused by / rewritten by", "that pass leaves no node of it"),
    ("unused", "no lowered graph of this model has it"),
    ("missing", "no kernel, and lowered graphs still have it"),
)


def run(args: argparse.Namespace) -> int:
    given = Program.load(args.program) if args.program else None
    name = args.target or (given.target if given else None)
    targets = [load_target(t) for t in ([name] if name else TARGETS)]
    if given is not None and given.target != targets[0].name:
        raise ProgramError(f"target is '{given.target}', expected '{targets[0].name}'",
                           where=f"Program {given.path}", next="leave --target out")
    found: dict[str, dict[str, str]] = {}
    for target in targets:
        model, cfg = config_for(target, args.config)
        program = given or cached_program(cfg, target)
        if program is not None:
            say(f"{target.name}: Program {program.path}")
        found[target.name] = statuses(cfg, target, program)
        declared = [op for op, status in found[target.name].items() if status == "declared"]
        if declared:
            only = "" if target.name == "cpu" else f" --op {' '.join(declared)}"
            say(f"{target.name}: what is declared is built by `deepinfer compile {model} --target "
                f"{target.name} --out DIR{only}`")
    if args.json:
        emit_json({"kernels": found})
    else:
        emit(table([("op", *found), *((op, *(column[op] for column in found.values()))
                                      for op in all_ops())]))
        said = {s.partition(" by ")[0] for column in found.values() for s in column.values()}
        say("\n" + table([row for row in LEGEND if said & set(row[0].split())]))
    return 0


def config_for(target: Target, given: str | None) -> tuple[str, ModelConfig]:
    """Whose graphs say which kernels are needed, by name and as a config: what was given, else for
    cpu the model that `deepinfer run` makes, for targets that are cross-compiled the release."""
    from deepinfer.compiler import RELEASE, read_config
    from deepinfer.graph.make_model import tiny_config

    if given is None and target.name == "cpu":
        return "MODEL", tiny_config()
    return given or RELEASE, read_config(given or RELEASE)


def cached_program(cfg: ModelConfig, target: Target) -> Program | None:
    """The Program that compiling ``cfg`` here would find in the cache."""
    from deepinfer.compiler import content_key, default_levels

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
    limits = Limits.for_model(cfg)
    graphs, gone = lowering(cfg, limits, target)
    left = set().union(*map(_ops, graphs))
    kept = cached_kernels((*graphs, *single_op_graphs(cfg, limits)), target,
                          [op for op in target.kernels if op not in launched])
    found = {}
    for op in all_ops():
        if op in launched:
            found[op] = built
        elif op in kept:
            found[op] = kept[op]
        elif op in left:
            found[op] = "missing"
        elif op in gone:
            found[op] = f"{'fused' if gone[op].startswith('fuse_') else 'rewritten'} by {gone[op]}"
        else:
            found[op] = "unused"
    return found


def cached_kernels(graphs: Sequence[Graph], target: Target, ops: list[str]) -> dict[str, str]:
    """How far the cache has all kernels that the graphs need of each op; ops they do not have are
    left out."""
    from deepinfer.codegen.cache import find_lowered
    from deepinfer.crosscompile import kernels_of

    try:
        wanted = kernels_of(graphs, target, ops)
    except ToolchainError:  # the kernels cannot even be imported: no TileLang
        return dict.fromkeys(set(ops) & set().union(*map(_ops, graphs)), "declared")
    found = {}
    for op, instances in wanted.items():
        texts = [find_lowered(target, cache_dir() / "lowered", x) for x in instances]
        whole = [t for t in texts if t is not None]
        if whole and len(whole) == len(texts):
            built = all(target.is_built(t, cache_dir() / "objects") for t in whole)
            found[op] = "compiled" if built else "generated"
        elif instances:
            found[op] = "declared"
    return found


def built_as(program: Program) -> str:
    """How far a Program's kernels are on this machine."""
    from deepinfer.runtime.devices.isa import host_levels

    if not any(name.startswith("bin/") for name in program.manifest["files"]):
        return "generated"
    runs_here = program.target == "cpu" and set(program.manifest["isa"]) & set(host_levels())
    return "native" if runs_here else "compiled"


def lowering(cfg: ModelConfig, limits: Limits, target: Target
             ) -> tuple[list[Graph], dict[str, str]]:
    """The lowered graphs, and by op that none of them has the pass that removed the last.

    An op that a pass makes and a later one removes counts as removed too.
    """
    from deepinfer.codegen.emit import lower_graph
    from deepinfer.compiler import build_graphs

    lowered: list[Graph] = []
    removed: dict[str, set[str]] = {}
    for graph in build_graphs(cfg, limits).values():
        before = [_ops(graph)]

        def after(name: str, now: Graph, before: list[set[str]] = before) -> None:
            for op in before[0] - _ops(now):
                removed.setdefault(op, set()).add(name)
            before[0] = _ops(now)

        lowered.append(lower_graph(graph, target, after))
    order = [p.name for p in target.passes]
    left = set().union(*map(_ops, lowered))
    gone = {op: max(names, key=order.index) for op, names in removed.items() if op not in left}
    return lowered, gone


def _ops(graph: Graph) -> set[str]:
    return {n.op.name for n in graph.nodes}
