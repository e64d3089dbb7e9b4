"""Every error says what is wrong, where, and what to do next."""

from __future__ import annotations

import ast
from pathlib import Path

from deepinfer import errors
from deepinfer.errors import DeepInferError

ROOT = Path(__file__).parents[2]
NAMES = {n for n, kind in vars(errors).items()
         if isinstance(kind, type) and issubclass(kind, DeepInferError)}


def incomplete(source: str) -> list[str]:
    """The calls of our errors in ``source`` that leave out a part."""
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)
             and ast.unparse(n.func).rpartition(".")[2] in NAMES]
    return [f"line {n.lineno}: {ast.unparse(n)}" for n in calls
            if len(n.args) != 1 or not {"where", "next"} <= {k.arg for k in n.keywords}]


def test_the_check_itself():
    assert incomplete("raise errors.IRError('what', where='here', next='this')") == []
    assert incomplete("x = 1\nraise IRError(f'{x}', next='this')") == [
        "line 2: IRError(f'{x}', next='this')"]
    assert len(NAMES) == 10


def test_every_error_has_three_parts():
    files = [f for top in ("deepinfer", "autotune") for f in sorted((ROOT / top).rglob("*.py"))]
    found = {str(f.relative_to(ROOT)): incomplete(f.read_text(encoding="utf-8")) for f in files}
    assert len(found) > 100
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_they_read_as_three_lines():
    assert str(DeepInferError("x is 1, expected 2", where="here", next="pass 2")).splitlines() == [
        "x is 1, expected 2", "  where: here", "  next:  pass 2"]
