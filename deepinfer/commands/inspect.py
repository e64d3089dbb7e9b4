"""`deepinfer inspect ops|passes|targets`: what the compiler knows, without a model."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Any

from deepinfer.commands.output import emit, emit_json, table
from deepinfer.errors import RequestError
from deepinfer.ir.op import OPS, Op
from deepinfer.targets.base import TARGETS, load_target


def run(args: argparse.Namespace) -> int:
    return {"ops": ops, "passes": passes, "targets": targets}[args.what](args)


def all_ops() -> dict[str, Op]:
    """Every declared op, by name."""
    import deepinfer.ops

    for module in pkgutil.iter_modules(deepinfer.ops.__path__, "deepinfer.ops."):
        importlib.import_module(module.name)
    return dict(sorted(OPS.items()))


def order_text(op: Op) -> str:
    """The op's order in one line; "" where no sum is involved."""
    order = op.order
    params = " ".join(f"{k}={v}" for k, v in order.params)
    parts = [f"over {order.axis}" if order.axis else "", "" if order.sum == "none" else order.sum,
             params, order.rounding]
    return ", ".join(p for p in parts if p)


def ops(args: argparse.Namespace) -> int:
    known = all_ops()
    if args.name is not None:
        if args.name not in known:
            raise RequestError(f"no op '{args.name}'", where="inspect ops",
                               next="`deepinfer inspect ops` lists them")
        known = {args.name: known[args.name]}
    if args.json:
        emit_json([_describe(op) for op in known.values()])
    elif args.name is not None:
        (op,) = known.values()
        attrs = [*sorted(op.required), *(f"{k}={v!r}" for k, v in op.defaults.items())]
        emit(f"{op.name}({', '.join(attrs)})" if attrs else op.name)
        emit(f"  signature  {op.signature.text}")
        emit(f"  order      {order_text(op) or 'no sum'} [{op.order.digest()}]")
        emit("\n" + op.doc)
    else:
        emit(table([("op", "order", "signature"),
                    *((n, order_text(op) or "-", op.signature.text) for n, op in known.items())]))
    return 0


def _describe(op: Op) -> dict[str, Any]:
    return {"name": op.name, "signature": op.signature.text, "doc": op.doc,
            "attributes": {**dict.fromkeys(sorted(op.required)), **op.defaults},
            "required": sorted(op.required),
            "order": {"axis": op.order.axis, "sum": op.order.sum,
                      "params": dict(op.order.params), "rounding": op.order.rounding,
                      "digest": op.order.digest()}}


def passes(args: argparse.Namespace) -> int:
    found = [load_target(t) for t in ([args.target] if args.target else TARGETS)]
    if args.json:
        emit_json({t.name: [{"name": p.name, "exact": p.exact, "why": p.why} for p in t.passes]
                   for t in found})
    else:
        for target in found:
            emit(f"target {target.name}: {len(target.passes)} passes, in order")
            emit(table([(i + 1, p.name, "exact" if p.exact else "moves a rounding", p.why)
                        for i, p in enumerate(target.passes)], indent="  "))
    return 0


def targets(args: argparse.Namespace) -> int:
    found = [load_target(t) for t in ([args.target] if args.target else TARGETS)]
    if args.json:
        emit_json({t.name: {"kernels": sorted(t.kernels), "passes": [p.name for p in t.passes],
                            "facts": {n: {"value": f.value, "unit": f.unit, "source": f.source}
                                      for n, f in t.facts.items()}} for t in found})
    else:
        for target in found:
            emit(f"target {target.name}: {len(target.kernels)} kernels, "
                 f"{len(target.passes)} passes")
            if target.facts:
                emit(table([(n, f"{f.value:g} {f.unit}", f.source)
                            for n, f in target.facts.items()], indent="  "))
    return 0
