"""Static gates of ascend950 kernels, on the generated text: what TileLang does not check.

Indices are tried for the first values of their variables. The gate that needs CANN says "skipped:
no CANN" where there is none, never "passed".
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deepinfer.errors import TargetError
from deepinfer.targets.ascend950.facts import FACTS
from deepinfer.targets.base import LoweredKernel

PASSED, FAILED, NOT_CHECKED, SKIPPED = "passed", "failed", "not checked", "skipped: no CANN"

# Every name of the C API that our kernels may use: each is known to the emulator and to the tests.
NAMES = frozenset("""
    asc_atomic_add asc_ballot asc_copy_gm2l1_dn2nz asc_copy_gm2l1_nd2nz asc_copy_gm2ub_align
    asc_copy_l0c2gm asc_copy_l0c2ub asc_copy_ub2gm_align asc_copy_ub2l1 asc_dual_dst_mode
    asc_fill_l1 asc_get_sub_block_id asc_init asc_load_l2_cache_mode asc_quant_mode
    asc_reduce_max asc_relu_pre_mode asc_set_gm2l1_nz_para asc_set_l0c_copy_nz_para asc_shfl_up
    asc_shfl_xor asc_store_l2_cache_mode asc_sync_intra_arrive asc_sync_intra_wait asc_sync_notify
    asc_sync_pipe asc_sync_wait asc_syncthreads asc_unit_flag_mode asc_vf_call
    ascend_blockscaled_gemm_l1 ascend_gemm_l1
""".split())
_NAME = re.compile(r"\basc(?:end)?_\w+")
_EVENT = re.compile(r"asc_sync_(notify|wait)\((PIPE_\w+), (PIPE_\w+), "
                    r"static_cast<event_t>\((.*)\)\);")
_FLAG = re.compile(r"asc_sync_intra_(arrive|wait)\((PIPE_\w+), (.*)\);")
_GEMM = re.compile(r"ascend_(blockscaled_)?gemm_l1<(\d+), (\d+), (\d+), (\d+),")
_LAUNCH = re.compile(r"__launch_bounds__\((\d+)\)")
# An on-chip address that a copy uses: &(((T*)base)[index]), &(base[index]) or (T*)base + (index).
_ON_CHIP = re.compile(r"__(ubuf|cbuf)__ \w+\*\)\(+(?:&\()?\(*(?:__\1__ (\w+)\*\))?(\w+)\)?"
                      r"(?:\[|\s\+\s)")
_LOOP = re.compile(r"for \(int32_t (\w+) = 0; \1 < (\d+); ")
SAMPLES = 8  # values tried of a variable whose range is not known
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.BitAnd: operator.and_, ast.RShift: operator.rshift, ast.LShift: operator.lshift,
}
_DECLARED = re.compile(r"__(?:ubuf|cbuf)__ (\w+) \*(\w+) = ")
_SIZES = {"bfloat16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate's outcome: ``status`` is "passed", "failed" or "skipped: no CANN"."""

    name: str
    status: str
    detail: str


def _gate(name: str, ok: bool, detail: str) -> Gate:
    return Gate(name, PASSED if ok else FAILED, detail)


def check_text(lowered: LoweredKernel) -> tuple[Gate, ...]:
    """Gates on the generated text: capacities, shapes, events, flags, threads, names."""
    checks = (_shapes, _alignment, _events, _flags, _balance, _threads, _names)
    return (*_capacities(lowered), *(check(lowered.text) for check in checks))


def _capacities(lowered: LoweredKernel) -> list[Gate]:
    """What each memory holds: UB, L1 and L0C as TileLang placed them, L0A and L0B of products."""
    used = Counter(lowered.launch["memory"])
    for scaled, m, _, n, k in _GEMM.findall(lowered.text):
        bytes_ = 1 if scaled else 2  # of an element: e4m3, or bf16
        for space, rows in (("l0a", m), ("l0b", n)):  # two stages
            used[space] = max(used[space], 2 * int(rows) * int(k) * bytes_)
    limits = {space: int(FACTS[f"{space}_bytes"].value)
              for space in ("ub", "l1", "l0a", "l0b", "l0c")}
    if "__simt_vf__" in lowered.text:
        limits["ub"] = int(FACTS["simt_ub_bytes"].value)
    return [_gate(space.upper(), used[space] <= limit, f"{used[space]} bytes, at most {limit}")
            for space, limit in limits.items()]


def _shapes(text: str) -> Gate:
    rows = int(FACTS["fractal_rows"].value)
    odd = [f"{m}x{n}x{k}" for scaled, m, k, n, _ in _GEMM.findall(text)
           if int(m) % rows or int(n) % rows or (scaled and int(k) % 64)]
    return _gate("products", not odd, ", ".join(odd) or f"rows are multiples of {rows}")


def _alignment(text: str) -> Gate:
    """Copies start at whole units of UB and L1, in every stage and on both vector cores."""
    odd, loops = [], _loops(text)
    declared = {name: ctype for ctype, name in _DECLARED.findall(text)}
    for line in text.splitlines():
        if "asc_copy_" not in line and "asc_fill_l1" not in line:
            continue
        for found in _ON_CHIP.finditer(line):
            space = {"ubuf": "ub", "cbuf": "l1"}[found[1]]
            index = _operand(line, found.end())
            size = _SIZES.get(found[2] or declared.get(found[3], ""), 1)
            unit = int(FACTS[f"{space}_align"].value)
            if any(at * size % unit for at in _values(index, loops)):
                odd.append(f"{space}+{index}")
    return _gate("alignment", not odd, "; ".join(odd) or "copies start at whole units")


def _operand(line: str, start: int) -> str:
    """The expression from ``start`` to where its brackets close."""
    depth = 0
    for i in range(start, len(line)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(line[i], 0)
        if depth < 0 or (depth == 0 and line[i] == ","):
            return line[start:i]
    return line[start:]


def _loops(text: str) -> dict[str, int]:
    """The trip counts of loops whose bound is a number, by variable."""
    return {name: int(bound) for name, bound in _LOOP.findall(text)}


def _values(expression: str, loops: Mapping[str, int]) -> set[int]:
    """What an index is for the first values of its variables; empty if it is not integer sums."""
    plain = re.sub(r"\((?:u?int\d+_t)\)", "", expression)
    try:
        tree = ast.parse(plain.strip(), mode="eval").body
    except SyntaxError:
        return set()
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    ranges = [range(min(loops.get(name, SAMPLES), SAMPLES)) for name in names]
    try:
        return {_evaluate(tree, dict(zip(names, values, strict=True)))
                for values in itertools.product(*ranges)}
    except KeyError:
        return set()


def _evaluate(node: ast.expr, variables: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return variables[name]
        case ast.BinOp(left=a, op=operator, right=b):
            return _OPERATORS[type(operator)](_evaluate(a, variables), _evaluate(b, variables))
    raise KeyError(ast.dump(node))


def _ids(name: str, text: str, expressions: Iterable[str], limit: int) -> Gate:
    loops = _loops(text)
    values = {e: _values(e, loops) for e in expressions}
    bad = [e for e, v in values.items() if not v or max(v) >= limit]
    return _gate(name, not bad, ", ".join(bad) or f"all below {limit}")


def _events(text: str) -> Gate:
    return _ids("event ids", text, [m[3] for m in _EVENT.findall(text)],
                int(FACTS["events"].value))


def _flags(text: str) -> Gate:
    return _ids("flag ids", text, [m[2] for m in _FLAG.findall(text)],
                2 * int(FACTS["flags"].value))


def _balance(text: str) -> Gate:
    """Whatever is set somewhere is waited for somewhere, and the other way round."""
    loops = _loops(text)
    events: dict[tuple[str, str, int], set[str]] = {}
    for what, source, target, expression in _EVENT.findall(text):
        for value in _values(expression, loops):
            events.setdefault((source, target, value), set()).add(what)
    odd = [f"{s} to {t} id {i}: only {w}" for (s, t, i), kinds in sorted(events.items())
           if len(kinds) == 1 for w in kinds]
    cube, _, vector = text.partition("if ASC_IS_AIV")
    half = int(FACTS["flags"].value)
    of = {(side, what): {v % half for w, _, e in _FLAG.findall(part) if w == what
                         for v in _values(e, loops)}
          for side, part in (("cube", cube), ("vector", vector)) for what in ("arrive", "wait")}
    for one, other in (("cube", "vector"), ("vector", "cube")):
        lone = of[one, "arrive"] ^ of[other, "wait"]
        odd += [f"flag {i} from {one} to {other} has one side" for i in sorted(lone)]
    return _gate("balance", not odd, "; ".join(odd) or "every event and flag has both sides")


def _threads(text: str) -> Gate:
    limit = int(FACTS["simt_threads"].value)
    counts = [int(n) for n in _LAUNCH.findall(text)]
    ok = all(n <= limit and n % 32 == 0 for n in counts)
    return _gate("threads", ok, f"{counts}, whole warps, at most {limit}")


def _names(text: str) -> Gate:
    unknown = sorted(set(_NAME.findall(text)) - NAMES)
    return _gate("names", not unknown, ", ".join(unknown) or "all known")


def check_object(made: bytes | None) -> Gate:
    """The gate on the compiled kernel."""
    if made is None:
        return Gate("compiles", SKIPPED, "bisheng is not found")
    return _gate("compiles", made[:4] == b"\x7fELF", f"{len(made)} bytes of ELF")


def require(gates: Iterable[Gate], symbol: str) -> None:
    """Refuse a kernel with a failed gate.

    Raises:
        TargetError: names each failed gate with its numbers.
    """
    failed = [g for g in gates if g.status == FAILED]
    if failed:
        raise TargetError("; ".join(f"{g.name}: {g.detail}" for g in failed),
                          where=f"kernel {symbol} on ascend950",
                          next="change the kernel or its schedule")
