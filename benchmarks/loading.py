"""What loading costs: seconds, and memory against the checkpoint's bytes and the pool's.

    python benchmarks/loading.py                         # all cases, on `mini`
    python benchmarks/loading.py --case memory --json results.jsonl

Every figure is of fresh processes, `deepinfer` imported before the clock starts; the Program is
compiled already. `mini` is made once (random weights, half a gigabyte). Packed weights go to a
directory of the case in the cache, and are removed with it. Linux only. Nothing here fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES: dict[str, Callable[[Run], dict[str, Any]]] = {}
PROMPT = 2048  # tokens prefilled before memory is looked at
MARGIN = 1.15


def case(run: Callable[[Run], dict[str, Any]]) -> Callable[[Run], dict[str, Any]]:
    CASES[run.__name__] = run
    return run


class Run:
    """One case. Args: model: checkpoint directory. times: processes of a timing. folder: of packed
    weights, empty."""

    def __init__(self, model: Path, times: int, folder: str) -> None:
        self.model, self.times, self.folder = model, times, folder
        self.program = self.child("compile")["program"]

    def start(self, what: str) -> subprocess.Popen[str]:
        """A process that does one of the functions below."""
        cache = {} if what == "compile" else {"DEEPINFER_CACHE_DIR": self.folder}
        program = "" if what == "compile" else self.program
        return subprocess.Popen(
            [sys.executable, __file__, "--child", what, str(self.model), program],
            env=os.environ | cache, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def child(self, what: str) -> dict[str, Any]:
        """What such a process reports."""
        out, _ = self.start(what).communicate()
        return dict(json.loads(out.splitlines()[-1]))

    def timed(self, what: str, name: str = "seconds") -> dict[str, Any]:
        """Medians over some processes, and the longest time."""
        found = [self.child(what) for _ in range(self.times)]
        median = {n: statistics.median(f[n] for f in found)
                  for n in (name, "cpu_seconds", "import_seconds")}
        return median | {"most": max(f[name] for f in found), "processes": self.times}


@case
def warm_compile(run: Run) -> dict[str, Any]:
    """`deepinfer.compile` of a model whose Program is in the cache."""
    found = run.timed("compile")
    return found | {"goal": "< 1 s", "holds": found["most"] < 1}


@case
def cold_load(run: Run) -> dict[str, Any]:
    """`LLM(model)` when its weights were never packed; and the most memory it takes meanwhile."""
    found = run.child("load")
    assert found.pop("packed")
    return found


@case
def warm_load(run: Run) -> dict[str, Any]:
    """`LLM(model)` when its weights are packed and in the page cache; and to the first token."""
    run.child("load")
    assert not run.child("load")["packed"]
    found = run.timed("load")
    first = run.timed("first_token", "to_first_token")
    return found | {"goal": "< 1 s", "holds": found["most"] < 1,
                    "to_first_token": first["to_first_token"]}


@case
def uncached_load(run: Run) -> dict[str, Any]:
    """`LLM(model, cache_weights=False)`: packed in memory by every process."""
    return run.timed("uncached")


@case
def memory(run: Run) -> dict[str, Any]:
    """Resident size after a prefill, with every weight touched: of one process, and shared by two
    that run at once."""
    run.child("load")
    alone = run.child("memory")
    both = [run.start("memory_held") for _ in range(2)]
    for process in both:
        process.stdout.readline()  # it holds all its memory
    reports = []
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
        reports.append(json.loads(process.stdout.readline()))
    for process in both:
        process.communicate()
    bound = MARGIN * (alone["checkpoint"] + alone["pool"])
    return alone | {"bound": int(bound), "goal": "rss <= 1.15 * (checkpoint + pool)",
                    "holds": alone["rss"] <= bound,
                    "over_checkpoint_and_touched_pool": alone["rss"] / (
                        alone["checkpoint"] + alone["pool_touched"]),
                    "pss_of_two": [r["pss"] for r in reports]}


def child(what: str, model: Path, program: str) -> None:
    begin = time.perf_counter()
    import deepinfer
    from deepinfer import LLM
    from deepinfer.runtime import weights
    from deepinfer.runtime.params import SamplingParams

    compile = deepinfer.compile  # imports it now, not while the clock runs
    imported, base = time.perf_counter() - begin, status()
    packed: list[str] = []
    weights._make = noted(weights._make, packed)
    begin, cpu = time.perf_counter(), time.process_time()
    if what == "compile":
        report: dict[str, Any] = {"program": str(compile(model).path)}
    else:
        llm = LLM(model, program=program, progress=False, prefix_cache="off",
                  cache_weights=what != "uncached")
        report = {"packed": any("|" in name for name in packed)}
    report |= {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu,
               "import_seconds": imported, **status()}
    if what == "first_token":
        llm.generate([3, 5, 7], SamplingParams(max_tokens=1))
        report["to_first_token"] = time.perf_counter() - begin
    if what.startswith("memory"):
        prompt = [3 + i % 97 for i in range(PROMPT)]
        llm.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True))
        report |= sizes(llm, model) | {"rss_imported": base["rss"]}
    if what == "memory_held":
        print("held", flush=True)
        sys.stdin.readline()
        report |= status()
        print(json.dumps(report), flush=True)
        sys.stdin.readline()  # until the other one has looked, too
    else:
        print(json.dumps(report))


def noted(real: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """The same function; the names it is called with are kept."""

    def make(name: str, *args: Any) -> Any:
        names.append(name)
        return real(name, *args)

    return make


def sizes(llm: Any, model: Path) -> dict[str, int]:
    """Bytes of the parts; every page of the weights is touched first."""
    device = llm.engine.device
    weights = device._weights.values()
    for array in weights:
        array.reshape(-1).view("u1")[::4096].max(initial=0)
    return {"checkpoint": sum(f.stat().st_size for f in model.glob("*.safetensors")),
            "weights": sum(a.nbytes for a in weights),
            "pool": sum(a.nbytes for a in device.state.values()),
            "pool_touched": touched(device.state.values()),
            "arena": device._arena.nbytes, "arena_touched": touched([device._arena]), **status()}


def touched(arrays: Any) -> int:
    """Resident bytes of the mappings that hold these arrays."""
    spans = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
    total, wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(x, 16) for x in first.split("-"))
            wanted = any(b < end and begin < e for b, e in spans)
        elif wanted and first == "Rss:":
            total += int(rest[0]) * 1024
    return total


def status() -> dict[str, int]:
    """Resident bytes now and at most, and this process's share of what it shares."""
    found = {}
    for file, names in (("status", {"VmRSS:": "rss", "VmHWM:": "rss_most", "RssAnon:": "anonymous",
                                    "RssFile:": "mapped"}),
                        ("smaps_rollup", {"Pss:": "pss"})):
        for line in Path("/proc/self", file).read_text().splitlines():
            first, *rest = line.split()
            if first in names:
                found[names[first]] = int(rest[0]) * 1024
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--times", type=int, default=5, help="processes of a timing")
    parser.add_argument("--mini", help="directory of the mini model")
    parser.add_argument("--json", type=Path, help="append results here, one JSON object a line")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), args.child[2])
        return 0
    from engine import mini

    from deepinfer.settings import cache_dir

    model = mini(args)
    cache_dir().mkdir(parents=True, exist_ok=True)
    for name in args.case or CASES:
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="load-") as folder:
            result = {"case": name, **CASES[name](Run(model, args.times, folder))}
        print(json.dumps(result, indent=2), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
