"""`deepinfer compile`: a Program in a directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.commands.output import Progress, emit, emit_json, say, size
from deepinfer.commands.targets import open_target
from deepinfer.errors import RequestError


def run(args: argparse.Namespace) -> int:
    from deepinfer.compiler import compile, read_config
    from deepinfer.graph.limits import Limits

    if args.isa is not None and args.target != "cpu":
        raise RequestError(f"--isa {','.join(args.isa)} was given for target '{args.target}'",
                           where="--isa", next="only target cpu has ISA levels")
    if args.jobs is not None and args.jobs < 1:
        raise RequestError(f"jobs is {args.jobs}, expected an int >= 1", where="--jobs",
                           next="correct it or leave it out")
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise RequestError("it is a file, expected a directory", where=f"--out {out}",
                           next="give another path")
    cfg = read_config(args.model)
    limits = Limits.for_model(cfg, max_model_len=args.max_model_len,
                              max_num_seqs=args.max_num_seqs,
                              max_num_batched_tokens=args.max_num_batched_tokens)
    open_target(args.target)
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
