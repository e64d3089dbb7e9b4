"""The layering of DESIGN §3: who may import whom, what is never loaded, how large a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = {"cli", "commands", "testing", "autotune"}  # imported by nothing below them
ANYTHING = {"errors", "numerics", "ir", "ops", "graph", "checkpoint", "passes", "targets"} | {
    *("settings", "program", "codegen", "compiler", "crosscompile", "runtime", "api", "llm",
      "async_engine", "deepinfer")
}
# layer -> the layers it may import, itself and `errors` aside. "targets" stands for all of them.
MAY_IMPORT = {
    "errors": set(),
    "settings": set(),
    "numerics": set(),
    "ir": {"numerics"},
    "ops": {"ir", "numerics"},
    "graph": {"ir", "ops", "numerics", "checkpoint"},
    "checkpoint": {"numerics"},
    "targets": {"ir", "ops", "passes", "targets.base", "targets.tile"},  # and each concrete one
    "targets.base": {"ir", "ops"},
    "targets.tile": {"ir", "ops", "targets.base"},
    "passes": {"ir", "ops", "targets.base"},
    "program": set(),
    "codegen": {"ir", "passes", "targets", "program"},
    "runtime": {"settings", "program", "checkpoint", "numerics"},
    "compiler": ANYTHING - {"api", "llm", "async_engine"},
    "crosscompile": ANYTHING - {"api", "llm", "async_engine"},
    "api": ANYTHING - {"llm", "async_engine"},
    "llm": ANYTHING - {"async_engine"},
    "async_engine": ANYTHING,
    "deepinfer": ANYTHING,  # the lazy public names
    "testing": ANYTHING | {"testing", "autotune"},
    "autotune": ANYTHING | {"testing", "autotune"},
    "cli": ANYTHING | TOP,
    "commands": ANYTHING | TOP,  # the handlers of the cli
    "__main__": {"cli"},
}
HAS_TILELANG = ("targets",)
HAS_TORCH = ("targets", "testing")


def modules() -> dict[str, Path]:
    """Every module of the two packages by its dotted name."""
    files = [file for top in ("deepinfer", "autotune") for file in (ROOT / top).rglob("*.py")]
    dotted = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {name.removesuffix(".__init__"): file for file, name in dotted.items()}


def layer_of(module: str) -> str:
    """`deepinfer.targets.cpu.x` -> `targets.cpu`; `deepinfer.ir.x` -> `ir`; else the first part."""
    parts = module.split(".")
    if parts[0] != "deepinfer" or len(parts) == 1:
        return parts[0]
    return ".".join(parts[1:3]) if parts[1] == "targets" else parts[1]


def imports(module: str, source: str, known: set[str]) -> Iterator[str]:
    """Every module that `source` imports, anywhere in it, relative imports resolved."""
    package = module.split(".") if f"{module}.__init__" in known else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:  # a submodule, or a name of the module
                yield f"{name}.{alias.name}" if f"{name}.{alias.name}" in known else name


def violations(module: str, source: str, known: set[str]) -> list[str]:
    """What `source`, as module `module`, imports and may not."""
    layer = layer_of(module)
    family = layer.split(".")[0]
    concrete = family == "targets" and layer not in MAY_IMPORT
    allowed = MAY_IMPORT["targets" if concrete else layer] | {"errors", layer}
    wrong = []
    for name in imports(module, source, known):
        top = name.split(".")[0]
        if top in ("deepinfer", "autotune"):
            other = layer_of(name)
            whole = "targets" in allowed and layer != "targets" or module == "deepinfer.targets"
            ok = other in allowed or (whole and other.split(".")[0] == "targets")
        elif top in ("tilelang", "tvm"):
            ok = family in HAS_TILELANG
        elif top in ("torch", "torch_npu"):
            ok = family in HAS_TORCH
        else:
            ok = layer != "ir" or top in sys.stdlib_module_names | {"numpy", "ml_dtypes"}
        if not ok:
            wrong.append(f"{module} imports {name}")
    return wrong


def known_names() -> set[str]:
    found = modules()
    return found.keys() | {f"{n}.__init__" for n, file in found.items() if file.stem == "__init__"}


def test_layers():
    known = known_names()
    assert [
        w for n, file in modules().items() for w in violations(n, file.read_text(), known)
    ] == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("deepinfer.runtime.engine", "from deepinfer.ir import types", True),
        ("deepinfer.runtime.engine", "from deepinfer import ir", True),
        ("deepinfer.runtime.engine", "def f():\n    from ..passes import x", True),
        ("deepinfer.runtime.engine", "import deepinfer.program", False),
        ("deepinfer.runtime.engine", "from . import pages", False),
        ("deepinfer.runtime.engine", "import tilelang.language as T", True),
        ("deepinfer.passes.fold", "from deepinfer.targets.base import Target", False),
        ("deepinfer.passes.fold", "from deepinfer.targets.cpu import target", True),
        ("deepinfer.passes.fold", "import deepinfer.targets", True),
        ("deepinfer.targets.cpu.kernels.a", "from deepinfer.targets.sm100 import b", True),
        ("deepinfer.targets.cpu.kernels.a", "from deepinfer.targets.cpu import target", False),
        ("deepinfer.targets.cpu.kernels.a", "import tilelang, torch", False),
        ("deepinfer.targets", "from deepinfer.targets.cpu import target", False),
        ("deepinfer.codegen.emit", "from deepinfer.targets.cpu import target", False),
        ("deepinfer.codegen.emit", "from deepinfer.graph import config", True),
        ("deepinfer.codegen.emit", "import tvm", True),
        ("deepinfer.ir.types", "import ml_dtypes, json, numpy.typing", False),
        ("deepinfer.ir.types", "import rich", True),
        ("deepinfer.llm", "import autotune.search", True),
        ("deepinfer.testing.bits", "import deepinfer.cli", True),
        ("deepinfer.cli", "from deepinfer.testing import bits; import autotune", False),
        ("deepinfer.commands.run", "from deepinfer.llm import LLM; import autotune", False),
        ("deepinfer.commands.run", "import tilelang", True),
        ("deepinfer.llm", "from deepinfer.commands import output", True),
        ("deepinfer.compiler", "from deepinfer.llm import LLM", True),
        ("autotune.search", "import torch", True),
    ],
)
def test_the_check_itself(module, source, wrong):
    packages = {"ir", "passes", "targets", "targets.cpu", "targets.sm100", "testing", "graph"}
    known = known_names() | {f"deepinfer.{name}" for name in packages}
    assert bool(violations(module, source, known)) == wrong


# What runs a Program must load without a compiler, and `import deepinfer` must be cheap.
RUNS_PROGRAMS = ("errors", "numerics", "checkpoint", "program", "runtime")
LIGHT = ["deepinfer", *(name for name in sorted(modules()) if layer_of(name) in RUNS_PROGRAMS)]


def loaded_by(names: list[str]) -> set[str]:
    code = "import sys, importlib\n" + "".join(f"importlib.import_module({n!r})\n" for n in names)
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("names", [["deepinfer"], ["deepinfer.runtime.engine"], LIGHT], ids=str)
def test_loads_without_a_compiler(names):
    assert set(names) <= set(LIGHT)
    loaded = loaded_by(names)
    assert "deepinfer" in loaded and not loaded & {"torch", "tilelang", "tvm"}


FOLDERS = ("deepinfer", "autotune", "tests", "benchmarks", "examples")
SOURCES = [
    file
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in (".py", ".h", ".c", ".cpp")
]


def test_no_file_is_over_500_lines():
    sizes = {str(f.relative_to(ROOT)): f.read_bytes().count(b"\n") for f in SOURCES}
    assert len(sizes) > 20
    assert {name: size for name, size in sizes.items() if size > 500} == {}


def test_no_file_is_a_drawer():
    banned = [f for f in SOURCES if f.stem in ("utils", "common", "misc") or f.stem[-3:-1] == "_v"]
    assert banned == []
