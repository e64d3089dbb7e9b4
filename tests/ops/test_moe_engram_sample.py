"""References of experts, Engram, sampling and drafting against independent formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.numerics.formats import (
    dequantize_fp4,
    dequantize_fp8,
    f32,
    quantize_fp4_ue8m0,
    quantize_fp8,
    to_bf16,
)
from deepinfer.ops import draft, engram, moe, sample

Array = np.ndarray[Any, Any]


def normal(g: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (g.standard_normal(shape) * scale).astype(np.float32)


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def test_route_matches_float64_and_rows_are_independent() -> None:
    g = np.random.default_rng(0)
    z, bias, bias_vl = normal(g, 40, 16, scale=3), normal(g, 16), normal(g, 16)
    image = (g.random(40) < 0.3).astype(np.uint8)
    idx, weight = moe.route(z, bias, bias_vl, image, k=4, scale=1.5)
    s = np.sqrt(np.log1p(np.exp(z.astype(np.float64))))
    key = s + np.where(image[:, None], bias_vl, bias)
    assert (idx == np.sort(np.argsort(-key, axis=1)[:, :4], axis=1)).all()
    chosen = np.take_along_axis(s, idx, axis=1)
    np.testing.assert_allclose(weight, 1.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    for i in (0, 17, 39):
        alone = moe.route(z[i:i + 1], bias, bias_vl, image[i:i + 1], k=4, scale=1.5)
        assert same(alone[0], idx[i:i + 1]) and same(alone[1], weight[i:i + 1])
    other = moe.route(z, bias, bias_vl, 1 - image, k=4, scale=1.5)[0]
    assert (other != idx).any()  # the two biases choose differently


def test_route_ties_take_the_lower_expert_and_one_expert_is_not_normalised() -> None:
    z, zero, text = np.ones((1, 6), np.float32), np.zeros(6, np.float32), np.zeros(1, np.uint8)
    assert moe.route(z, zero, zero, text, k=3, scale=1.0)[0].tolist() == [[0, 1, 2]]
    weight = moe.route(z, zero, zero, text, k=1, scale=2.0)[1]
    np.testing.assert_allclose(weight, 2 * np.sqrt(np.log1p(np.e)), rtol=1e-6)


def expert_case(n: int = 5, experts: int = 4, c: int = 64, i: int = 32) -> dict[str, Array]:
    g = np.random.default_rng(7)
    case = dict(zip(("q", "sf"), quantize_fp8(to_bf16(normal(g, n, c, scale=2))), strict=True))
    for name, shape in (("1", (experts, i, c)), ("3", (experts, i, c)), ("2", (experts, c, i))):
        case["w" + name], case["s" + name] = quantize_fp4_ue8m0(to_bf16(normal(g, *shape)))
    case["idx"] = np.array([np.sort(g.choice(experts, 2, False)) for _ in range(n)], np.int32)
    case["weight"] = np.abs(normal(g, n, 2))
    return case


def gate_up(case: dict[str, Array], limit: float) -> Array:
    names = ("q", "sf", "w1", "s1", "w3", "s3", "idx", "weight")
    return moe.expert_gate_up(*(case[n] for n in names), limit=limit)


def test_expert_gate_up_matches_float64() -> None:
    case = expert_case()
    got = f32(gate_up(case, 10.0)).reshape(5, 2, -1)
    x = f32(dequantize_fp8(case["q"], case["sf"])).astype(np.float64)
    w1, w3 = (f32(dequantize_fp4(case["w" + n], case["s" + n], 32)) for n in "13")
    for n in range(5):
        for j, e in enumerate(case["idx"][n]):
            gate, up = np.minimum(w1[e] @ x[n], 10), np.clip(w3[e] @ x[n], -10, 10)
            expected = case["weight"][n, j] * gate / (1 + np.exp(-gate)) * up
            np.testing.assert_allclose(got[n, j], expected, rtol=0.05, atol=0.05)


def test_expert_clamps_gate_above_only_and_up_on_both_sides() -> None:
    weight = np.ones(1, np.float32)
    one = moe._swiglu(np.float32([[50, -50, 50]]), np.float32([[-50, 50, 0.5]]), weight, 10.0)
    silu = 10 / (1 + np.exp(-10.0))
    np.testing.assert_allclose(f32(one)[0], [-10 * silu, -50 * np.exp(-50.0) * 10, 0.5 * silu],
                               rtol=0.01)


def test_expert_rows_are_independent() -> None:
    case = expert_case()
    whole = gate_up(case, 10.0)
    q, sf = quantize_fp8(whole)
    y = moe.expert_down(q, sf, case["w2"], case["s2"], case["idx"])
    for n in (0, 4):
        part = {k: v[n:n + 1] if k in ("q", "sf", "idx", "weight") else v for k, v in case.items()}
        rows = slice(2 * n, 2 * n + 2)
        assert same(gate_up(part, 10.0), whole[rows])
        alone = moe.expert_down(q[rows], sf[rows], case["w2"], case["s2"], part["idx"])
        assert same(alone, y[rows])


def test_expert_reduce_adds_in_ascending_order_and_the_shared_expert_last() -> None:
    big = 2.0**30
    y = to_bf16(np.float32([[big], [1], [-big]]))
    idx, shared = np.int32([[0, 1, 2]]), to_bf16(np.float32([[3]]))
    assert f32(moe.expert_reduce(y, idx, shared))[0, 0] == 3  # the 1 is lost against 2^30
    assert f32(moe.expert_reduce(y[[0, 2, 1]], idx, shared))[0, 0] == 4


def test_group_rows_is_a_stable_sort_by_expert() -> None:
    idx = np.int32([[1, 3], [0, 3], [1, 2]])
    order, offsets = moe.group_rows(idx, experts=5)
    assert order.tolist() == [2, 0, 4, 5, 1, 3] and offsets.tolist() == [0, 1, 3, 4, 6, 6]


TINY = {1: ((14831304026200453, 936705081716061, 6959601268494069, 14319439928568407),
            (101, 103, 107, 109, 113, 127)),
        4: ((15920565596405625, 975009545214551, 14254820516660309, 3668506406680991),
            (131, 137, 139, 149, 151, 157))}
GOLDEN = {1: ([67, 142, 214, 321, 500, 605], [89, 126, 283, 341, 472, 644]),
          4: ([123, 173, 403, 538, 576, 842], [69, 208, 322, 481, 616, 781])}


def hashed(lookback: list[list[int]], image: list[int], layer: int = 1) -> Array:
    """Rows for given classes; the token of class c is c + 1, so an unmapped id would show."""
    multipliers, primes = TINY[layer]
    tokens = np.array(lookback, np.int32)
    return engram.engram_hash(
        np.where(tokens < 0, tokens, tokens + 1), np.array(image, np.uint8),
        np.roll(np.arange(513, dtype=np.int32), 1),
        multipliers=multipliers, primes=primes, heads=2, pad=3, columns=6)


@pytest.mark.parametrize("layer", [1, 4])
def test_engram_hash_golden_rows(layer: int) -> None:
    """Classes 5 300 11 511 0: the rows of the first and the last one. Source: spec §8."""
    rows = hashed([[5, -1, -1, -1], [0, 511, 11, 300]], [0, 0], layer)
    assert rows.tolist() == [list(row) for row in GOLDEN[layer]]


def test_engram_hash_blocks_everything_behind_a_block() -> None:
    pad = 2
    rows = hashed([[9, -1, 7, 7], [9, pad, pad, pad], [9, 600, 7, 7], [5, 6, 7, 8],
                   [pad, pad, pad, pad], [9, 8, -1, 7]], [0, 0, 0, 1, 0, 0])
    assert (rows[0] == rows[1]).all() and (rows[2] == rows[1]).all()
    assert (rows[3] == rows[4]).all()  # an image token blocks itself
    assert (rows[5, :2] != rows[1, :2]).any()


def test_engram_gather_dequantises_rows_side_by_side() -> None:
    g = np.random.default_rng(3)
    table, sf = quantize_fp8(normal(g, 20, 64))
    rows = np.int64([[3, 19], [0, 3]])
    got = f32(engram.engram_gather(rows, table, sf))
    assert got.shape == (2, 128)
    assert (got[:, 64:] == f32(dequantize_fp8(table, sf))[[19, 3]]).all()


def test_engram_gate_matches_float64_with_one_statistic_per_stream() -> None:
    g = np.random.default_rng(4)
    n, h, c = 6, 3, 64
    x = to_bf16(normal(g, n, h, c) * np.float32([1, 10, 0.1])[:, None])
    kv = to_bf16(normal(g, n, (h + 1) * c))
    weights = to_bf16(normal(g, h, c)), to_bf16(normal(g, h, c))
    image = np.uint8([0, 1, 0, 0, 0, 0])
    y = engram.engram_gate(x, kv, *weights, image, eps=1e-20)
    assert same(y[1], x[1])
    v, key = f32(x).astype(np.float64), f32(kv[:, :h * c]).reshape(n, h, c).astype(np.float64)
    dot = (v * (f32(weights[0]) * f32(weights[1])) * key).sum(-1) / np.sqrt(c)
    dot /= np.sqrt((v * v).mean(-1)) * np.sqrt((key * key).mean(-1))
    gate = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(np.maximum(abs(dot), 1e-6))))
    expected = v + gate[..., None] * f32(kv[:, None, h * c:])
    np.testing.assert_allclose(f32(y)[image == 0], expected[image == 0], rtol=0.01, atol=0.01)
    alone = engram.engram_gate(x[3:4], kv[3:4], *weights, image[3:4], eps=1e-20)
    assert same(alone, y[3:4])


def draw(logits: Array, *, temperature: float = 1, top_k: int = 0, top_p: float = 1,
         min_p: float = 0, seed: int = 5, positions: range = range(1)) -> Array:
    """The tokens chosen for one row of logits at several positions."""
    q = len(positions)
    rows = np.broadcast_to(np.asarray(logits, np.float32), (q, len(logits))).copy()
    return sample.sample(rows, np.full(q, temperature, np.float32), np.full(q, top_k, np.int32),
                         np.full(q, top_p, np.float32), np.full(q, min_p, np.float32),
                         np.full(q, seed, np.uint64), np.array(positions, np.int32), purpose=0)


def support(logits: Any, **settings: Any) -> set[int]:
    return set(draw(logits, positions=range(400), **settings).tolist())


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    assert draw([1, 3, 3, 0], temperature=0)[0] == 1
    assert draw([np.nan, -np.inf, -5, np.nan], temperature=0)[0] == 2
    assert draw([-np.inf, np.nan], temperature=0)[0] == 0
    assert draw([-np.inf, np.nan], temperature=1)[0] == 0


def test_samples_follow_the_tempered_softmax() -> None:
    logits, n = np.float32([0, 1, -1, 2, -np.inf]), 4000
    counts = np.bincount(draw(logits, temperature=2, positions=range(n)), minlength=5)
    p = np.exp(logits / 2) / np.exp(logits / 2).sum()
    assert counts[4] == 0
    chi = ((counts[:4] - n * p[:4]) ** 2 / (n * p[:4])).sum()
    assert chi < 20  # 3 degrees of freedom: p = 0.0002


def test_the_filters_keep_exactly_what_they_should() -> None:
    flat = np.zeros(4)
    assert support(flat) == {0, 1, 2, 3}
    assert support(flat, top_k=2) == {0, 1}
    assert support(flat, top_p=0.5) == {0, 1}
    assert support(flat, top_p=0.51) == {0, 1, 2}
    assert support(flat, top_p=0.0) == {0}
    assert support(flat, top_k=2, top_p=0.5) == {0}  # top-p of the mass that top-k kept
    assert support([0, 2, 1, 2.5], top_k=2) == {1, 3}
    assert support(np.log([1, 0.5, 0.2]), min_p=0.4) == {0, 1}
    assert support(np.log([1, 0.5, 0.2]), min_p=1.0) == {0}


def test_top_p_sums_serially_from_the_most_likely() -> None:
    """1 + e + e + ... stays 1 in a serial fp32 sum, so a goal just above 1 is never reached."""
    logits = np.float32([0] + [-17.5] * 300)  # e^-17.5 is below half an ulp of 1
    e = np.exp(logits.astype(np.float64))
    top_p = np.float32(1 - 2e-6)
    kept = sample._kept(logits, e.astype(np.float32), 0, top_p, 0)
    assert 1 + np.sum(np.cumsum(e)[:-1] < top_p * e.sum()) < 280  # what an exact sum would keep
    assert kept.all()


def test_a_filter_changes_nothing_but_who_takes_part() -> None:
    g = np.random.default_rng(9)
    logits = normal(g, 50)
    free = draw(logits, positions=range(200))
    cut = draw(logits, top_k=10, positions=range(200))
    best = np.argsort(-logits)[:10]
    stayed = np.isin(free, best)
    assert 0 < stayed.sum() < 200 and (free[stayed] == cut[stayed]).all()
    assert np.isin(cut, best).all()


def test_extreme_logits_and_temperatures() -> None:
    assert draw([0, np.inf, 1])[0] == 1
    assert draw([3e38, -3e38, 1], temperature=1e-30)[0] == 0
    assert support([0, 50, 1, 0], temperature=1e6) == {0, 1, 2, 3}


def test_rows_and_seeds_are_independent() -> None:
    g = np.random.default_rng(2)
    logits = normal(g, 8, 32)
    settings = [np.full(8, v, t) for v, t in ((1, np.float32), (20, np.int32), (0.9, np.float32),
                                              (0.01, np.float32))]
    seed, position = np.arange(8, dtype=np.uint64), np.arange(8, dtype=np.int32)
    whole = sample.sample(logits, *settings, seed, position, purpose=1)
    for i in range(8):
        row = slice(i, i + 1)
        alone = sample.sample(logits[row], *(s[row] for s in settings), seed[row], position[row],
                              purpose=1)
        assert alone[0] == whole[i]
    flat = np.zeros(64)
    assert len({tuple(draw(flat, seed=s, positions=range(20))) for s in range(10)}) == 10


def test_logprobs_match_float64() -> None:
    g = np.random.default_rng(1)
    logits = normal(g, 5, 40, scale=4)
    logits[2, 7] = logits[2, 30] = logits[2].max() + 1
    token = np.int32([0, 39, 30, 5, 6])
    chosen, ids, top = sample.logprobs(logits, token, k=3)
    x = logits.astype(np.float64)
    expected = x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(chosen, expected[np.arange(5), token], rtol=1e-5, atol=1e-5)
    assert (ids == np.argsort(-expected, axis=1, kind="stable")[:, :3]).all()
    assert ids[2, :2].tolist() == [7, 30]
    np.testing.assert_allclose(top, np.take_along_axis(expected, ids, 1), rtol=1e-5, atol=1e-5)
    for got, want in zip(sample.logprobs(logits[2:3], token[2:3], k=3), (chosen, ids, top),
                         strict=True):
        assert same(got, want[2:3])


def test_draft_step_rows() -> None:
    g = np.random.default_rng(5)
    u, bias = normal(g, 6, 4), normal(g, 2, 4)
    y = draft.draft_logits(u, bias, step=1, block=3)
    assert same(y, np.stack([u[1] + bias[0], u[4] + bias[1]]))
    x = to_bf16(u)
    assert same(draft.take_step(x, step=2, block=3), x[[2, 5]])


def test_confidence_is_a_calibrated_sigmoid() -> None:
    z = np.float32([[0], [3], [-2]])
    got = draft.confidence(z, np.float32([1, 2]), step=1)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-z[:, 0] / 2)), rtol=1e-6)
