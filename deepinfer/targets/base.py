"""What a target is: machine facts, passes and kernels. Every target is described by these types."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer.errors import TargetError, ToolchainError
from deepinfer.ir.graph import Graph, Node
from deepinfer.ir.op import Attrs, Op
from deepinfer.ir.types import Dim, DType, Sym


@dataclass(frozen=True, slots=True)
class Fact:
    """One number about a machine, its unit, and where it was read."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tunable numbers of one kernel; no number here may change a bit of the result."""

    items: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> int:
        return dict(self.items)[name]

    def __str__(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.items) or "default"


def grid(**axes: tuple[int, ...]) -> tuple[Schedule, ...]:
    """All combinations of the axes; the first of each axis together is the default schedule."""
    names = sorted(axes)
    return tuple(Schedule(tuple(zip(names, values, strict=True)))
                 for values in itertools.product(*(axes[n] for n in names)))


@dataclass(frozen=True, slots=True)
class Spec:
    """What a kernel is built for: one op with its dims, dtypes and attributes, and a schedule.

    Two nodes with equal specs share one kernel.
    """

    op: Op
    dims: Mapping[str, Dim]
    dtypes: Mapping[str, DType]
    attrs: Attrs
    schedule: Schedule = field(default_factory=Schedule)

    @staticmethod
    def of(node: Node, schedule: Schedule | None = None) -> Spec:
        unifier = node.op.unifier(node.attrs)
        unifier.unify(tuple(v.type for v in node.inputs))
        return Spec(node.op, dict(unifier.dims), dict(unifier.dtypes), node.attrs,
                    schedule or Schedule())

    def key(self) -> str:
        """Text that is equal exactly for equal kernels (symbolic dims are alike)."""
        dims = ",".join(f"{k}={'?' if isinstance(d, Sym) else d}" for k, d in self.dims.items())
        types = ",".join(f"{k}={t}" for k, t in self.dtypes.items())
        return (f"{self.op.name}[{self.op.signature.text}|{self.op.order.digest()}] {dims} {types} "
                f"{self.attrs} @{self.schedule}")

    def dynamic(self) -> tuple[str, ...]:
        """Names of the dims that are known only at run time."""
        return tuple(k for k, d in self.dims.items() if isinstance(d, Sym))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one op.

    Args:
        op: the op's name.
        build: Spec -> a TileLang prim_func whose buffers are named as the op's operands.
        items: the extent that a caller may cut into ranges ``lo, hi``: a product of dims,
            attributes, numbers of the schedule and ints, over some of these ("N", "M/16",
            "N*heads", "N/rows"); at most one dim is symbolic.
            Items write disjoint outputs, and no result depends on the cut.
        space: Spec -> its schedules, the default first.
        scratch: Spec -> bytes of scratch a thread needs (operand ``scratch: u8``); 0 for none.
    """

    op: str
    build: Callable[[Spec], Any]
    items: str
    space: Callable[[Spec], tuple[Schedule, ...]]
    scratch: Callable[[Spec], int]

    def program(self, spec: Spec) -> Any:
        """The prim_func of ``spec``. The builder does not see the maxima of symbolic dims, which
        are not part of the kernel's identity (``Spec.key``): they would leak into a cached text."""
        blind = {n: replace(d, max=0) if isinstance(d, Sym) else d for n, d in spec.dims.items()}
        return self.build(replace(spec, dims=blind))


def kernel(op: str, *, items: str, space: Callable[[Spec], tuple[Schedule, ...]] | None = None,
           scratch: Callable[[Spec], int] | None = None
           ) -> Callable[[Callable[[Spec], Any]], Kernel]:
    """Declare the decorated builder as the kernel of ``op``."""
    return lambda build: Kernel(op, build, items, space or (lambda _: (Schedule(),)),
                                scratch or (lambda _: 0))


@dataclass(frozen=True, slots=True)
class Extent:
    """A number of work items: ceil(size(sym) x mul / div), or ceil(mul / div) without a sym."""

    sym: str | None
    mul: int
    div: int

    @staticmethod
    def parse(text: str, spec: Spec) -> Extent:
        sym, mul, div = None, 1, 1
        known = {**dict(spec.schedule.items), **spec.attrs, **spec.dims}
        if not re.fullmatch(r"\w+([*/]\w+)*", text):
            raise TargetError(f"cannot read the items '{text}'", where=f"kernel {spec.op.name}",
                              next="write a product of dims, attributes and ints, as 'N*heads/16'")
        for sign, word in re.findall(r"([*/]?)(\w+)", text):
            size: Any = int(word) if word.isdigit() else known.get(word)
            if size is None or (isinstance(size, Sym) and (sym is not None or sign == "/")):
                raise TargetError(f"cannot form the items '{text}'", where=f"kernel {spec.op.name}",
                                  next="use at most one symbolic dim, as a factor")
            if isinstance(size, Sym):
                sym, mul = size.name, mul * size.times
            elif sign == "/":
                div *= int(size)
            else:
                mul *= int(size)
        return Extent(sym, mul, div)


@dataclass(frozen=True, slots=True)
class Pass:
    """A named function Graph -> Graph.

    Args:
        name: printed name = file = function.
        run: the function.
        exact: references before and after agree bitwise.
        why: why it stands where it stands in its target's list, or which rounding moves.
    """

    name: str
    run: Callable[[Graph], Graph]
    exact: bool
    why: str


@dataclass(frozen=True, slots=True)
class Target:
    """A thing to compile for.

    Args:
        name: "cpu", "sm100" or "ascend950".
        facts: machine facts by name, each with its source.
        passes: in order.
        kernels: by op name.
        lower: (prim_func, symbol) -> LoweredKernel, through TileLang.
        build: planned phases and lowered kernels -> the files of a Program.
        versions: tool versions that shape the binaries.
        is_built: (lowered kernel, the ``cache`` of ``build``) -> whether its own binary is kept
            there; never on cpu, whose kernels are linked into one library.
    """

    name: str
    facts: Mapping[str, Fact]
    passes: tuple[Pass, ...]
    kernels: Mapping[str, Kernel]
    lower: Callable[[Any, str], LoweredKernel]
    build: Callable[..., dict[str, bytes]]
    versions: Callable[[], dict[str, str]]
    is_built: Callable[[LoweredKernel, Path], bool] = lambda lowered, cache: False


@dataclass(frozen=True, slots=True)
class LoweredKernel:
    """Source text of one kernel and how to call it.

    Args:
        symbol: the function's name in the text.
        text: the source.
        params: (name, C type) in the order of the emitted signature.
        launch: what a device needs to start it beyond its arguments, as JSON data: grid, threads,
            shared memory, tensor maps. Sizes may be expressions of the op's dims. Empty on cpu.
    """

    symbol: str
    text: str
    params: tuple[tuple[str, str], ...]
    launch: Mapping[str, Any] = field(default_factory=dict)


class KernelTable(Mapping[str, Kernel]):
    """Kernels by op name, each imported when it is first asked for: what does not lower kernels
    does not start TileLang.

    Args:
        package: dotted name of the kernels' package. names: of its files = kernels = ops.
    """

    def __init__(self, package: str, names: tuple[str, ...]) -> None:
        self._package, self._names = package, names
        self._made: dict[str, Kernel] = {}

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._made:
            if name not in self._names:
                raise KeyError(name)
            with _compile_extra(self._package):
                module = importlib.import_module(f"{self._package}.{name}")
            made = getattr(module, name)
            assert isinstance(made, Kernel) and made.op == name
            self._made[name] = made
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def _compile_extra(where: str) -> Iterator[None]:
    """Turns a missing package of the compile extra into a ToolchainError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in COMPILE_EXTRA:
            raise
        raise ToolchainError(f"{error.name} is not installed", where=where,
                             next="install the compile extra: pip install "
                                  "'deepinfer-compiler[compile]'") from None


def load_target(name: str) -> Target:
    """The target called ``name``; imports only that target.

    Raises:
        TargetError: no such target. ToolchainError: its kernels need a package that is missing.
    """
    if name not in TARGETS:
        raise TargetError(f"no target '{name}', expected one of {', '.join(TARGETS)}",
                          where="target", next="choose one of them")
    with _compile_extra(f"target {name}"):
        target = importlib.import_module(f"deepinfer.targets.{name}.target").TARGET
    assert isinstance(target, Target)
    return target


TARGETS = ("cpu", "sm100", "ascend950")
COMPILE_EXTRA = ("tilelang", "tvm", "torch")  # what kernels import to be built
