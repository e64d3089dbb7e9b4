"""`deepinfer compile`: a Program in a directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.commands.output import Progress, emit, emit_json, say, size
from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from deepinfer.graph.config import ModelConfig
    from deepinfer.graph.limits import Limits
    from deepinfer.targets.base import Target


def run(args: argparse.Namespace) -> int:
    from deepinfer.compiler import compile, read_config
    from deepinfer.graph.limits import Limits
    from deepinfer.targets.base import load_target

    if args.isa is not None and args.target != "cpu":
        raise RequestError(f"--isa {','.join(args.isa)} was given for target '{args.target}'",
                           where="--isa", next="only target cpu has ISA levels")
    if args.emit is not None and not args.ops:
        raise RequestError(f"--emit {args.emit} was given without --op", where="--emit",
                           next="leave it out: a Program holds sources and binaries")
    if args.jobs is not None and args.jobs < 1:
        raise RequestError(f"jobs is {args.jobs}, expected an int >= 1", where="--jobs",
                           next="correct it or leave it out")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise RequestError("it is a file, expected a directory", where=f"--out {out}",
                           next="give another path")
    if out.resolve() == Path.cwd():
        raise RequestError("it is the current directory, which would be replaced under the shell",
                           where=f"--out {out}", next="name a new directory")
    cfg = read_config(args.model)
    limits = Limits.for_model(cfg, max_model_len=args.max_model_len,
                              max_num_seqs=args.max_num_seqs,
                              max_num_batched_tokens=args.max_num_batched_tokens)
    if args.ops:
        return _single(args, cfg, limits, load_target(args.target), out)
    with Progress() as progress:
        program = compile(cfg, target=args.target, out=out, isa=args.isa, limits=limits,
                          report=progress, jobs=args.jobs)
    nbytes = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    launches = {name: len(p.launches) for name, p in program.phases.items()}
    say(f"Program for {program.target} ({', '.join(program.manifest['isa'])}), {size(nbytes)}, "
        f"sha256 {program.digest}")
    if args.json:
        emit_json({"path": str(out), "digest": program.digest, "target": program.target,
                   "isa": list(program.manifest["isa"]), "bytes": nbytes, "launches": launches})
    else:
        emit(str(out))
    return 0


def _single(args: argparse.Namespace, cfg: ModelConfig, limits: Limits, target: Target, out: Path
            ) -> int:
    """Kernels of single ops, and what their gates said."""
    from deepinfer.crosscompile import compile_ops

    if target.name == "cpu":
        raise RequestError("--op was given for target 'cpu'", where="--op",
                           next="cpu compiles whole Programs: leave --op out")
    with Progress() as progress:
        made = compile_ops(cfg, limits, target, args.ops, out, binaries=args.emit != "source",
                           jobs=args.jobs, report=progress)
    gates = {name.removesuffix(".json").rpartition("/")[2]: json.loads((out / name).read_text())
             ["gates"] for name in made.files if name.endswith(".json")}
    if args.json:
        emit_json({"path": str(out), "target": target.name, "symbols": made.symbols,
                   "files": made.files, "gates": gates})
        return 0
    for op, symbols in made.symbols.items():
        for symbol in symbols:
            emit(f"{op}: {symbol}")
            for gate, status, detail in gates.get(symbol, ()):
                emit(f"    {gate}: {status}" + (f" ({detail})" if detail else ""))
    say(f"{len(made.files)} files in {out}")
    return 0
