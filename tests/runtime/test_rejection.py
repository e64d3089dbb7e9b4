"""Rejection and block verification: equal in distribution to the target, checked by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from deepinfer.ops import sample
from deepinfer.runtime import rejection as r
from deepinfer.runtime.rejection import Filters, Verdict, verify

VOCAB, DRAFTS = 3, 2
METHODS = ("rejection", "block")
Law = dict[tuple[int, ...], np.ndarray]


def law(rng: np.random.Generator, sharp: float = 1.5) -> Law:
    """A random distribution after every prefix of up to DRAFTS tokens, some with zeros."""
    made = {}
    for length in range(DRAFTS + 1):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            p = np.exp(sharp * rng.standard_normal(VOCAB))
            if rng.random() < 0.2:
                p[rng.integers(VOCAB)] = 0
            made[prefix] = p / p.sum()
    return made


def rows(of: Law, tokens: tuple[int, ...], count: int) -> np.ndarray:
    return np.array([of[tokens[:i]] for i in range(count)])


def counts(method: str, chances: np.ndarray) -> Iterator[tuple[int, float]]:
    """(accepted, its chance), from what ``COUNTS`` makes of draws on either side of each chance."""
    for passed in itertools.product((True, False), repeat=len(chances)):
        weight = np.prod([c if ok else 1 - c for c, ok in zip(chances, passed, strict=True)])
        draws = np.array([c - 1e-9 if ok else c for c, ok in zip(chances, passed, strict=True)])
        yield r.COUNTS[method](chances, draws), float(weight)


def outcomes(method: str, p: Law, q: Law, residual: str | None = None
             ) -> tuple[dict[tuple[int, ...], float], float]:
    """The joint law of the next DRAFTS + 1 tokens under a method, and the mean accepted."""
    found: dict[tuple[int, ...], float] = dict.fromkeys(
        itertools.product(range(VOCAB), repeat=DRAFTS + 1), 0.0)
    mean = 0.0
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        drawn = float(np.prod([q[drafts[:i]][x] for i, x in enumerate(drafts)]))
        if not drawn:
            continue
        ps, qs = rows(p, drafts, DRAFTS + 1), rows(q, drafts, DRAFTS)
        for accepted, chance in counts(method, r.CHANCES[method](drafts, ps, qs)):
            mean += drawn * chance * accepted
            next_token = r.after(drafts, ps, qs, accepted, residual or method)
            for rest in itertools.product(range(VOCAB), repeat=DRAFTS + 1 - accepted):
                tokens = drafts[:accepted] + rest
                tail = np.prod([p[tokens[:i]][tokens[i]]
                                for i in range(accepted + 1, DRAFTS + 1)])
                found[tokens] += drawn * chance * next_token[rest[0]] * float(tail)
    return found, mean


def target(p: Law) -> dict[tuple[int, ...], float]:
    return {tokens: float(np.prod([p[tokens[:i]][x] for i, x in enumerate(tokens)]))
            for tokens in itertools.product(range(VOCAB), repeat=DRAFTS + 1)}


def distance(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return max(abs(a[t] - b[t]) for t in a)


@pytest.mark.parametrize("method", METHODS)
def test_the_output_has_exactly_the_targets_distribution(method):
    """Every draft, every outcome of every draw, every next token: the joint law is the target's."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        p, q = law(rng), law(rng)
        found, mean = outcomes(method, p, q)
        assert distance(found, target(p)) < 1e-12
        assert 0 < mean < DRAFTS


def test_the_enumeration_catches_a_wrong_residual():
    """Block acceptance with the residual of the other rule is a different distribution."""
    rng = np.random.default_rng(2)
    p, q = law(rng), law(rng)
    assert distance(outcomes("block", p, q, residual="rejection")[0], target(p)) > 1e-3


def test_block_accepts_at_least_as_much_as_draft_by_draft():
    rng = np.random.default_rng(3)
    gains = []
    for _ in range(15):
        p, q = law(rng), law(rng)
        gains.append(outcomes("block", p, q)[1] - outcomes("rejection", p, q)[1])
    assert min(gains) > -1e-12 and max(gains) > 0.01


@pytest.mark.parametrize("method", METHODS)
def test_equal_distributions_accept_everything(method):
    p = law(np.random.default_rng(4))
    found, mean = outcomes(method, p, p)
    assert mean == pytest.approx(DRAFTS, abs=1e-12) and distance(found, target(p)) < 1e-12


LOGITS = np.random.default_rng(5).standard_normal((2, 3, 4)).astype(np.float32)  # [p or q, row, V]


def drawn(seed: int, filters: Filters, position: int = 7) -> list[int]:
    """Drafts as the draft phase samples them."""
    one = np.ones(2, np.float32)
    return sample.sample(
        LOGITS[1, :2], one * np.float32(filters.temperature), np.full(2, filters.top_k, np.int32),
        one * np.float32(filters.top_p), one * np.float32(filters.min_p),
        np.full(2, r.draft_seed(seed, position), np.uint64),
        np.array([position, position + 1], np.int32), purpose=0).tolist()


@pytest.mark.parametrize(("method", "filters"), [
    ("block", Filters(1.0)), ("rejection", Filters(0.7, top_k=3, top_p=0.9))], ids=str)
def test_sampled_tokens_follow_the_target_over_many_seeds(method, filters):
    """First two tokens of 500 seeds against the filtered target; rows do not depend on tokens."""
    n, seen, accepted = 500, np.zeros((4, 4)), []
    for seed in range(n):
        drafts = drawn(seed, filters)
        got = verify(drafts, LOGITS[0], LOGITS[1, :2], filters, seed=seed, position=7,
                     method=method)
        accepted.append(got.accepted)
        tokens = [*drafts[:got.accepted], got.token]
        if len(tokens) < 2:  # the next step is a plain one
            tokens.append(verify([], LOGITS[0, 1:2], LOGITS[1, :0], filters, seed=seed, position=8,
                                 method=method).token)
        seen[tokens[0], tokens[1]] += 1
    p = r.distributions(LOGITS[0], filters)
    expected = n * np.outer(p[0], p[1])
    assert seen[expected == 0].sum() == 0
    here = expected > 0
    chi = ((seen[here] - expected[here]) ** 2 / expected[here]).sum()
    assert chi < 45, chi  # at most 15 degrees of freedom: p < 0.0001
    assert {0, 1, 2} == set(accepted)  # every outcome occurred


def test_the_same_drafts_and_seed_give_the_same_verdict_and_another_seed_another():
    filters = Filters(1.0)
    for method in METHODS:
        verdicts = []
        for seed in range(40):
            one, two = (verify([1, 2], LOGITS[0], LOGITS[1, :2], filters, seed=seed, position=7,
                               method=method) for _ in range(2))
            assert one == two
            verdicts.append(one)
        assert len(set(verdicts)) > 3
    seeds = {r.draft_seed(seed, position) for seed in range(20) for position in range(20)}
    assert len(seeds) == 400 and not seeds & set(range(20))


@pytest.mark.parametrize("method", METHODS)
def test_greedy_takes_the_targets_own_tokens(method):
    chosen = [int(row.argmax()) for row in LOGITS[0]]
    for drafts, accepted in ((chosen[:2], 2), ([chosen[0], chosen[1] ^ 1], 1),
                             ([chosen[0] ^ 1, chosen[1]], 0)):
        got = verify(drafts, LOGITS[0], LOGITS[1, :2], Filters(0.0), seed=1, position=7,
                     method=method)
        assert got == Verdict(accepted, chosen[accepted])


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_q_excludes_is_refused(method):
    """q = 0 there: a drafter that lied. What is left is the target, or all of it where p = q."""
    p = np.log(np.array([[0.5, 0.5, 0], [0.2, 0.3, 0.5], [1, 1, 1]], np.float32) + 1e-38)
    q = np.full((2, 3), -np.inf, np.float32)
    q[0, 0] = q[1, 1] = 0
    chances = r.CHANCES[method]([2, 1], r.distributions(p, Filters(1)),
                                r.distributions(q, Filters(1)))
    assert chances.tolist() == [0, 0] if method == "block" else chances[0] == 0
    got = verify([2, 1], p, q, Filters(1), seed=3, position=7, method=method)
    assert got == Verdict(0, 1)  # max(p - q, 0) has only token 1
    same = verify([2], p[:2], p[:1], Filters(1.0, top_k=2), seed=3, position=7, method=method)
    assert same.accepted == 0 and same.token in (0, 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_without_chance_is_accepted_as_often_as_the_target_would_say_so(method):
    """All its mass on its draft: accepted with the target's probability of it."""
    p = np.log(np.array([[0.25, 0.75], [0.5, 0.5]], np.float32))
    q = np.array([[0, -np.inf]], np.float32)
    got = [verify([0], p, q, Filters(1), seed=seed, position=4, method=method)
           for seed in range(400)]
    assert 70 < sum(v.accepted for v in got) < 130
    assert {v.token for v in got if not v.accepted} == {1}


def test_rows_of_nothing_give_token_0_as_the_compiled_sampler_does():
    empty = np.array([[-np.inf, np.nan, -np.inf]], np.float32)
    assert r.distributions(empty, Filters(1)).tolist() == [[1, 0, 0]]
    got = verify([0], np.repeat(empty, 2, axis=0), empty, Filters(1), seed=1, position=0,
                 method="block")
    assert got == Verdict(1, 0)
    assert r.best(empty[0]) == 0


def test_the_filters_keep_what_the_compiled_sampler_keeps():
    rng, proper = np.random.default_rng(6), 0
    for _ in range(150):
        x = np.round(rng.standard_normal(17) * 2).astype(np.float32)  # with ties
        x[rng.random(17) < 0.2] = rng.choice([-np.inf, np.nan])
        f = Filters(float(rng.choice([0.3, 1, 2])), int(rng.choice([0, 1, 4, 40])),
                    float(rng.choice([0.3, 0.8, 1])), float(rng.choice([0, 0.05, 1])))
        top = np.max(x[x > -np.inf])
        with np.errstate(invalid="ignore"):
            e = sample.exp(np.where(x == top, np.float32(0),
                                    (x - top) / np.float32(f.temperature)))
            kept = sample._kept(x, e, f.top_k, np.float32(f.top_p), np.float32(f.min_p))
        p = r.distributions(x[None], f)[0]
        assert ((p > 0) == kept).all()
        np.testing.assert_allclose(p[kept], e[kept] / e[kept].astype(np.float64).sum(), rtol=1e-12)
        proper += 1 < kept.sum() < np.sum(x > -np.inf)
    assert proper > 20


def test_infinite_and_extreme_logits():
    one = r.distributions(np.array([[0, np.inf, 1]], np.float32), Filters(1))
    assert one.tolist() == [[0, 1, 0]]
    cold = r.distributions(np.array([[3e38, -3e38, 1]], np.float32), Filters(1e-30))
    assert cold.tolist() == [[1, 0, 0]]
