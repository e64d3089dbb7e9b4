"""The engine's ratios: replay, prefix hits, adaptive drafts, hidden host work.

    python benchmarks/engine.py                       # all cases
    python benchmarks/engine.py --case replay --pairs 15 --json results.jsonl

`mini` is made once (random weights, half a gigabyte); drafts and overlap run on the bundled model.
Every ratio is of interleaved pairs in one process, with a one-sided 90 % bound. Nothing here fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pairs import PAIRS, Ratio, compare, half_width

from deepinfer.graph.make_model import make_model
from deepinfer.llm import LLM
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.timeline import Timeline
from deepinfer.settings import cache_dir

CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {}


def case(run: Callable[[argparse.Namespace], dict[str, Any]]
         ) -> Callable[[argparse.Namespace], dict[str, Any]]:
    CASES[run.__name__] = run
    return run


def mini(args: argparse.Namespace) -> Path:
    """The random half-gigabyte model, made once."""
    path = Path(args.mini) if args.mini else cache_dir() / "models" / "mini"
    if not (path / "config.json").exists():
        make_model("mini", path, seed=0)
    return path


def bundled(args: argparse.Namespace) -> Path:
    from deepinfer.commands.make_model import default_model

    return Path(args.model) if args.model else default_model()


@contextmanager
def opened(model: Path, **settings: Any) -> Iterator[LLM]:
    with LLM(model, progress=False, **settings) as llm:
        yield llm


def ids(llm: LLM, count: int, seed: int = 0) -> list[int]:
    size = int(llm.program.manifest["facts"]["vocab_size"])
    return np.random.default_rng(seed).integers(3, size, count).tolist()


def prefill_seconds(llm: LLM, prompt: list[int]) -> float:
    begin = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return time.perf_counter() - begin


def _told(ratio: Ratio, goal: str, holds: bool, **more: Any) -> dict[str, Any]:
    return {"median": ratio.median, "lower": ratio.lower, "upper": ratio.upper, "goal": goal,
            "holds": holds, "a": ratio.a, "b": ratio.b,
            "pairs": len(ratio.ratios), **more}


@case
def replay(args: argparse.Namespace) -> dict[str, Any]:
    """A 2,048-token prefill with replay="compact" over one with "off"."""
    common = dict(prefix_cache="off", max_model_len=4096, max_num_seqs=4)
    with opened(mini(args), replay="off", **common) as off, \
            opened(mini(args), replay="compact", **common) as compact:
        prompt = ids(off, 2048)
        prefill_seconds(off, prompt), prefill_seconds(compact, prompt)
        ratio = compare(lambda: prefill_seconds(off, prompt),
                        lambda: prefill_seconds(compact, prompt), args.pairs)
    return _told(ratio, "<= 0.60", ratio.upper <= 0.60)


@case
def prefix_hit(args: argparse.Namespace) -> dict[str, Any]:
    """A hit of 96 % of 8,192 tokens over a cold run; and the rows it computes."""
    page, total = 128, 8192
    hit = int(total * 0.96) // page * page
    common = dict(max_model_len=8448, max_num_seqs=2)
    with opened(mini(args), prefix_cache="off", **common) as none, \
            opened(mini(args), **common) as llm:
        shared, n = ids(llm, hit), 0
        llm.generate(shared + [7], SamplingParams(max_tokens=1, temperature=0))
        rows: set[int] = set()

        def fresh() -> list[int]:
            nonlocal n
            n += 1
            return shared + ids(llm, total - hit, seed=n)

        def warm() -> float:
            before = llm.stats()
            took = prefill_seconds(llm, fresh())
            after = llm.stats()
            rows.add(after.rows - before.rows)
            assert after.hit_tokens - before.hit_tokens == hit
            return took

        ratio = compare(lambda: prefill_seconds(none, fresh()), warm, args.pairs)
    return _told(ratio, "<= 1/12", ratio.upper <= 1 / 12, hit=hit, rows=sorted(rows),
                 expected_rows=total - hit)


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Beginnings of text the model knows: sources of the standard library."""
    import inspect
    import textwrap
    modules = (argparse, json, statistics, textwrap, inspect)
    found = []
    for i in range(count):
        lines = inspect.getsource(modules[i % len(modules)]).splitlines(keepends=True)
        found.append(list(llm.encode("".join(lines[40 + 7 * i:70 + 7 * i]))))
    return found


def throughput(llm: LLM, batch: list[list[int]], count: int) -> float:
    params = [SamplingParams(max_tokens=count, temperature=1.0, seed=i, ignore_eos=True)
              for i in range(len(batch))]
    begin = time.perf_counter()
    outputs = llm.generate(batch, params)
    return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begin)


@case
def adaptive(args: argparse.Namespace) -> dict[str, Any]:
    """Throughput with adaptive drafts over fixed 5, at batch 1 and 16; drafts verified."""
    found: dict[str, Any] = {}
    common = dict(prefix_cache="off", max_num_seqs=16)
    model = bundled(args)
    with opened(model, draft="fixed", **common) as fixed, \
            opened(model, draft="adaptive", **common) as adapted:
        for size, goal in ((1, 0.97), (16, 1.04)):
            batch = prompts(fixed, size)
            throughput(fixed, batch, 32), throughput(adapted, batch, 32)
            before = fixed.stats().verified, adapted.stats().verified
            ratio = compare(partial(throughput, fixed, batch, args.tokens),
                            partial(throughput, adapted, batch, args.tokens), args.pairs)
            drafts = (adapted.stats().verified - before[1]) / (fixed.stats().verified - before[0])
            found[f"batch_{size}"] = _told(ratio, f">= {goal}", ratio.lower >= goal,
                                           drafts_verified=drafts)
    return found


@case
def overlap(args: argparse.Namespace) -> dict[str, Any]:
    """The share of host work that runs while the device works, at batch 16."""
    shares = []
    with opened(bundled(args), prefix_cache="off", max_num_seqs=16) as llm:
        batch = prompts(llm, 16)
        throughput(llm, batch, 16)
        for _ in range(args.pairs):
            llm.engine.timeline = Timeline()
            throughput(llm, batch, 4 * args.tokens)
            shares.append(llm.engine.timeline.hidden())
    lower = statistics.fmean(shares) - half_width(shares)
    return {"hidden": statistics.median(shares), "lower": lower, "least": min(shares),
            "goal": ">= 0.70", "holds": lower >= 0.70}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--tokens", type=int, default=64, help="generated per request")
    parser.add_argument("--mini", help="directory of the mini model")
    parser.add_argument("--model", help="directory of the model for drafts; default: the bundled")
    parser.add_argument("--json", type=Path, help="append results here, one JSON object a line")
    args = parser.parse_args()
    for name in args.case or CASES:
        result = {"case": name, **CASES[name](args)}
        print(json.dumps(result, indent=2))
        sys.stdout.flush()
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
