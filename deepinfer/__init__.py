"""DeepInfer: a compiler-driven inference engine for DeepSeek-V4.1-Flash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.api.chat_output import ChatOutput
    from deepinfer.async_engine import AsyncEngine
    from deepinfer.compiler import compile
    from deepinfer.llm import LLM
    from deepinfer.program import Program
    from deepinfer.runtime.engine import Engine
    from deepinfer.runtime.outputs import RequestOutput
    from deepinfer.runtime.params import SamplingParams

__all__ = ["LLM", "AsyncEngine", "ChatOutput", "Engine", "Program", "RequestOutput",
           "SamplingParams", "compile"]

_HOME = {
    "AsyncEngine": "deepinfer.async_engine", "ChatOutput": "deepinfer.api.chat_output",
    "LLM": "deepinfer.llm", "Engine": "deepinfer.runtime.engine", "Program": "deepinfer.program",
    "RequestOutput": "deepinfer.runtime.outputs", "SamplingParams": "deepinfer.runtime.params",
    "compile": "deepinfer.compiler",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import deepinfer` stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
