"""Compile a model for a target: config -> graphs -> passes -> kernels -> Program."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepinfer import program as artifact
from deepinfer.codegen.cache import cached_lower, tilelang_version
from deepinfer.codegen.cost import speculation_costs
from deepinfer.codegen.emit import Report, lower_graph, lower_kernels, plan_phase, texts
from deepinfer.codegen.select import instances
from deepinfer.errors import CheckpointError, ProgramError, TargetError
from deepinfer.graph import config_json
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.derived import weight_sources
from deepinfer.graph.draft import draft
from deepinfer.graph.facts import facts as model_facts
from deepinfer.graph.limits import Limits
from deepinfer.graph.v41_flash import PHASES, forward
from deepinfer.ir.graph import Graph
from deepinfer.ir.op import OPS
from deepinfer.ir.types import Kind
from deepinfer.program import Program
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.settings import ISA_LEVELS, cache_dir, forced_isa, usable_cpus, warn_unknown
from deepinfer.targets.base import Target, load_target

RELEASE = "v4.1-flash"


def read_config(model: str | Path | ModelConfig) -> ModelConfig:
    """The config of a model directory, of a config.json, or of the name "v4.1-flash"."""
    if isinstance(model, ModelConfig):
        return model
    if str(model) == RELEASE:
        return ModelConfig.release()
    path = Path(model)
    if path.is_dir():
        return ModelConfig.from_dir(path)
    if path.is_file():
        return ModelConfig.from_json(config_json.load(path), where=str(path))
    raise CheckpointError(f"no model at '{model}'", where="model",
                          next=f"give a checkpoint directory, a config.json, or '{RELEASE}'")


def build_graphs(cfg: ModelConfig, limits: Limits) -> dict[str, Graph]:
    """The source graph of every phase the model has."""
    phases = PHASES if cfg.n_stages else PHASES[:2]
    graphs = {name: forward(cfg, limits, name) for name in phases}
    if cfg.n_stages:
        graphs["draft"] = draft(cfg, limits)
    return graphs


def compile(model: str | Path | ModelConfig, *, target: str = "cpu", out: str | Path | None = None,
            isa: Sequence[str] | None = None, limits: Limits | None = None,
            report: Report | None = None, jobs: int | None = None) -> Program:
    """Compile a model ahead of time.

    Args:
        model: a checkpoint directory, a config.json, "v4.1-flash", or a ModelConfig. Weights are
            not read.
        target: what to compile for; only "cpu" has all kernels.
        out: the Program's directory; default: one in the cache, named by its content key, which a
            second call finds without compiling.
        isa: ISA levels of the cpu target; default: the highest of this machine, or the one that
            DEEPINFER_CPU_ISA names.
        limits: largest sizes; default: the model's context, 2048 rows, 64 requests.
        report: called as (what, done, total) while it works.
        jobs: compilers at once; default: all cores.

    Raises:
        CheckpointError: the config is not supported. NoKernelError: the target lacks an op.
        ToolchainError: no compiler or no TileLang. TargetError: no such target or ISA level.
        ProgramError: ``out`` holds something else than a Program, or a directory cannot be written.
    """
    warn_unknown()
    cfg = read_config(model)
    limits = limits or Limits.for_model(cfg)
    chosen = load_target(target)
    levels = _levels(target, isa)
    key = content_key(cfg, limits, chosen, levels)
    path = Path(out).resolve() if out is not None else cache_dir() / "programs" / key[:32]
    try:
        found = Program.load(path)
        if found.manifest.get("key") == key:
            return found
    except ProgramError:
        artifact.check_replaceable(path)  # absent, damaged or of another version: built anew
    _make_writable(cache_dir(), "set DEEPINFER_CACHE_DIR to a directory you can write")
    _make_writable(path.parent, f"give another place than {path}")
    sources = build_graphs(cfg, limits)
    graphs = {n: lower_graph(g, chosen) for n, g in sources.items()}
    plans = {n: plan_phase(g, chosen) for n, g in graphs.items()}
    used = {s: x for p in plans.values() for s, x in instances(p.launches).items()}
    kernels = lower_kernels(used, cached_lower(chosen, cache_dir() / "lowered"), report)
    if report is not None:
        report("compiling kernels", 0, len(kernels))
    files = chosen.build(plans, kernels, {s: x.spec for s, x in used.items()}, isa=levels,
                         abi=artifact.ABI, cache=cache_dir() / "objects",
                         jobs=jobs or usable_cpus())
    if report is not None:
        report("compiling kernels", len(kernels), len(kernels))
    weights = dict.fromkeys(v for g in graphs.values() for v in g.of_kind(Kind.WEIGHT))
    unique = {v.name: v for v in weights}
    manifest = {
        "key": key, "target": target, "isa": list(levels), "model": cfg.to_json(),
        "limits": asdict(limits), "versions": {"tilelang": tilelang_version(),
                                               **chosen.versions()},
        "orders": {op.name: op.order.digest() for op in _ops(graphs)},
        "facts": facts(cfg, limits, sources),
        "cost": speculation_costs(graphs, chosen),
        "weights": weight_sources(cfg, unique.values()),
        "phases": {n: p.describe() for n, p in plans.items()},
    }
    return artifact.save(path, manifest, files | texts(list(plans.values())))


def _make_writable(directory: Path, remedy: str) -> None:
    """Find out that nothing can be written there before a minute goes into compiling."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ProgramError(f"the directory cannot be written: {error.strerror or error}",
                           where=str(directory), next=remedy) from None


def _levels(target: str, isa: Sequence[str] | str | None) -> tuple[str, ...]:
    """The ISA levels to build; only the cpu target has any, so that what is built for another
    does not depend on the machine that built it."""
    if target != "cpu":
        if isa:
            raise TargetError(f"ISA levels {isa} were given, target '{target}' has none",
                              where="isa", next="leave them out")
        return ()
    levels = default_levels() if isa is None else (isa,) if isinstance(isa, str) else tuple(isa)
    wrong = [level for level in levels if level not in ISA_LEVELS]
    if wrong or not levels:
        raise TargetError(f"no ISA level {wrong}, expected some of {', '.join(ISA_LEVELS)}",
                          where=f"target {target}", next="choose among them")
    return levels


def default_levels() -> tuple[str, ...]:
    """The ISA level to build where none is asked for: the forced one, or this machine's highest."""
    return (forced_isa() or host_levels()[-1],)


def facts(cfg: ModelConfig, limits: Limits, graphs: Mapping[str, Graph] | None = None
          ) -> dict[str, Any]:
    """What the runtime needs to know of the model; ``graphs``: its source graphs, if there are."""
    return model_facts(cfg, limits, graphs or build_graphs(cfg, limits))


def _ops(graphs: dict[str, Graph]) -> list[Any]:
    return [OPS[n] for n in sorted({x.op.name for g in graphs.values() for x in g.nodes})]


def content_key(cfg: ModelConfig, limits: Limits, target: Target, isa: Sequence[str]) -> str:
    """sha256 over all that shapes a Program: model, limits, target, tools, and our own sources."""
    parts = [json.dumps(cfg.to_json(), sort_keys=True), json.dumps(asdict(limits), sort_keys=True),
             target.name, *isa, tilelang_version(),
             *(f"{k}={v}" for k, v in sorted(target.versions().items())), source_digest(target)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def source_digest(target: Target) -> str:
    """sha256 over the sources that shape a Program of this target: an edit compiles anew, whatever
    the version says."""
    root = Path(__file__).parent
    paths = [root / "compiler.py", root / "program.py", *(root / "targets").glob("*.py")]
    for package in ("numerics", "ir", "ops", "graph", "passes", "codegen",
                    f"targets/{target.name}"):
        paths += [p for p in (root / package).rglob("*")
                  if p.suffix in (".py", ".h", ".cc", ".json")]
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


