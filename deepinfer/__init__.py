"""DeepInfer: a compiler-driven inference engine for DeepSeek-V4.1-Flash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.compiler import compile
    from deepinfer.llm import LLM
    from deepinfer.program import Program
    from deepinfer.runtime.engine import Engine
    from deepinfer.runtime.request import SamplingParams

__all__ = ["LLM", "Engine", "Program", "SamplingParams", "compile"]

_HOME = {
    "LLM": "deepinfer.llm", "Engine": "deepinfer.runtime.engine", "Program": "deepinfer.program",
    "SamplingParams": "deepinfer.runtime.request", "compile": "deepinfer.compiler",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import deepinfer` stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
