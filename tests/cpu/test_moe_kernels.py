"""The cpu kernels of experts, Engram, sampling and drafting give the bits of their references."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepinfer.checkpoint.layouts import tile16_e2m1, tile16_e2m1_sf
from deepinfer.ir.op import OPS, Op
from deepinfer.numerics.formats import quantize_fp4_ue8m0, to_bf16
from deepinfer.ops import draft, engram, fused, moe, sample  # noqa: F401  declares the ops
from deepinfer.targets.base import Kernel
from tests.cpu.harness import bits, check, run_kernel

Array = np.ndarray[Any, Any]
UE8M0 = ml_dtypes.float8_e8m0fnu


def use(name: str) -> tuple[Op, Kernel]:
    module = importlib.import_module(f"deepinfer.targets.cpu.kernels.{name}")
    return OPS[name], getattr(module, name)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(g: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (g.standard_normal(shape) * scale).astype(np.float32)


def tiled(g: np.random.Generator, experts: int, m: int, k: int) -> tuple[Array, Array]:
    """A random MXFP4 weight of all experts in the layout of the GEMM kernels."""
    w, sf = quantize_fp4_ue8m0(to_bf16(normal(g, experts, m, k, scale=0.2)))
    return tile16_e2m1(w), tile16_e2m1_sf(sf)


def chosen(g: np.random.Generator, n: int, k: int, experts: int) -> Array:
    """k different experts a token, ascending; expert 0 gets no token."""
    rows = [np.sort(g.choice(np.arange(1, experts), k, replace=False)) for _ in range(n)]
    return np.array(rows, np.int32).reshape(n, k)


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("k", [1, 3])
def test_route(n: int, k: int) -> None:
    g = rng(k)
    z = normal(g, n, 10, scale=4)
    z[:, 3:6] = z[:, 5:6]  # ties
    z[:, 9] = 30  # softplus above its threshold
    bias, bias_vl = normal(g, 10), normal(g, 10)
    bias[3:6], bias_vl[9] = 0, -np.inf
    image = (np.arange(n) % 2).astype(np.uint8)
    check(*use("route"), (z, bias, bias_vl, image), k=k, scale=1.5)


def test_route_barred_experts_and_nan_rows() -> None:
    z = normal(rng(), 3, 6)
    z[1] = np.nan
    bias = np.full(6, -np.inf, np.float32)
    arrays = (z, bias, bias, np.zeros(3, np.uint8))
    idx, weight = run_kernel(*use("route"), arrays, {"k": 2, "scale": 1.0})
    assert (idx == [0, 1]).all()
    assert np.isfinite(weight[[0, 2]]).all() and np.isnan(weight[1]).all()


def test_route_does_not_choose_an_expert_whose_key_is_nan() -> None:
    """One NaN bias (or score) bars that expert, also where it comes first in a row."""
    z, bias = normal(rng(), 4, 6), normal(rng(1), 6)
    bias[0], z[2, 1] = np.nan, np.nan
    arrays = (z, bias, bias[::-1].copy(), np.array([0, 1, 0, 1], np.uint8))
    idx, _ = run_kernel(*use("route"), arrays, {"k": 3, "scale": 1.0})
    assert not (idx[[0, 2]] == 0).any() and not (idx[2] == 1).any() and not (idx == 5)[[1, 3]].any()
    check(*use("route"), arrays, k=3, scale=1.0)


@pytest.mark.parametrize("n", [0, 1, 9])
def test_group_rows(n: int) -> None:
    check(*use("group_rows"), (chosen(rng(n), n, 3, 6),), experts=6)


@pytest.mark.parametrize(("n", "m"), [(0, 72), (70, 72), (70, 64)])
def test_grouped_gate_up(n: int, m: int) -> None:
    g, experts, c, k = rng(n), 4, 64, 2
    idx = chosen(g, n, k, experts)
    order, offsets = moe.group_rows(idx, experts=experts)
    x = to_bf16(normal(g, n, c, scale=3))
    w1, s1 = tiled(g, experts, m, c)
    w3, s3 = tiled(g, experts, m, c)
    weight = np.abs(normal(g, n, k))
    check(*use("grouped_gate_up"), (x, w1, s1, w3, s3, order, offsets, weight), symbolic="",
          m=m, limit=2.0)
    if n > 1:  # the clamps took part
        got = moe.grouped_gate_up(x, w1, s1, w3, s3, order, offsets, weight, m=m, limit=2.0)
        free = moe.grouped_gate_up(x, w1, s1, w3, s3, order, offsets, weight, m=m, limit=1e9)
        assert (bits(got) != bits(free)).mean() > 0.1


@pytest.mark.parametrize("n", [0, 110])
@pytest.mark.parametrize("m", [32, 96, 128])
def test_grouped_gate_up_fake_quant(n: int, m: int) -> None:
    """Two, six and eight tiles; 110 rows are several calls of an expert."""
    g, experts, c, k = rng(n), 3, 32, 2
    order, offsets = moe.group_rows(chosen(g, n, k, experts), experts=experts)
    x = to_bf16(normal(g, n, c, scale=3))
    weights = (*tiled(g, experts, m, c), *tiled(g, experts, m, c))
    op, _ = use("grouped_gate_up_fake_quant")
    arrays = (x, *weights, order, offsets, np.abs(normal(g, n, k)))
    check(*use("grouped_gate_up_fake_quant"), arrays, symbolic="", m=m, limit=2.0)
    if n:
        plain = moe.grouped_gate_up(*arrays, m=m, limit=2.0)
        assert (bits(plain) != bits(op.run(arrays, op.attrs({"m": m, "limit": 2.0}))[0])).any()
        x[2, 5], arrays[-1][3] = np.nan, np.inf  # NaN blocks, and blocks of infinities
        check(*use("grouped_gate_up_fake_quant"), arrays, symbolic="", m=m, limit=2.0)


@pytest.mark.parametrize(("n", "m"), [(0, 72), (70, 72), (70, 64)])
def test_grouped_down(n: int, m: int) -> None:
    g, experts, width, k = rng(n), 4, 96, 2
    order, offsets = moe.group_rows(chosen(g, n, k, experts), experts=experts)
    x = to_bf16(normal(g, n * k, width))
    check(*use("grouped_down"), (x, *tiled(g, experts, m, width), order, offsets),
          symbolic="Z", m=m)


def test_grouped_rows_do_not_touch_each_other() -> None:
    """A row of NaN stays alone, and a token's bits do not depend on the others."""
    g, experts, m, n, k = rng(), 3, 32, 9, 2
    op, kernel = use("grouped_down")
    idx, weights = chosen(g, n, k, experts), tiled(g, experts, m, 64)
    x = to_bf16(normal(g, n * k, 64))
    attrs: dict[str, Any] = {"m": m}
    groups = moe.group_rows(idx, experts=experts)
    (whole,) = run_kernel(op, kernel, (x, *weights, *groups), attrs, symbolic="Z")
    broken = x.copy()
    broken[0] = np.nan
    (isolated,) = run_kernel(op, kernel, (broken, *weights, *groups), attrs, symbolic="Z")
    assert np.isnan(isolated[0].astype(np.float32)).all()
    assert (bits(isolated[1:]) == bits(whole[1:])).all()
    for token in (0, 8):
        alone = moe.group_rows(idx[token:token + 1], experts=experts)
        rows = slice(token * k, (token + 1) * k)
        (got,) = run_kernel(op, kernel, (x[rows].copy(), *weights, *alone), attrs, symbolic="Z")
        assert (bits(got) == bits(whole[rows])).all()


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_expert_reduce(n: int, k: int) -> None:
    g = rng(n)
    arrays = (to_bf16(normal(g, n * k, 40)), chosen(g, n, k, 8), to_bf16(normal(g, n, 40)))
    check(*use("expert_reduce"), arrays, symbolic="")


ENGRAM = {"multipliers": (14831304026200453, 936705081716061, 2**63 - 25, 14319439928568407),
          "primes": (101, 103, 107, 109, 113, 16000889), "heads": 2, "pad": 2, "columns": 6}


@pytest.mark.parametrize("n", [0, 9])
def test_engram_hash(n: int) -> None:
    """Blocked tokens, ids outside the vocabulary, images, and products that wrap around int64."""
    g = rng(n)
    lookback = g.integers(-1, 520, (n, 4)).astype(np.int32)
    token_map = g.permutation(512).astype(np.int32)
    image = (g.random(n) < 0.2).astype(np.uint8)
    check(*use("engram_hash"), (lookback, image, token_map), **ENGRAM)


@pytest.mark.parametrize("n", [0, 5])
def test_engram_gather(n: int) -> None:
    g = rng(n)
    codes = g.integers(0, 256, (50, 64)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    table = codes.view(ml_dtypes.float8_e4m3fn)
    sf = g.integers(90, 160, (50, 2)).astype(np.uint8).view(UE8M0)
    check(*use("engram_gather"), (g.integers(0, 50, (n, 3)), table, sf))


@pytest.mark.parametrize("n", [0, 6])
def test_engram_gate(n: int) -> None:
    g, h, c = rng(n), 3, 48
    x, kv = to_bf16(normal(g, n, h, c)), to_bf16(normal(g, n, (h + 1) * c))
    if n:
        x[0], kv[1] = 0, 0  # the statistic of a zero row; a zero dot product
    image = (np.arange(n) == 3).astype(np.uint8)
    weights = to_bf16(normal(g, h, c)), to_bf16(normal(g, h, c))
    check(*use("engram_gate"), (x, kv, *weights, image), eps=1e-20)


def test_engram_gate_of_a_stream_too_large_to_square_is_nan() -> None:
    """inf * 0 in the statistic. The sign bit of that NaN differs between machines, so it must stay
    a NaN, not become one of two small gates."""
    x, kv = np.full((1, 1, 32), 1e30, np.float32), np.full((1, 64), 1e30, np.float32)
    one = to_bf16(np.ones((1, 32), np.float32))
    arrays = (to_bf16(x), to_bf16(kv), one, one, np.zeros(1, np.uint8))
    (expected,) = OPS["engram_gate"].run(arrays, {"eps": 1e-20})
    (got,) = run_kernel(*use("engram_gate"), arrays, {"eps": 1e-20})
    assert np.isnan(expected.astype(np.float32)).all() and np.isnan(got.astype(np.float32)).all()


def rows_of_settings(g: np.random.Generator, q: int, vocab: int) -> tuple[Array, ...]:
    """Every kind of filter, alone and together, on and off."""
    pick = g.choice
    return (pick([0.0, 0.3, 1.0, 2.5], q).astype(np.float32),
            pick([0, 1, 5, vocab, 10 * vocab], q).astype(np.int32),
            pick([0.0, 0.3, 0.9, 1.0], q).astype(np.float32),
            pick([0.0, 0.05, 1.0], q).astype(np.float32),
            g.integers(0, 2**63, q).astype(np.uint64) * np.uint64(2),
            g.integers(0, 2**31 - 1, q).astype(np.int32))


@pytest.mark.parametrize("vocab", [1, 16, 203])
def test_sample(vocab: int) -> None:
    g, q = rng(vocab), 160
    logits = normal(g, q, vocab, scale=3)
    logits[:40] = np.round(logits[:40])  # ties
    logits[30:60][g.random((30, vocab)) < 0.5] = -np.inf
    logits[60:80][g.random((20, vocab)) < 0.1] = np.nan
    logits[80, :] = -np.inf
    logits[81, :] = np.nan
    logits[82:90, :vocab // 2 + 1] = np.inf
    logits[90:100] = 0
    logits[90:100, ::2] = -0.0
    check(*use("sample"), (logits, *rows_of_settings(g, q, vocab)), symbolic="Q", purpose=3)


def test_sample_no_rows() -> None:
    arrays = (np.zeros((0, 7), np.float32), *rows_of_settings(rng(), 0, 7))
    check(*use("sample"), arrays, symbolic="Q", purpose=0)


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (37, 5), (64, 20)])
def test_logprobs(vocab: int, k: int) -> None:
    g = rng(vocab)
    logits = normal(g, 9, vocab, scale=5)
    logits[4:] = np.round(logits[4:])
    logits[6] = 2.0
    logits[7, 1:] = -np.inf
    token = g.integers(0, vocab, 9).astype(np.int32)
    check(*use("logprobs"), (logits, token), symbolic="Q", k=k)


def test_logprobs_rank_nan_last() -> None:
    """Case B8: the best ones are those of the finite logits; the log-sum, and so all, is NaN."""
    logits = normal(rng(), 3, 20, scale=5)
    logits[0, 0] = logits[1, [3, 4, 5]] = logits[2, 19] = np.nan
    token = np.array([1, 3, 0], np.int32)
    chosen, ids, top = run_kernel(*use("logprobs"), (logits, token), {"k": 4}, symbolic="Q")
    expected = np.argsort(np.where(np.isnan(logits), np.inf, -logits), axis=1, kind="stable")
    assert (ids == expected[:, :4]).all()
    assert np.isnan(chosen).all() and np.isnan(top).all()


@pytest.mark.parametrize("r", [0, 3])
def test_draft_logits(r: int) -> None:
    g = rng(r)
    check(*use("draft_logits"), (normal(g, r * 5, 33), normal(g, r, 33)), symbolic="",
          step=4, block=5)


@pytest.mark.parametrize("r", [0, 3])
def test_take_step(r: int) -> None:
    check(*use("take_step"), (to_bf16(normal(rng(r), r * 5, 32)),), symbolic="", step=2, block=5)


@pytest.mark.parametrize("r", [0, 4])
def test_confidence(r: int) -> None:
    temperatures = np.array([1, 0.7, 1.9], np.float32)
    check(*use("confidence"), (normal(rng(r), r, 1, scale=4), temperatures), symbolic="R", step=1)
