"""Prefill and decode of a whole model: tokens/s, fractions of rooflines, ratios to PyTorch.

    python benchmarks/serving.py                                 # all cases on `mini`
    python benchmarks/serving.py --case decode --batch 1 16 --out serving.jsonl --plot serving.png
    python benchmarks/serving.py --case peers --peer eager --pairs 15

`mini` (random weights, half a gigabyte) is made once. The peer is the training module of
`examples/tiny_model` with the same weights in bf16, as a decoder with caches (peer.py). Every ratio
is of interleaved pairs in one process, with a one-sided 90 % bound. Nothing here fails.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ceilings import matmul_seconds, policy
from driver import Decoding, native_seconds, prefill_seconds, prompt_ids
from pairs import Ratio, compare
from records import (
    REST,
    Goal,
    Record,
    Report,
    arguments,
    model_of,
    ratio_record,
    settle,
    shown,
)
from traffic import Step, source_graph, traffic

from autotune.clock import Clock
from deepinfer.codegen.emit import lower_graph
from deepinfer.codegen.select import select
from deepinfer.llm import LLM
from deepinfer.program import Program
from deepinfer.targets.base import load_target

Case = Callable[[argparse.Namespace], Iterator[Record]]
CASES: dict[str, Case] = {}
MATMUL = (2048, 2048, 1024)  # M, N, K of the matmul whose rate is torch's peak
STEPS = 4  # of decode behind one sample
REPEATS = 5


def case(run: Case) -> Case:
    CASES[run.__name__] = run
    return run


@contextmanager
def opened(args: argparse.Namespace, model: Path | None = None, **settings: Any) -> Iterator[LLM]:
    """The model, with one Program for all cases, without drafts and without a prefix cache."""
    common = dict(draft="off", prefix_cache="off", max_num_seqs=16, num_threads=args.threads,
                  max_model_len=args.length, progress=False)
    with LLM(model or model_of(args.model), **common | settings) as llm:
        yield llm


def params_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    return {"model": Path(args.model).name, "threads": args.threads, **more}


@case
def decode(args: argparse.Namespace) -> Iterator[Record]:
    """Tokens/s by batch and context, against what the bytes it must read and the bandwidth allow;
    experts that a step meets are counted in the run. ``allowed`` is the fraction that is left of
    the goal's roofline where the step's operations take longer, at the peak of fp32."""
    clock = Clock(args.isa, args.threads)
    operations, times = clock.multiply_adds("fma", policy(not args.smoke), REPEATS)
    peak = operations / (statistics.median(times) * 1e-9)
    with opened(args) as llm:
        graph = source_graph(llm.program, "decode")
        page = int(llm.program.manifest["limits"]["page_size"])
        for batch in args.batch:
            for context in args.context:
                running = Decoding(llm, [prompt_ids(llm, context, i) for i in range(batch)])
                experts = running.experts(STEPS)
                must = traffic(graph, Step(batch, batch, running.context, experts, page))
                took: list[float] = []

                def step(running: Decoding = running, took: list[float] = took) -> float:
                    took.append(statistics.median(running.run(STEPS)))
                    return took[-1]

                def read(nbytes: int = int(must.nbytes)) -> float:
                    got, times = clock.reads(nbytes, policy(not args.smoke), REPEATS)
                    return statistics.median(times) * 1e-9 * nbytes / got

                ratio = compare(step, read, args.pairs)
                running.close()
                params = params_of(args, batch=batch, context=context)
                yield Record("decode", params, tuple(batch / t for t in took), "tokens/s", {
                    "bytes": must.nbytes, "bytes/token": must.nbytes / batch,
                    "experts": statistics.fmean(experts.values()) if experts else None})
                yield ratio_record("decode roofline", params, ratio, Goal(0.7),
                                   bandwidth=must.nbytes / ratio.b / 1e9, flops=must.flops,
                                   allowed=min(1.0, ratio.b * peak / must.flops))
    clock.close()


@case
def prefill(args: argparse.Namespace) -> Iterator[Record]:
    """Tokens/s of one prompt, against the model's operations at the peak of arithmetic: of torch's
    bf16 matmul with AMX, else of fp32 multiply-adds."""
    clock = Clock(args.isa, args.threads)
    count = args.prompt
    m, n, k = (8, 32, 32) if args.smoke else MATMUL
    torch_bf16 = matmul_seconds(m, n, k, "bf16", args.threads, 0)
    with opened(args) as llm:
        graph = source_graph(llm.program, "prefill")
        flops = traffic(graph, Step(count, 1, count)).flops
        prompt, took = prompt_ids(llm, count), list[float]()

        def run() -> float:
            took.append(prefill_seconds(llm, [prompt]))
            return took[-1]

        def fma() -> float:
            operations, times = clock.multiply_adds("fma", policy(), REPEATS)
            return statistics.median(times) * 1e-9 * flops / operations

        run()
        took.clear()
        peaks = {"fma": fma, "torch bf16": lambda: torch_bf16() * flops / (2 * m * n * k)}
        goal_of = "torch bf16" if args.isa == "amx" else "fma"
        params = params_of(args, prompt=count)
        ratios = [ratio_record("prefill roofline", params | {"over": name}, ratio,
                               Goal(0.5) if name == goal_of else None,
                               peak=flops / ratio.b / 1e9)
                  for name, peak in peaks.items() for ratio in [compare(run, peak, args.pairs)]]
    clock.close()
    yield Record("prefill", params, tuple(count / t for t in took), "tokens/s",
                 {"flops": flops, "GFLOP/s": flops / statistics.median(took) / 1e9})
    yield from ratios


@case
def peers(args: argparse.Namespace) -> Iterator[Record]:
    """Prefill and decode against the PyTorch module, eager and compiled, by batch; and the share
    of greedy tokens on which both agree when fed the same text."""
    import torch
    from peer import Peer, load_peer

    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.peer_dtype]
    made = {kind: Peer(load_peer(model_of(args.model), dtype), args.length,
                       compiled=kind == "compiled") for kind in args.peer}
    with opened(args) as llm:
        for batch in args.batch:
            each = max(8, args.peer_prompt // batch)
            prompts = [prompt_ids(llm, each, i) for i in range(batch)]
            for kind, peer in made.items():
                params = params_of(args, batch=batch, prompt=each, peer=kind,
                                   dtype=args.peer_dtype)
                try:
                    yield from against(llm, peer, prompts, params, args)
                except torch._dynamo.exc.TorchDynamoException as error:
                    # torch's compiler failed, which is the peer's result: the others go on.
                    print(f"peer {kind}, batch {batch}: {str(error)[:300]}", file=sys.stderr)


def against(llm: LLM, peer: Any, prompts: list[list[int]], params: dict[str, Any],
            args: argparse.Namespace) -> Iterator[Record]:
    """One peer at one batch."""
    goal, count = Goal(6.0), len(prompts)
    running = Decoding(llm, prompts)
    running.run(STEPS)
    texts = [running.tokens[i] for i in running.ids]
    logits, agreed = [peer.prefill(prompts)], 0
    logits += [peer.decode([t[i] for t in texts]) for i in range(STEPS - 1)]
    for i, found in enumerate(logits):
        agreed += sum(int(row.argmax()) == t[i] for row, t in zip(found, texts, strict=True))
    share = agreed / (STEPS * count)

    took: list[float] = []

    def decode_peer() -> float:
        begin = time.perf_counter()
        peer.decode([t[-1] for t in texts])
        took.append(time.perf_counter() - begin)
        return took[-1]

    def decode_ours() -> float:
        time.sleep(REST)
        return statistics.median(running.run(STEPS))

    decode_peer()  # compiles
    took.clear()
    ratio = compare(decode_ours, decode_peer, args.pairs)
    running.close()
    yield Record("peer decode", params, tuple(count / t for t in took), "tokens/s",
                 {"agreement": share})
    yield ratio_record("decode over peer", params, ratio, goal, ours=count / ratio.a,
                       peer=count / ratio.b, agreement=share)

    def prefill_peer() -> float:
        begin = time.perf_counter()
        peer.prefill(prompts)
        return time.perf_counter() - begin

    prefill_peer(), prefill_seconds(llm, prompts)

    def prefill_ours() -> float:
        time.sleep(REST)
        return prefill_seconds(llm, prompts)

    ratio = compare(prefill_ours, prefill_peer, args.pairs)
    tokens = count * len(prompts[0])
    yield ratio_record("prefill over peer", params, ratio, goal, ours=tokens / ratio.a,
                       peer=tokens / ratio.b)


def decode_items(program: Program) -> list[int]:
    """Into how many items each launch of a decode step of one request may be cut."""
    target = load_target("cpu")
    lowered = lower_graph(source_graph(program, "decode"), target)
    return [-(-e.mul // e.div) for e in (launch.extent for launch in select(lowered, target))]


@case
def overhead(args: argparse.Namespace) -> Iterator[Record]:
    """Python and launches in a decode step at batch 1: the step without its native call, and as
    many empty launches as the step has: on all threads, or on the caller alone where there is one
    item. On the model, and on the bundled one; with overlap and without, because host work beside
    a call still takes its processor from the threads of a pool that has one on each."""
    from deepinfer.commands.make_model import default_model

    empty: dict[bool, float] = {}  # seconds, by whether all threads take part
    for shared, threads in ((False, 1), (True, args.threads)):
        clock = Clock(args.isa, threads)
        empty[shared] = statistics.median(clock.launches(policy(False), 200)) * 1e-9
        clock.close()
    models = [(model_of(args.model), Path(args.model).name)]
    if not args.smoke:
        models.append((default_model(), "bundled"))
    for (path, name), overlap in itertools.product(models, (True, False)):
        with opened(args, path, max_model_len=min(args.length, 1024), overlap=overlap) as llm:
            running = Decoding(llm, [prompt_ids(llm, 32)])
            running.run(STEPS)
            walls, natives = list[float](), list[float]()
            with native_seconds(llm) as spent:
                for _ in range(4 * args.pairs):
                    before = spent()
                    walls += running.run(1)
                    natives.append(spent() - before)
            running.close()
            split = [items > 1 for items in decode_items(llm.program)]
            launches = sum(map(empty.__getitem__, split))
        python = [w - n for w, n in zip(walls, natives, strict=True)]
        shares = [(p + launches) / w for p, w in zip(python, walls, strict=True)]
        params = {"model": name, "threads": args.threads, "overlap": overlap}
        total = statistics.median(python) + launches
        bound = Ratio(tuple(shares), 1.0, statistics.median(shares))
        goal = ({"goal": "<= 150", "holds": total <= 150e-6, "median": 1e6 * total,
                 "upper": 1e6 * total} if name == "bundled" and overlap else {})
        yield Record("overhead", params, tuple(1e6 * (p + launches) for p in python), "us",
                     {"launches_us": 1e6 * launches, "launches": len(split),
                      "shared": sum(split), "step_us": 1e6 * statistics.median(walls)
                      } | goal)
        yield ratio_record("overhead share", params, bound,
                           Goal(most=0.05) if name != "bundled" and overlap else None)


@case
def scaling(args: argparse.Namespace) -> Iterator[Record]:
    """Prefill on one thread over prefill on two."""
    with opened(args, num_threads=1) as one, opened(args, num_threads=2) as two:
        prompt = prompt_ids(one, args.prompt)
        prefill_seconds(one, [prompt]), prefill_seconds(two, [prompt])
        ratio = compare(lambda: prefill_seconds(two, [prompt]),
                        lambda: prefill_seconds(one, [prompt]), args.pairs)
    yield ratio_record("two threads", params_of(args, prompt=args.prompt) | {"threads": 2}, ratio,
                       Goal(1.8), one=args.prompt / ratio.b, two=args.prompt / ratio.a)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--model", default="mini", help="mini, tiny or a directory")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill")
    parser.add_argument("--length", type=int, default=4096, help="the Program's max_model_len")
    parser.add_argument("--peer", nargs="+", choices=("eager", "compiled"),
                        default=["eager", "compiled"])
    parser.add_argument("--peer-prompt", type=int, default=512,
                        help="tokens of all prompts together, where the peer takes part")
    parser.add_argument("--peer-dtype", choices=("bf16", "fp32"), default="bf16")
    args = settle(parser.parse_args())
    if args.smoke:
        args.model, args.batch, args.context = "tiny", [1, 2], [8]
        args.prompt, args.length, args.peer_prompt, args.peer = 24, 128, 32, ["eager"]
    report = Report(args)
    for name in args.case:
        for record in CASES[name](args):
            report.add(record)
    report.table(
        f"{args.model}: {report.machine['cpu']}, {args.isa}, {args.threads} threads",
        ("what", "median", "unit", "ratio [90 % bound]", "more"),
        [(f"{r.name}: " + ", ".join(f"{k}={v}" for k, v in r.params.items()
                                    if k not in ("threads", "model")),
          f"{r.median:.4g}", r.unit, shown(r.more) if r.unit == "ratio" else "-",
          ", ".join(f"{k} {v:.4g}" for k, v in r.more.items() if isinstance(v, float)
                    and k not in ("median", "lower", "upper"))) for r in report.records])
    ratios = [r for r in report.records if r.unit == "ratio"]
    report.plot([f"{r.name} {'/'.join(map(str, r.params.values()))}" for r in ratios],
                [r.median for r in ratios], "ratio")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
