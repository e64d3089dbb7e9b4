"""Mutants of a generated kernel: one synchronisation or one number changed, to test the checker.

A mutant that survives is either equivalent on the shape that was run, or a hole in the emulator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepinfer.errors import ToolchainError

# A line that matches is replaced by an empty statement.
DELETED = {
    "wait": r"\.wait\(",
    "arrive": r"^\s*\w+\[.*\]\.arrive\(\);",
    "expect_tx": r"\.expect_transaction\(",
    "arrive and expect_tx": r"arrive_and_expect_tx\(",
    "commit": r"tcgen05_mma_arrive",
    "proxy fence": r"fence_proxy_async\(",
    "barrier": r"^\s*__syncthreads\(\);",
    "after fence": r"tcgen05_after_thread_sync",
    "before fence": r"tcgen05_before_thread_sync",
    "load": r"tl::tma_load\(",
    "dealloc": r"tl::tmem_deallocate",
    "init fence": r"fence_barrier_init",
    "mma": r"tl::tcgen05mma",
    "scale copy": r"tl::tcgen05_cp",
    "tensor store": r"tcgen05_st_",
    "init": r"\.init\(",
}
# The first match in a line is replaced.
CHANGED: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "phase": (r"\.wait\((.*)\);", r".wait(((\1) ^ 1));"),
    "count": (r"\.init\((\d+)\)", lambda m: f".init({int(m[1]) + 1})"),
    "bytes": (r"((?:expect_tx|expect_transaction)\()(\d+)",
              lambda m: m[1] + str(int(m[2]) // 2)),
    "swizzle": (r"(initialize_tcgen05_descriptor\(.*), 2\);", r"\1, 4);"),
    "stride": (r"(initialize_tcgen05_descriptor\(.*), 64, 0, 0", r"\1, 32, 0, 0"),
    "coordinate": (r"(tl::tma_load\(.*), \(", r"\1, 8+("),
    "k step": (r"\((ki\w*) \* 32\)", r"(\1 * 16)"),
    "accumulate": (r"\(\(0 < (ki\w*)\) \? 1 : .*?\), static", "1, static"),
    "instruction": (r"static_cast<uint32_t>\((\(*)(\d+)",
                    lambda m: f"static_cast<uint32_t>({m[1]}{int(m[2]) ^ (1 << 13)}"),
    "tensor column": (r"(tcgen05_ld_32dp32bNx<\d+, false>\(\w+\[0\], )", r"\g<1>32+"),
    "scale id": (r"<< 29\)", "<< 30)"),
}
UNWANTED = ("prefetch",)  # lines that never matter


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text with one change; ``kind`` says which, ``line`` (1-based) and ``was`` where."""

    kind: str
    line: int
    was: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """Every single change of the kernel's body, in order of lines."""
    lines = text.splitlines()
    body = next(i for i, line in enumerate(lines) if "__launch_bounds__" in line)
    for i in range(body, len(lines)):
        line = lines[i]
        if any(word in line for word in UNWANTED):
            continue
        candidates = [(f"no {kind}", ";") for kind, pattern in DELETED.items()
                      if re.search(pattern, line)]
        candidates += [(f"wrong {kind}", re.sub(pattern, new, line, count=1))
                       for kind, (pattern, new) in CHANGED.items()]
        for kind, changed in candidates:
            if changed != line:
                yield Mutant(kind, i + 1, line.strip(),
                             "\n".join((*lines[:i], changed, *lines[i + 1:])) + "\n")


@dataclass(frozen=True, slots=True)
class Survey:
    """A mutation campaign: mutants by outcome, and the ones nobody noticed."""

    outcomes: Counter[str]
    survivors: tuple[Mutant, ...]


def survey(text: str, run: Callable[[str], str], every: int = 1) -> Survey:
    """Run every ``every``-th mutant.

    Args:
        run: text -> "" if it looks right, else how it does not; its part before ":" is counted.
    """
    outcomes: Counter[str] = Counter()
    survivors: list[Mutant] = []
    for mutant in list(mutants(text))[::every]:
        try:
            found = run(mutant.text)
        except ToolchainError:
            outcomes["does not compile"] += 1
            continue
        outcomes[found.partition(":")[0] or "survived"] += 1
        if not found:
            survivors.append(mutant)
    return Survey(outcomes, tuple(survivors))
