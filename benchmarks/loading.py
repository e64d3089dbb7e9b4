"""What loading costs: seconds, and memory against the checkpoint's bytes and the pool's.

    python benchmarks/loading.py                         # all cases, on `mini`
    python benchmarks/loading.py --case memory --out loading.jsonl

Every figure is of fresh processes, `deepinfer` imported before the clock starts; the Program is
compiled already. Packed weights go to a directory of the case in the cache, and are removed with
it. Linux only. Nothing here fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from records import Record, Report, arguments, model_of, settle

from deepinfer.settings import cache_dir

CASES: dict[str, Callable[[Run], list[Record]]] = {}
PROMPT = 2048  # tokens prefilled before memory is looked at
MARGIN = 1.15


def case(run: Callable[[Run], list[Record]]) -> Callable[[Run], list[Record]]:
    CASES[run.__name__] = run
    return run


class Run:
    """One case.

    Args:
        model: checkpoint directory. params: of its records. times: processes of a timing.
        prompt: tokens to prefill. folder: of packed weights, empty.
    """

    def __init__(self, model: Path, params: dict[str, Any], times: int, prompt: int, folder: str
                 ) -> None:
        self.model, self.params, self.times, self.prompt = model, params, times, prompt
        self.folder = folder
        self.program = self.child("compile")["program"]

    def start(self, what: str) -> subprocess.Popen[str]:
        """A process that does one of the functions below."""
        cache = {} if what == "compile" else {"DEEPINFER_CACHE_DIR": self.folder}
        program = "" if what == "compile" else self.program
        return subprocess.Popen(
            [sys.executable, __file__, "--child", what, str(self.model), program,
             str(self.params["threads"]), str(self.prompt)],
            env=os.environ | cache, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def child(self, what: str) -> dict[str, Any]:
        """What such a process reports."""
        process = self.start(what)
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"the measured process failed: {what}")
        return dict(json.loads(out.splitlines()[-1]))

    def timed(self, name: str, what: str, key: str = "seconds", goal: float | None = None
              ) -> Record:
        """Seconds of some processes, all of which must stay below the goal."""
        found = [self.child(what) for _ in range(self.times)]
        samples = tuple(f[key] for f in found)
        more = {} if goal is None else {"goal": f"< {goal:g}", "holds": max(samples) < goal}
        return Record(name, self.params, samples, "s", more | {
            n: [f[n] for f in found] for n in ("cpu_seconds", "import_seconds")})


@case
def cold(run: Run) -> list[Record]:
    """`LLM(model)` when its weights were never packed; and the most memory it takes meanwhile."""
    found = run.child("load")
    assert found["packed"]
    return [Record("cold load", run.params, (found["seconds"],), "s", {
        "most_resident": found["rss_most"]})]


@case
def warm(run: Run) -> list[Record]:
    """`LLM(model)` when its weights are packed and in the page cache; and to the first token."""
    run.child("load")
    assert not run.child("load")["packed"]
    return [run.timed("warm load", "load", goal=1.0),
            run.timed("to the first token", "first_token", "to_first_token")]


@case
def uncached(run: Run) -> list[Record]:
    """`LLM(model, cache_weights=False)`: packed in memory by every process."""
    return [run.timed("uncached load", "uncached")]


@case
def memory(run: Run) -> list[Record]:
    """Resident size after a prefill, with every weight touched: of one process, and the share of
    each of two that run at once."""
    run.child("load")
    alone = run.child("memory")
    both = [run.start("memory_held") for _ in range(2)]
    for process in both:
        process.stdout.readline()  # it holds all its memory
    shares = []
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
        shares.append(json.loads(process.stdout.readline())["pss"])
    for process in both:
        process.communicate()
    bound = MARGIN * (alone["checkpoint"] + alone["pool"])
    return [Record("resident memory", run.params, (alone["rss"],), "bytes", alone | {
                "goal": f"<= {bound:.0f}, {MARGIN} x (checkpoint + pool)",
                "holds": alone["rss"] <= bound}),
            Record("share of two processes", run.params, tuple(shares), "bytes")]


def child(what: str, model: Path, program: str, threads: int, count: int) -> None:
    """One measured process: prints its report."""
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
                  num_threads=threads, cache_weights=what != "uncached")
        report = {"packed": any("|" in name for name in packed)}
    report |= {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu,
               "import_seconds": imported, **status()}
    if what == "first_token":
        llm.generate([3, 5, 7], SamplingParams(max_tokens=1))
        report["to_first_token"] = time.perf_counter() - begin
    if what.startswith("memory"):
        prompt = [3 + i % 97 for i in range(count)]
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
    if sys.argv[1:2] == ["--child"]:
        what, model, program, threads, count = sys.argv[2:]
        child(what, Path(model), program, int(threads), int(count))
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--model", default="mini", help="mini, tiny or a directory")
    parser.add_argument("--times", type=int, default=5, help="processes of a timing")
    args = settle(parser.parse_args())
    if args.smoke:
        args.model, args.times = "tiny", 1
    report, model = Report(args), model_of(args.model)
    params = {"model": args.model, "threads": args.threads}
    for name in args.case:
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="load-") as folder:
            report.add(*CASES[name](Run(model, params, args.times, 100 if args.smoke else PROMPT,
                                        folder)))
    report.table(f"{args.model}: loading", ("what", "median", "largest", "unit", "goal", "holds"), [
        (r.name, f"{r.median:.4g}", f"{max(r.samples):.4g}", r.unit, r.more.get("goal", ""),
         r.more.get("holds", "")) for r in report.records])
    timed = [r for r in report.records if r.unit == "s"]
    report.plot([r.name for r in timed], [r.median for r in timed], "s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
