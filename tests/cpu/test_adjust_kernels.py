"""What changes logits and choices around sampling, and what picks kept rows: kernel = reference."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import deepinfer.ops.adjust
import deepinfer.ops.hyper  # noqa: F401  (both fill OPS)
from deepinfer.ir import OPS
from deepinfer.numerics.formats import to_bf16
from tests.cpu.harness import Array, check
from tests.ops.adjust_cases import case


def verify(name: str, arrays: tuple[Array, ...], symbolic: str, **attrs: Any) -> None:
    module = importlib.import_module(f"deepinfer.targets.cpu.kernels.{name}")
    check(OPS[name], getattr(module, name), arrays, symbolic=symbolic, **attrs)


@pytest.mark.parametrize(("rows", "vocab", "drafts"), [(11, 70, 4), (1, 33, 1), (0, 64, 2)])
def test_adjust_logits(rows: int, vocab: int, drafts: int) -> None:
    verify("adjust_logits", case(rows, vocab, drafts=drafts).operands(), "Q,E,M")


def test_adjust_logits_of_strange_values() -> None:
    """Signed zeros, denormals and infinities, changed and not; no mask at all."""
    c = case(6, 40)
    strange = np.float32([-0.0, 0.0, 1e-45, -1e-45, np.inf, -np.inf, 1e-38, 3e38])
    verify("adjust_logits", c.changed(
        logits=np.resize(strange, c.logits.shape), mask_row=np.full(6, -1, np.int32),
        masks=np.zeros((0, 2), np.int32)).operands(), "Q,E,M")


def test_force_token() -> None:
    verify("force_token", (np.int32([5, 6, 7]), np.int32([-1, 0, 3])), "Q")


def test_recent_drafts() -> None:
    verify("recent_start", (np.int32([8, 9, 1]),), "R", width=5)
    recent = np.arange(15, dtype=np.int32).reshape(3, 5)
    verify("recent_push", (recent, np.int32([70, 80, 90])), "R")
    verify("recent_push", (recent[:, :1].copy(), np.int32([70, 80, 90])), "R")


def test_hyper_gather() -> None:
    x = to_bf16(np.random.default_rng(0).normal(size=(7, 3, 20)).astype(np.float32))
    verify("hyper_gather", (x, np.int32([0, 3, 4, 6])), "N,K")
