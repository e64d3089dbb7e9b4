"""What kernels are measured: the distinct kernels of a model, in families, at sizes of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from traffic import Step

from autotune.commands import tasks_of_model
from autotune.inputs import can_make
from autotune.space import Candidate, Problem, Sizes
from deepinfer.codegen.schedules import choose
from deepinfer.ir.types import Sym

FAMILIES = ("gemm", "experts", "attention", "index", "fused")
ROWS = {"gemm": (1, 2, 3, 4, 5, 6, 7, 8, 256), "experts": (1, 16, 256), "attention": (1, 16, 256),
        "index": (1, 16, 256), "fused": (1, 16, 256)}
MOST_REQUESTS = 64  # rows of a step of decode; more are a chunk of one prompt
FORMATS = ("bf16", "fp8", "fp4")
MOST_EXPERTS = 64  # of the release's 384: they fit in memory, and rows still meet distinct ones


def family_of(op: str) -> str:
    if op.startswith(("packed_linear", "linear", "wide_linear")):
        return "gemm"
    if op.startswith("grouped"):
        return "experts"
    if op.endswith("attention"):
        return "attention"
    return "index" if op.startswith("index") or op == "topk" else "fused"


def format_of(op: str) -> str:
    """The weights' format of a linear."""
    return next((f for f in FORMATS if f in op), "fp4")


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel at one size.

    Args:
        family: of FAMILIES. problem: the kernel. rows: of the step. context: positions of each of
            its requests. sizes: what both bind.
    """

    family: str
    problem: Problem
    rows: int
    context: int
    sizes: Sizes

    def candidate(self) -> Candidate:
        """The schedule that ships for it in a decode or a prefill step."""
        spec, phase = self.problem.spec(), "prefill" if self.rows > MOST_REQUESTS else "decode"
        schedule = choose(self.problem.kernel(), spec, self.problem.target, phase)
        return Candidate(self.problem, self.problem.schedules().index(schedule), schedule)

    @property
    def matrix(self) -> tuple[int, int, int]:
        """M, N, K of a linear's product, all groups together."""
        dims, attrs = self.problem.spec().dims, self.problem.attrs
        inner = dims["K"] if "K" in dims else 0
        assert isinstance(inner, int)
        outputs = attrs["m"] if "m" in attrs else dims["M"]
        assert isinstance(outputs, int)
        return self.rows, outputs, inner

    def step(self) -> Step:
        """The step that the kernel is a part of."""
        requests = self.rows if self.rows <= MOST_REQUESTS else 1
        return Step(self.rows, requests, self.context)

    def shape(self) -> str:
        return self.problem.shape(self.sizes)


def sizes_of(problem: Problem, rows: int, context: int) -> Sizes:
    """Binds a kernel's run-time sizes: rows of as many requests in a step of decode, of one
    request above MOST_REQUESTS rows; slots and pages for a context of that many positions."""
    spec = problem.spec()
    requests = rows if rows <= MOST_REQUESTS else 1
    entries = spec.dims.get("E")
    ratio = problem.attrs.get("ratio", 1)
    assert isinstance(ratio, int)
    each = entries * ratio if isinstance(entries, int) else 128
    pages = max(1, -(-context // each))
    by_letter = {"R": requests, "S": requests, "P": pages, "T": pages * requests}
    return tuple(dict.fromkeys(
        (d.name, by_letter.get(letter, rows)) for letter, d in spec.dims.items()
        if isinstance(d, Sym)))


def with_experts(problem: Problem, count: int) -> Problem:
    """The same grouped kernel with fewer experts, where it has more."""
    held = problem.spec().dims.get("E")
    if family_of(problem.op) != "experts" or not isinstance(held, int) or held <= count:
        return problem
    inputs = tuple((kind, dtype, tuple(
        count + (d - held) if i == 0 and d in (held, held + 1) else d for i, d in enumerate(dims)))
        for kind, dtype, dims in problem.inputs)
    return replace(problem, inputs=inputs, _spec=[])


def points(model: str, families: Sequence[str], rows: Sequence[int] | None, context: int,
           ops: Sequence[str] = ()) -> Iterator[Point]:
    """All kernels of a model whose operands can be made up, each at its family's rows."""
    for task in tasks_of_model(model, "cpu", (1,), ops):
        problem, family = with_experts(task.problem, MOST_EXPERTS), family_of(task.problem.op)
        if family in families and can_make(problem):
            for count in rows or ROWS[family]:
                yield Point(family, problem, count, context, sizes_of(problem, count, context))
