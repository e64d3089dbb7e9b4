"""The engine's ratios: replay, prefix hits, adaptive drafts, hidden host work.

    python benchmarks/engine.py                       # all cases
    python benchmarks/engine.py --case replay --pairs 15 --out results.jsonl

`mini` is made once (random weights, half a gigabyte); drafts and overlap run on the bundled model.
Every ratio is of interleaved pairs in one process, with a one-sided 90 % bound. Nothing here fails.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from driver import prefill_seconds, prompt_ids
from pairs import compare, half_width
from records import Goal, Record, Report, arguments, model_of, ratio_record, settle, shown

from deepinfer.llm import LLM
from deepinfer.runtime.params import SamplingParams
from deepinfer.runtime.timeline import Timeline

Case = Callable[[argparse.Namespace], Iterator[Record]]
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


def bundled(args: argparse.Namespace) -> Path:
    from deepinfer.commands.make_model import default_model

    return Path(args.model) if args.model else default_model()


@contextmanager
def opened(args: argparse.Namespace, model: Path, **settings: Any) -> Iterator[LLM]:
    with LLM(model, progress=False, num_threads=args.threads, **settings) as llm:
        yield llm


@case
def replay(args: argparse.Namespace) -> Iterator[Record]:
    """A prefill of --prompt tokens with replay="compact" over one with "off"."""
    common = dict(prefix_cache="off", max_model_len=2 * args.prompt, max_num_seqs=4)
    model = model_of(args.mini)
    with opened(args, model, replay="off", **common) as off, \
            opened(args, model, replay="compact", **common) as compact:
        prompt = [prompt_ids(off, args.prompt)]
        prefill_seconds(off, prompt), prefill_seconds(compact, prompt)
        ratio = compare(lambda: prefill_seconds(off, prompt),
                        lambda: prefill_seconds(compact, prompt), args.pairs)
    yield ratio_record("replay", {"prompt": args.prompt, "threads": args.threads}, ratio,
                       Goal(most=0.60), off=ratio.a, compact=ratio.b)


@case
def prefix_hit(args: argparse.Namespace) -> Iterator[Record]:
    """A hit of 96 % of four prompts' length over a cold run; and the rows it computes."""
    page, total = 128, 4 * args.prompt
    hit = max(page, int(total * 0.96) // page * page)
    common = dict(max_model_len=total + page // 2, max_num_seqs=2)
    model = model_of(args.mini)
    with opened(args, model, prefix_cache="off", **common) as none, \
            opened(args, model, **common) as llm:
        shared, n = prompt_ids(llm, hit), 0
        prefill_seconds(llm, [shared + [7]])
        rows: set[int] = set()

        def fresh() -> list[list[int]]:
            nonlocal n
            n += 1
            return [shared + prompt_ids(llm, total - hit, seed=n)]

        def warm() -> float:
            before = llm.stats()
            took = prefill_seconds(llm, fresh())
            after = llm.stats()
            rows.add(after.rows - before.rows)
            assert after.hit_tokens - before.hit_tokens == hit
            return took

        ratio = compare(lambda: prefill_seconds(none, fresh()), warm, args.pairs)
    yield ratio_record("prefix hit", {"tokens": total, "hit": hit, "threads": args.threads}, ratio,
                       Goal(most=1 / 12), rows=sorted(rows), expected_rows=total - hit)


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Beginnings of text the model knows: sources of the standard library."""
    modules = (argparse, json, statistics, textwrap, inspect)
    found = []
    for i in range(count):
        lines = inspect.getsource(modules[i % len(modules)]).splitlines(keepends=True)
        ids = list(llm.encode("".join(lines[40 + 7 * i:70 + 7 * i])))
        found.append(ids[:llm.engine.max_model_len // 2])
    return found


def throughput(llm: LLM, batch: list[list[int]], count: int) -> float:
    params = [SamplingParams(max_tokens=count, temperature=1.0, seed=i, ignore_eos=True)
              for i in range(len(batch))]
    begin = time.perf_counter()
    outputs = llm.generate(batch, params)
    return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begin)


@case
def adaptive(args: argparse.Namespace) -> Iterator[Record]:
    """Throughput with adaptive drafts over fixed 5, at batch 1 and 16; drafts verified."""
    common = dict(prefix_cache="off", max_num_seqs=16)
    model = bundled(args)
    with opened(args, model, draft="fixed", **common) as fixed, \
            opened(args, model, draft="adaptive", **common) as adapted:
        for size, goal in ((1, 0.97), (16, 1.04)):
            batch = prompts(fixed, size)
            throughput(fixed, batch, args.tokens // 2), throughput(adapted, batch, args.tokens // 2)
            before = fixed.stats().verified, adapted.stats().verified
            ratio = compare(partial(throughput, fixed, batch, args.tokens),
                            partial(throughput, adapted, batch, args.tokens), args.pairs)
            drafts = (adapted.stats().verified - before[1]) / (fixed.stats().verified - before[0])
            yield ratio_record("adaptive drafts", {"batch": size, "threads": args.threads}, ratio,
                               Goal(goal), drafts_verified=drafts)


@case
def overlap(args: argparse.Namespace) -> Iterator[Record]:
    """The share of host work that runs while the device works, at batch 16."""
    shares = []
    with opened(args, bundled(args), prefix_cache="off", max_num_seqs=16) as llm:
        batch = prompts(llm, 16)
        throughput(llm, batch, args.tokens // 4)
        for _ in range(args.pairs):
            llm.engine.timeline = Timeline()
            throughput(llm, batch, 4 * args.tokens)
            shares.append(llm.engine.timeline.hidden())
    lower = statistics.fmean(shares) - half_width(shares)
    yield Record("hidden host work", {"batch": 16, "threads": args.threads}, tuple(shares),
                 "ratio", {"median": statistics.median(shares), "lower": lower,
                           "upper": max(shares), "goal": ">= 0.70", "holds": lower >= 0.70})


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--tokens", type=int, default=64, help="generated per request")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill")
    parser.add_argument("--mini", default="mini", help="mini, tiny or a directory")
    parser.add_argument("--model", help="directory of the model for drafts; default: the bundled")
    args = settle(parser.parse_args())
    if args.smoke:
        args.mini, args.prompt, args.tokens = "tiny", 40, 4
        args.model = args.model or str(model_of("tiny"))
    report = Report(args)
    for name in args.case:
        for record in CASES[name](args):
            report.add(record)
    report.table("the engine's ratios", ("what", "ratio [90 % bound]", "more"), [
        (f"{r.name}: " + ", ".join(f"{k}={v}" for k, v in r.params.items()), shown(r.more),
         ", ".join(f"{k} {v}" for k, v in r.more.items() if k not in (
             "median", "lower", "upper", "goal", "holds", "pairs"))) for r in report.records])
    report.plot([r.name for r in report.records], [r.median for r in report.records], "ratio")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
