"""Compiling: cold, and warm.

    python benchmarks/compile.py                        # `mini`; each cold compile takes a minute
    python benchmarks/compile.py --cold 3 --out compile.jsonl

Every sample is taken in a new process, since a process keeps what it has imported and lowered.
Cold: an empty cache directory. Warm: the Program is there. Nothing here fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from records import Record, Report, arguments, model_of, settle

GOALS = {"cold": 90.0, "warm": 1.0}  # seconds
# What a new process runs: the clock starts after its imports, but for those of the compiler.
COMPILE = """
import json, sys, time
import deepinfer
begin = time.perf_counter()
program = deepinfer.compile(sys.argv[1], target="cpu")
print(json.dumps({"seconds": time.perf_counter() - begin, "path": str(program.path)}))
"""
# The smoke size: the sources of one kernel.
SOURCES = """
import json, sys, tempfile, time
from pathlib import Path
from deepinfer.crosscompile import compile_ops
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import MODELS
from deepinfer.targets.base import load_target
begin, cfg = time.perf_counter(), MODELS[sys.argv[1]]()
with tempfile.TemporaryDirectory() as out:
    compile_ops(cfg, Limits.for_model(cfg), load_target("cpu"), ["silu_mul_fake_quant"], Path(out),
                binaries=False)
print(json.dumps({"seconds": time.perf_counter() - begin}))
"""


def run(script: str, args: list[str], cache: Path) -> dict[str, Any]:
    """What a script prints last, run in a process of its own with this cache directory."""
    paths = os.pathsep.join(p for p in (str(Path(__file__).parents[1]),
                                        os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run([sys.executable, "-c", script, *args], text=True, capture_output=True,
                          env={**os.environ, "DEEPINFER_CACHE_DIR": str(cache),
                               "PYTHONPATH": paths})
    if done.returncode:
        raise SystemExit(f"the measured process failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def record(what: str, params: Mapping[str, Any], samples: list[float]) -> Record:
    goal = GOALS[what]
    return Record(f"{what} seconds", params, tuple(samples), "s", {
        "goal": f"< {goal:g}", "holds": max(samples) < goal})


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="mini", help="mini, tiny or a directory")
    parser.add_argument("--cold", type=int, default=1, help="cold compiles")
    args = settle(parser.parse_args())
    if args.smoke:
        args.model = "one kernel"
    report = Report(args)
    script, given = (SOURCES, "tiny") if args.smoke else (COMPILE, str(model_of(args.model)))
    params, cold = {"model": args.model, "isa": args.isa}, list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(args.cold):
            cache = Path(scratch) / f"cache{i}"
            cold.append(run(script, [given], cache)["seconds"])
        report.add(record("cold", params, cold))
        warm = [run(script, [given], cache)["seconds"] for _ in range(args.pairs)]
        report.add(record("warm", params, warm))
    report.table(f"{args.model}: {report.machine['cpu']}, {args.isa}", (
        "what", "median", "largest", "goal", "holds"),
        [(r.name, f"{r.median:.2f}", f"{max(r.samples):.2f}", r.more["goal"], r.more["holds"])
         for r in report.records])
    report.plot([r.name for r in report.records], [r.median for r in report.records], "s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
