"""Which of our files a module's behaviour depends on: what it imports, and what that imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]  # the directory that holds the package


def closure(*files: Path) -> tuple[Path, ...]:
    """The given files and every file of deepinfer that they import, directly or not; sorted."""
    found: set[Path] = set()
    left = [f.resolve() for f in files]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imports(file)
    return tuple(sorted(found))


@cache
def _imports(file: Path) -> tuple[Path, ...]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(dict.fromkeys(path for name in names for path in _file_of(name)))


def _file_of(module: str) -> Iterator[Path]:
    """The file of a module of deepinfer; nothing for other packages and for names in a module."""
    if module.partition(".")[0] == "deepinfer":
        path = ROOT.joinpath(*module.split("."))
        yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())
