"""This machine's own ceilings, with the threads and at the sizes that kernels are measured at.

    python benchmarks/ceilings.py
    python benchmarks/ceilings.py --bytes 4194304 --matmul 256x1024x1024 --out ceilings.jsonl

Arithmetic in registers (fp32 FMA of the ISA level; bf16 tiles where there is AMX), reading memory,
starting a launch, and torch's matmuls as peers. Caches are large, so a bandwidth belongs to a
number of bytes: "cold" reads copies in turns that together exceed the last cache twice, "warm"
the same bytes every time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from records import REST, Record, Report, arguments, settle

from autotune.clock import Clock
from autotune.keys import Policy, last_level_bytes

BYTES = (1 << 18, 1 << 21, 1 << 24, 1 << 27)
MATMULS = ((1, 1024, 1024), (16, 1024, 1024), (256, 1024, 1024), (2048, 1024, 2048))  # M, N, K


def policy(cold: bool = True, seconds: float = 0.3) -> Policy:
    """Cold: weights come from memory, as in a step of a model."""
    return Policy(seconds=seconds, cold_bytes=2 * last_level_bytes() if cold else 0)


WARM = Policy().warm_seconds


def matmul_seconds(m: int, n: int, k: int, dtype: str, threads: int, cold_bytes: int
                   ) -> Callable[[], float]:
    """Makes ``x[M,K] @ w[N,K].T`` of torch; what is returned runs it a few times on weights in
    turns and gives the median time of one run."""
    import torch

    torch.set_num_threads(threads)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    each = n * k * kind.itemsize
    first = torch.randn(n, k).to(kind)
    weights = [first, *(first.clone() for _ in range(cold_bytes // each))]
    x, at = torch.randn(m, k).to(kind), 0

    def measure(repeats: int = 5) -> float:
        nonlocal at
        took = []
        time.sleep(REST)
        with torch.inference_mode():
            start = time.perf_counter()
            while len(took) < repeats:
                weight = weights[at % len(weights)]
                at += 1
                begin = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                if begin - start > WARM:  # as the clock warms up for kernels
                    took.append(time.perf_counter() - begin)
        time.sleep(REST)
        return statistics.median(took)

    return measure


def measure(clock: Clock, repeats: int, sizes: tuple[int, ...]) -> list[Record]:
    """The machine's own ceilings as records; samples are single runs, in GFLOP/s, GB/s and us."""
    made = []
    for unit in ("fma", "amx"):
        operations, times = clock.multiply_adds(unit, policy(), repeats)
        if operations:
            made.append(Record("ceiling", {"what": unit, "threads": clock.threads},
                               tuple(operations / t for t in times), "GFLOP/s"))
    for size in sizes:
        for cold in (True, False):
            nbytes, times = clock.reads(size, policy(cold), repeats)
            made.append(Record("ceiling", {"what": "read", "bytes": nbytes, "threads":
                                           clock.threads, "from": "cold" if cold else "warm"},
                               tuple(nbytes / t for t in times), "GB/s"))
    times = clock.launches(policy(False), 50 * repeats)
    made.append(Record("ceiling", {"what": "launch", "threads": clock.threads},
                       tuple(t / 1000 for t in times), "us"))
    return made


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--bytes", type=int, action="append", help="to read; may be repeated")
    parser.add_argument("--matmul", action="append", metavar="MxNxK", help="of torch")
    args = settle(parser.parse_args())
    report, repeats = Report(args), 2 if args.smoke else 25
    sizes = tuple(args.bytes or (BYTES[:1] if args.smoke else BYTES))
    shapes = ([tuple(int(d) for d in s.split("x")) for s in args.matmul] if args.matmul
              else [(4, 64, 64)] if args.smoke else MATMULS)
    clock = Clock(args.isa, args.threads)
    report.add(*measure(clock, repeats, sizes))
    clock.close()
    cold = 0 if args.smoke else 2 * last_level_bytes()
    for m, n, k in shapes:
        for dtype in ("bf16", "fp32"):
            run = matmul_seconds(m, n, k, dtype, args.threads, cold)
            taken = [run() for _ in range(args.pairs)]
            report.add(Record("peer matmul", {"M": m, "N": n, "K": k, "dtype": dtype, "threads":
                                              args.threads, "by": "torch"},
                              tuple(2e-9 * m * n * k / t for t in taken), "GFLOP/s"))
    names = [", ".join(f"{k}={v}" for k, v in r.params.items() if k != "threads")
             for r in report.records]
    report.table(f"ceilings: {report.machine['cpu']}, {args.isa}, {args.threads} threads",
                 ("what", "median", "best", "unit"),
                 [(f"{r.name}: {n}", f"{r.median:.2f}",
                   f"{(max if r.better == 'higher' else min)(r.samples):.2f}", r.unit)
                  for n, r in zip(names, report.records, strict=True)])
    rates = [(n, r) for n, r in zip(names, report.records, strict=True) if r.unit == "GFLOP/s"]
    report.plot([n for n, _ in rates], [r.median for _, r in rates], "GFLOP/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
