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
    "wait": r"^\s*asc_sync_wait\(",
    "notify": r"^\s*asc_sync_notify\(",
    "cross-core wait": r"^\s*asc_sync_intra_wait\(",
    "cross-core arrive": r"^\s*asc_sync_intra_arrive\(",
    "thread barrier": r"^\s*asc_syncthreads\(\);",
    "load": r"^\s*asc_copy_gm2",
    "staging copy": r"^\s*asc_copy_ub2l1\(",
    "store": r"^\s*asc_copy_(ub2gm_align|l0c2gm|l0c2ub)\(",
    "product": r"^\s*ascend_\w*gemm_l1<",
    "vector function": r"^\s*asc_vf_call<",
}
# (pattern, replacement): the first match in a line is changed.
CHANGED: dict[str, tuple[str, str | Callable[[re.Match[str]], str]]] = {
    "event": (r"static_cast<event_t>\((.*)\)\);", r"static_cast<event_t>(\1 ^ 1));"),
    "flag": (r"(asc_sync_intra_\w+\(PIPE_\w+, )(.*)\);", r"\1\2 ^ 1);"),
    "pipe": (r"(asc_sync_(?:notify|wait)\()PIPE_MTE3, PIPE_V", r"\1PIPE_MTE2, PIPE_V"),
    "destination": (r"(asc_copy_\w+\(\(__\w+__ \w+\*\)\(\(&\(.*?)\)\]\)", r"\1 + 64)])"),
    "L1 offset": (r"(asc_copy_ub2l1\(\(__cbuf__ void\*\)\(.*?\w+) \+ \(", r"\1 + (512 + "),
    "source gap": (r"(asc_copy_ub2l1\(.*, (?:[2-9]|\d\d+), \d+), 1, (\d+)\);", r"\1, 0, \2);"),
    "NZ stride": (r"(asc_set_gm2l1_nz_para\(1, 1, static_cast<uint16_t>\()(\d+)",
                  lambda m: f"{m[1]}{max(1, int(m[2]) // 2)}"),
    "accumulate": (r"\((k\w*) == 0\), 0, 0, 0\);", "0, 0, 0, 0);"),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text with one change; ``kind`` says which, ``line`` (1-based) and ``was`` where."""

    kind: str
    line: int
    was: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """Every single change, in order of lines."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
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
