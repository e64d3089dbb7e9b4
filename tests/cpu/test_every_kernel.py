"""No cpu kernel is without a test that compares it with its reference, and none is unlisted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deepinfer.targets.base import TARGETS, load_target

TESTS = sorted(Path(__file__).parent.glob("test_*.py"))
COMPARE = ("check", "verify")  # of the harness, and what test files call it by


def compared(source: str) -> set[str]:
    """The ops that tests in ``source`` compare: ``verify("rope", ...)``, ``verify(rope.rope, ...)``
    or ``check(*use("rope"), ...)`` in a function called test_... or check_..."""
    found = set()
    for test in ast.parse(source).body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith(("test_", "check_")):
            for call in ast.walk(test):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in COMPARE:
                    first = call.args[0]
                    if isinstance(first, ast.Starred) and isinstance(first.value, ast.Call):
                        first = first.value.args[0]
                    found.add(first.attr if isinstance(first, ast.Attribute)
                              else first.value if isinstance(first, ast.Constant) else "?")
    return {str(name) for name in found}


def test_what_counts_as_compared():
    body = "  verify('a', 1)\n  check(*use('b'), 2)\n  verify(rope.c)\n  run_kernel(*use('d'))\n"
    assert compared(f"def test_x():\n{body}") == {"a", "b", "c"}
    assert compared(f"def helper():\n{body}") == set()


def test_every_kernel_is_compared_with_its_reference():
    found = set().union(*(compared(file.read_text(encoding="utf-8")) for file in TESTS))
    assert set(load_target("cpu").kernels) - found == set()


@pytest.mark.parametrize("name", TARGETS)
def test_every_file_of_kernels_is_listed(name):
    target = load_target(name)
    folder = Path(__file__).parents[2] / "deepinfer" / "targets" / name / "kernels"
    files = {f.stem for f in folder.glob("*.py") if not f.stem.startswith("_")}
    assert files == set(target.kernels) and len(target.kernels) == len(files)
