"""What there is to tune: the distinct kernels of a model's lowered graphs, and their schedules."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import deepinfer.ops
from deepinfer.codegen.cost import work
from deepinfer.codegen.schedules import kernel_key
from deepinfer.errors import TargetError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import OPS, Attrs, Op
from deepinfer.ir.types import DTYPES, Dim, Kind, Sym, TensorType, Value
from deepinfer.targets.base import Kernel, Schedule, Spec, Target, load_target

UNBOUNDED = 1 << 30  # the maximum of a symbolic dim is no part of a kernel's identity
ROWS = (1, 16, 256)  # tuned at, where nothing else is asked for: decode, batched decode, prefill
Sizes = tuple[tuple[str, int], ...]


def canonical(value: Any) -> str:
    """JSON text that is equal exactly for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """sha256 of the canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


@cache
def declared(name: str) -> Op:
    """The op of this name; imports the whole vocabulary on first use.

    Raises:
        TargetError: there is none.
    """
    for module in pkgutil.iter_modules(deepinfer.ops.__path__):
        importlib.import_module(f"deepinfer.ops.{module.name}")
    if name not in OPS:
        raise TargetError(f"no op '{name}'", where="tuning",
                          next="`deepinfer inspect ops` lists them")
    return OPS[name]


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel to tune: an op, its operands, its attributes, and the target.

    Args:
        target, op: names. attrs: of the op. inputs: (kind, dtype, dims) of each operand; a dim is
            an int or (size name, times).
    """

    target: str
    op: str
    attrs: Attrs
    inputs: tuple[tuple[str, str, tuple[int | tuple[str, int], ...]], ...]
    _spec: list[Spec] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of(node: Node, target: str) -> Problem:
        """The problem of a node, the same for all nodes that share a kernel: run-time sizes are
        called rows, rows1, ... and a step's inputs are temps like any other."""
        symbols = dict.fromkeys(s.name for v in node.inputs for s in v.type.symbols())
        names = {old: f"rows{i or ''}" for i, old in enumerate(symbols)}
        return Problem(target, node.op.name, node.attrs, tuple(
            ((Kind.TEMP if v.kind is Kind.INPUT else v.kind).value, v.type.dtype.name,
             tuple((names[d.name], d.times) if isinstance(d, Sym) else d for d in v.type.shape))
            for v in node.inputs))

    @staticmethod
    def from_json(held: Mapping[str, Any]) -> Problem:
        attrs = {k: tuple(v) if isinstance(v, list) else v for k, v in held["attrs"].items()}
        return Problem(held["target"], held["op"], Attrs(attrs), tuple(
            (kind, dtype, tuple(d if isinstance(d, int) else (d[0], d[1]) for d in dims))
            for kind, dtype, dims in held["inputs"]))

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target, "op": self.op, "attrs": dict(self.attrs),
                "inputs": [list(i) for i in self.inputs]}

    def node(self) -> Node:
        """A node of its own that needs this kernel."""
        op = declared(self.op)
        values = []
        for (kind, dtype, dims), operand in zip(self.inputs, op.signature.inputs, strict=True):
            shape: tuple[Dim, ...] = tuple(
                d if isinstance(d, int) else Sym(d[0], UNBOUNDED, d[1]) for d in dims)
            values.append(Value(operand.name, TensorType(shape, DTYPES[dtype]), Kind(kind)))
        types = op.infer(tuple(v.type for v in values), self.attrs)
        outputs = tuple(Value(o.name, t, Kind.TEMP)
                        for o, t in zip(op.signature.outputs, types, strict=True))
        return Node(op, tuple(values), outputs, self.attrs, "tuning")

    def spec(self, schedule: Schedule | None = None) -> Spec:
        if not self._spec:
            self._spec.append(Spec.of(self.node()))
        made = self._spec[0]
        return made if schedule is None else Spec(made.op, made.dims, made.dtypes, made.attrs,
                                                  schedule)

    @property
    def key(self) -> str:
        """As schedules.json names it."""
        return kernel_key(self.spec())

    @property
    def id(self) -> str:
        """Of everything: the target and the operands' kinds count, too."""
        return digest(self.to_json())

    def kernel(self) -> Kernel:
        return load_target(self.target).kernels[self.op]

    def schedules(self) -> tuple[Schedule, ...]:
        """The kernel's space; the default comes first, and a schedule's place is its id."""
        return self.kernel().space(self.spec())

    def size_names(self) -> tuple[str, ...]:
        """The run-time sizes that its dims are formed of."""
        return tuple(dict.fromkeys(d[0] for _, _, dims in self.inputs for d in dims
                                   if not isinstance(d, int)))

    def sizes(self, rows: int) -> Sizes:
        """Every run-time size bound to ``rows``."""
        return tuple((name, rows) for name in self.size_names())

    def shape(self, sizes: Sizes) -> str:
        """The dims by name, as "N=16 K=1024"."""
        bound = dict(sizes)
        dims = {k: d if isinstance(d, int) else bound[d.name] * d.times
                for k, d in self.spec().dims.items()}
        attrs = {k: v for k, v in self.attrs.items()
                 if isinstance(v, int) and not isinstance(v, bool)}
        return " ".join(f"{k}={v}" for k, v in (dims | attrs).items())

    def dtypes(self) -> str:
        """The operands' element types, in order: "bf16,e4m3,ue8m0->bf16"."""
        made = ",".join(v.type.dtype.name for v in self.node().outputs)
        return f"{','.join(dtype for _, dtype, _ in self.inputs)}->{made}"

    def work(self, sizes: Sizes) -> tuple[int, int]:
        """Bytes that must be moved and operations done, as ``codegen.cost`` counts them."""
        return work(self.node(), dict(sizes))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule of one problem; ``index`` is its place in the space, 0 the default."""

    problem: Problem
    index: int
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Task:
    """A problem with the points to tune it at.

    Args:
        problem: the kernel. uses: how many nodes of the model run it. points: sizes.
    """

    problem: Problem
    uses: int
    points: tuple[Sizes, ...]

    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(Candidate(self.problem, i, s)
                     for i, s in enumerate(self.problem.schedules()))

    def to_json(self) -> dict[str, Any]:
        return {"problem": self.problem.to_json(), "uses": self.uses,
                "points": [[list(s) for s in p] for p in self.points]}

    @staticmethod
    def from_json(held: Mapping[str, Any]) -> Task:
        return Task(Problem.from_json(held["problem"]), held["uses"],
                    tuple(tuple((n, v) for n, v in p) for p in held["points"]))


def tasks_of(graphs: Iterable[Graph], target: Target, rows: Sequence[int] = ROWS,
             ops: Sequence[str] = ()) -> list[Task]:
    """The distinct kernels of some lowered graphs, the costliest first.

    Args:
        rows: row counts to tune at; each is lowered to what the phases that run the kernel hold.
        ops: only these; default: all that have a kernel on the target.

    Raises:
        TargetError: one of ``ops`` does not occur, or has no kernel.
    """
    uses: Counter[Problem] = Counter()
    largest: dict[Problem, int] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.op.name in target.kernels and (not ops or node.op.name in ops):
                problem = Problem.of(node, target.name)
                uses[problem] += 1
                limit = min((s.max for v in node.inputs for s in v.type.symbols()), default=1)
                largest[problem] = max(limit, largest.get(problem, 0))
    missing = sorted(set(ops) - {p.op for p in uses})
    if missing:
        raise TargetError(f"no lowered graph has the ops {', '.join(missing)} with a kernel on "
                          f"target {target.name}", where="--op",
                          next="`deepinfer inspect kernels` shows what a model needs")
    made: dict[str, Task] = {}
    for problem, count in uses.items():
        points = dict.fromkeys(problem.sizes(min(r, largest[problem])) for r in sorted(rows))
        key = problem.key
        if key not in made or made[key].uses < count:  # twins differ only in a factor of the rows
            made[key] = Task(problem, count, tuple(points))
    return sorted(made.values(), key=lambda t: (-_cost(t), t.problem.key))


def _cost(task: Task) -> int:
    """Bytes and operations of all uses at all points: what to tune first."""
    return task.uses * sum(sum(task.problem.work(p)) for p in task.points)
