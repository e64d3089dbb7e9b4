"""The generated step file: launch tables of every phase and the native entry points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deepinfer.errors import TargetError
from deepinfer.ir.graph import Node
from deepinfer.ir.types import Sym, Value
from deepinfer.targets.base import Extent, Spec

MAX_ARGS, MAX_DIMS = 32, 16  # kMaxArgs and kMaxDims of micro/step.h


class InstanceLike(Protocol):
    @property
    def spec(self) -> Spec: ...
    @property
    def symbol(self) -> str: ...


class LaunchLike(Protocol):
    @property
    def node(self) -> Node: ...
    @property
    def instance(self) -> InstanceLike: ...
    @property
    def extent(self) -> Extent: ...


class PhaseLike(Protocol):
    """What the tables need of a planned phase (codegen's PhasePlan has it)."""

    @property
    def launches(self) -> Sequence[LaunchLike]: ...
    @property
    def values(self) -> Sequence[Value]: ...
    @property
    def sizes(self) -> Sequence[tuple[str, int]]: ...


def phase_tables(name: str, phase: PhaseLike) -> str:
    """C++ text of one phase: its tables and the entry point ``deepinfer_<name>``."""
    index = {v: i for i, v in enumerate(phase.values)}
    size_index = {s: i for i, (s, _) in enumerate(phase.sizes)}
    args: list[int] = []
    dims: list[int] = []
    rows = []
    for launch in phase.launches:
        node, spec, extent = launch.node, launch.instance.spec, launch.extent
        operands = [index[v] for v in (*node.inputs, *node.outputs)]
        if len(operands) > MAX_ARGS or len(spec.dynamic()) > MAX_DIMS:
            raise TargetError(f"{len(operands)} operands and {len(spec.dynamic())} symbolic dims, "
                              f"expected at most {MAX_ARGS} and {MAX_DIMS}",
                              where=f"op {node.op.name} at {node.loc or 'top'}",
                              next="raise kMaxArgs and kMaxDims of micro/step.h")
        sizes = []
        for dim_name in spec.dynamic():
            sym = spec.dims[dim_name]
            assert isinstance(sym, Sym)
            sizes += [size_index[sym.name], sym.times]
        sym_at = -1 if extent.sym is None else size_index[extent.sym]
        rows.append(f"  {{{launch.instance.symbol}_thunk, {len(args)}, {len(operands)}, "
                    f"{len(node.inputs)}, {len(dims) // 2}, {len(sizes) // 2}, {sym_at}, "
                    f"{extent.mul}, {extent.div}}},")
        args += operands
        dims += sizes
    byte_rows = [f"  {{{_fixed(v)}, {', '.join(map(str, _syms(v, size_index)))}}},"
                 for v in phase.values]
    return "\n".join([
        f"static const int32_t {name}_args[] = {{{', '.join(map(str, args or [0]))}}};",
        f"static const int32_t {name}_dims[] = {{{', '.join(map(str, dims or [0]))}}};",
        f"static const DiBytes {name}_bytes[] = {{", *byte_rows, "};",
        f"static const DiLaunch {name}_launches[] = {{", *rows, "};",
        f"static const DiPhase {name}_phase = {{{name}_launches, {len(rows)}, {name}_args, "
        f"{name}_dims, {name}_bytes}};",
        f"DI_EXPORT int32_t deepinfer_{name}(const DiStep* step) {{",
        f"  return di_run_phase({name}_phase, step);", "}", ""])


def _fixed(value: Value) -> int:
    fixed = 1
    for dim in value.type.shape:
        fixed *= dim.times if isinstance(dim, Sym) else dim
    return fixed * value.type.dtype.bits // 8


def _syms(value: Value, size_index: dict[str, int]) -> tuple[int, int]:
    found = [size_index[s.name] for s in value.type.symbols()]
    if len(found) > 2:
        raise TargetError(f"{value}: {value.type} has {len(found)} symbolic dims, expected at most "
                          "2", where="step tables", next="let DiBytes of micro/step.h hold more")
    return (*found, -1, -1)[0], (*found, -1, -1)[1]


def step_text(phases: dict[str, PhaseLike], abi: int) -> str:
    """The whole step file."""
    symbols = sorted({x.instance.symbol for p in phases.values() for x in p.launches})
    declared = [f"extern \"C\" void {s}_thunk(void* const*, const int32_t*, uint8_t*, int32_t, "
                "int32_t);" for s in symbols]
    tables = [phase_tables(name, phase) for name, phase in phases.items()]
    return "\n".join([
        '#include "step.h"', *declared, *tables,
        "DI_EXPORT void* deepinfer_pool_create(int32_t n) { return di_pool_create(n); }",
        "DI_EXPORT void deepinfer_pool_destroy(void* pool) { delete (DiPool*)pool; }",
        f"DI_EXPORT int32_t deepinfer_abi() {{ return {abi}; }}", ""])
