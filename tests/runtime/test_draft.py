"""Acceptance, widths and their budget, statistics, calibration."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import CheckpointError, ProgramError, RequestError
from deepinfer.runtime.calibration import load_calibration
from deepinfer.runtime.cost import CostCurve
from deepinfer.runtime.draft import (
    LEAST,
    AcceptStats,
    WidthPolicy,
    accept,
    adaptive_widths,
    check_width,
    survival,
)

FLAT = CostCurve.flat()
STEEP = CostCurve(((1, 1.0), (2, 100.0)))  # a row beside the first costs 99 times as much


def line(base: float, row: float, most: int = 64) -> CostCurve:
    return CostCurve(tuple((n, base + row * n) for n in range(1, most + 1)))


@pytest.mark.parametrize(("drafts", "chosen", "accepted"), [
    ([], [7], 0), ([7], [7, 1], 1), ([7], [8, 1], 0), ([1, 2, 3], [1, 2, 3, 4], 3),
    ([1, 2, 3], [1, 9, 3, 4], 1), ([1, 2, 3], [9, 2, 3, 4], 0), ([0, 0], [0, 0, 0], 2),
])
def test_drafts_count_until_the_first_that_the_target_did_not_pick(drafts, chosen, accepted):
    """C3: a later match means nothing, and the next token is the one picked where it stopped."""
    assert accept(drafts, chosen) == accepted


def test_survival_multiplies_in_order_in_float64():
    confidences = [np.float32(c) for c in (0.9, 0.7, 0.3)]
    a, b, c = map(float, confidences)
    assert survival(confidences) == (a, a * b, a * b * c)
    assert survival([]) == ()


@pytest.mark.parametrize("wrong", [math.nan, -0.1, 1.5, math.inf])
def test_what_is_no_probability_survives_never(wrong):
    assert survival([0.5, wrong, 0.5]) == (0.5, 0, 0)


def test_drafts_after_an_end_of_text_survive_never():
    """The end itself may well be right; C4: what follows it is never wanted."""
    assert survival([0.9, 0.8, 0.7], [5, 2, 6], eos={2}) == (0.9, 0.9 * 0.8, 0)
    assert survival([0.9, 0.8, 0.7], [5, 6, 2], eos={2})[2] > 0


def test_a_flat_curve_verifies_all_and_a_steep_one_nothing():
    newest = [survival([0.5] * 5), survival([0.01] * 5), ()]
    assert adaptive_widths(newest, newest, 5, FLAT) == [5, 3, 0]  # 0.01^4 is below LEAST
    assert adaptive_widths(newest, newest, 5, STEEP) == [0, 0, 0]
    assert adaptive_widths([], [], 5, FLAT) == []


def test_the_budget_is_of_the_older_rates_and_the_newest_share_it():
    curve = line(10, 1)
    old_good, old_bad = survival([0.9] * 4), survival([0.05] * 4)
    sure, unsure = survival([0.95] * 4), survival([0.2] * 4)
    budget = sum(adaptive_widths([sure, sure], [old_good, old_bad], 4, curve))
    assert 0 < budget < 8
    assert adaptive_widths([unsure, sure], [old_good, old_bad], 4, curve) == [
        max(0, budget - 4), min(4, budget)]
    assert adaptive_widths([sure, unsure], [old_bad, old_good], 4, curve) == [
        min(4, budget), max(0, budget - 4)]


def test_rates_that_are_missing_count_as_1_where_there_are_drafts():
    curve = line(1, 1)  # pays only for certain drafts beside several requests
    newest = [survival([0.5] * 3), ()]
    assert adaptive_widths(newest, [None, None], 3, curve) == [3, 0]
    assert adaptive_widths(newest, [(0.1,), None], 3, line(0.1, 1)) == adaptive_widths(
        newest, [(0.1, 1.0, 1.0), None], 3, line(0.1, 1))
    assert adaptive_widths(newest, [(0.1, 0.01, 0.001), None], 3, curve) == [0, 0]


def test_there_is_no_early_stop():
    """A dear second row (a new tile, say) hides that the third and fourth come for nothing."""
    curve = CostCurve(((1, 10.0), (2, 19.0), (3, 19.0), (4, 19.0)))
    rates = survival([0.8, 0.99, 0.99])
    assert 1.8 / 19 < 1 / 10 < (1 + sum(rates)) / 19
    assert adaptive_widths([rates], [rates], 3, curve) == [3]


def test_ties_go_to_the_earlier_position_then_to_the_earlier_request():
    newest = [(0.5, 0.5), (0.5, 0.5), (0.5,)]
    only = [CostCurve(((3 + k, 1.0), (4 + k, 1e9))) for k in range(6)]  # k drafts come for nothing
    assert [adaptive_widths(newest, [None] * 3, 2, curve) for curve in only] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1]]
    curve = CostCurve(((1, 1.0), (2, 2.0)))
    assert adaptive_widths([(1.0,)], [None], 1, curve) == [0]  # 2 for 2 is no better than 1 for 1


def test_hopeless_drafts_are_dropped_and_widths_are_bounds():
    assert adaptive_widths([(LEAST, LEAST / 2)], [None], 2, FLAT) == [1]
    assert adaptive_widths([(1.0,) * 5] * 3, [None] * 3, [5, 2, 0], FLAT) == [5, 2, 0]
    assert adaptive_widths([(1.0,) * 5], [(1.0,) * 9], 3, FLAT) == [3]


def test_rows_of_others_are_paid_anyway_and_make_drafts_cheap_in_comparison():
    curve = CostCurve(((1, 1.0), (100, 100.0)))
    rates = survival([0.3] * 3)
    assert adaptive_widths([rates], [rates], 3, curve) == [0]
    assert adaptive_widths([rates], [rates], 3, curve, reserve=60) == [3]
    tile = CostCurve(((1, 1.0), (64, 64.0), (65, 640.0)))  # the rows of others fill a tile
    assert adaptive_widths([rates], [rates], 3, tile, reserve=61) == [2]


rates_lists = st.lists(st.lists(st.sampled_from([0.0, 1e-7, 0.1, 0.5, 0.9, 1.0]), max_size=3),
                       min_size=1, max_size=3)


@given(rates_lists, rates_lists, st.sampled_from([FLAT, STEEP, line(3, 1), line(0.2, 1)]),
       st.integers(0, 3), st.integers(0, 4))
def test_widths_are_the_best_of_all_widths(newest, older, curve, width, reserve):
    """Against every possible choice: no other budget is faster by the older rates, and no other
    choice of as many drafts is better by the newest."""
    fresh = [survival(c)[:width] for c in newest]
    known: list[tuple[float, ...]] = []
    for index, rates in enumerate(fresh):
        past = survival(older[index])[:len(rates)] if index < len(older) else ()
        known.append(past + (1.0,) * (len(rates) - len(past)))
    found = adaptive_widths([survival(c) for c in newest], known, width, curve, reserve)
    assert found == adaptive_widths([survival(c) for c in newest], known, width, curve, reserve)
    assert all(0 <= w <= len(rates) for w, rates in zip(found, fresh, strict=True))

    def tokens(rates: list[tuple[float, ...]], widths: tuple[int, ...] | list[int]) -> float:
        return sum(sum(r[:w]) for r, w in zip(rates, widths, strict=True))

    choices = list(product(*(range(len(rates) + 1) for rates in fresh)))
    rows = reserve + len(fresh)
    speeds: dict[int, float] = {}
    for widths in choices:
        speed = (len(fresh) + tokens(known, widths)) / curve.cost(rows + sum(widths))
        speeds[sum(widths)] = max(speed, speeds.get(sum(widths), 0))
    best = max(speeds.values())
    budget = min(k for k, speed in speeds.items() if speed >= best * (1 - 1e-12))
    hopeless = sum(rate < LEAST for each in fresh for rate in each)
    assert min(budget, sum(map(len, fresh)) - hopeless) == sum(found)
    equals = [c for c in choices if sum(c) == sum(found)]
    assert tokens(fresh, found) >= max(tokens(fresh, c) for c in equals) - 1e-9


# --- the policy


def test_every_width_up_to_the_block_works_whatever_the_stages():
    """C6: 3 stages, block 5; 1, 3 and 5 are accepted, 6 and 7 refused, unset is 5."""
    for width in (0, 1, 2, 3, 4, 5):
        assert WidthPolicy(block=5, width=width).width == width
    assert WidthPolicy(block=5).width == 5
    for width in (6, 7, -1, True, 2.0, "5"):
        with pytest.raises(RequestError, match=r"draft_width is .*, expected an int in 0..5: the "
                                               "model drafts 5 at once") as refused:
            WidthPolicy(block=5, width=width)
        assert "5 or less" in refused.value.next
    with pytest.raises(RequestError, match="expected an int in 0..0: the model has no draft stage"):
        check_width(3, 0)
    assert check_width(None, 0) == 0


def test_a_request_may_ask_for_its_own_width():
    policy = WidthPolicy("fixed", block=5, width=2)
    assert [policy.width_of(w) for w in (None, 0, 1, 5)] == [2, 0, 1, 2]
    with pytest.raises(RequestError, match="draft_width is 6"):
        policy.width_of(6)
    assert WidthPolicy("off", block=5).width_of(4) == 0
    with pytest.raises(RequestError, match="draft is 'auto', expected 'fixed', 'adaptive' or"):
        WidthPolicy("auto", block=5)


def test_rings_must_hold_what_the_width_overwrites():
    """C1: the state is checked for the real width when the engine starts."""
    facts = {"block": 5, "window": 8, "ring": 12, "eos": [1]}
    assert WidthPolicy.of(facts, "fixed", 3).width == 3
    with pytest.raises(ProgramError, match=r"rings hold 12 slots, draft_width 4 needs 13"):
        WidthPolicy.of(facts, "fixed", 4)
    assert WidthPolicy.of(facts, "off").width == 0


def test_fixed_takes_all():
    policy = WidthPolicy("fixed", block=3)
    assert policy.widths([("a", 3), ("b", 2), ("new", 0)]) == [3, 2, 0]
    assert policy.widths([("a", 1), ("b", -1), ("new", 0)]) == [1, 0, 0]


def test_adaptive_follows_rates_of_two_rounds_ago_and_forgets_with_the_request():
    policy = WidthPolicy("adaptive", block=2, curve=line(2, 1), eos=[1])
    high, low = [0.99, 0.99], [0.01, 0.01]
    seen = []
    for confidences in (low, high, high, high, low, low, low):
        policy.observe("a", [5, 6], confidences)
        seen.append(policy.widths([("a", 2)])[0])
    # Rounds 1 and 2 know nothing older; 3 still pays for the low round 1; 5 and 6 have a budget of
    # high rates (and drafts of 1e-4 are still worth it); 7 sees the low round 5.
    assert seen == [2, 2, 0, 2, 2, 2, 0]
    policy.forget("a")
    policy.forget("a")
    assert policy.widths([("a", 2)]) == [0]
    policy.observe("a", [5, 1], high)
    assert policy.widths([("a", 2)]) == [2]
    policy.observe("a", [1, 5], high)
    assert policy.widths([("a", 2)]) == [1]  # nothing after the end of the text


def test_the_draft_step_counts_as_part_of_the_round():
    """What a round costs anyway makes a row dearer or cheaper in comparison."""
    rates = survival([0.4])
    lean = line(0.5, 1)
    assert adaptive_widths([rates], [rates], 1, lean) == [0]
    heavy = CostCurve(lean.steps, ((1, 10.0),))
    assert adaptive_widths([rates], [rates], 1, heavy) == [1]


# --- statistics


def test_statistics_by_position():
    stats = AcceptStats()
    assert (stats.length, stats.rates) == (0.0, [])
    for drafted, accepted in ((3, 3), (3, 1), (1, 0), (0, 0)):
        stats.add(drafted, accepted)
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, [3, 2, 2], [2, 1, 1])
    assert stats.length == 1 + 4 / 4 and stats.rates == [2 / 3, 1 / 2, 1 / 2]
    before = stats.copy()
    stats.add(5, 2)
    assert (stats.rounds, stats.drafted, stats.accepted) == (
        5, [4, 3, 3, 1, 1], [3, 2, 1, 0, 0])
    assert (before.rounds, before.drafted) == (4, [3, 2, 2])


# --- calibration


def test_calibration_is_read_or_ones(tmp_path):
    assert load_calibration(tmp_path, 3) == (1, 1, 1)
    file = tmp_path / "generation_config.json"
    for text in ('{"eos_token_id": 1}', "[]", '{"dspark_confidence_temperatures": null}'):
        file.write_text(text)
        assert load_calibration(tmp_path, 3) == (1, 1, 1)
    file.write_text(json.dumps({"dspark_confidence_temperatures": [1, 0.5, 2.25]}))
    assert load_calibration(str(tmp_path), 3) == (1, 0.5, 2.25)


@pytest.mark.parametrize("given", [
    [1, 2], [1, 2, 3, 4], [1, 2, 0], [1, 2, -1], [1, 2, True], [1, 2, "3"], 1.0, {}, [1, 2, 1e39],
    [1, 2, 10**400], [1, 2, 1e-60], [1, 2, math.nan], [1, 2, math.inf], [1, 2, None],
])
def test_bad_calibration_is_refused(given, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"dspark_confidence_temperatures": given}))
    with pytest.raises(CheckpointError, match=r"dspark_confidence_temperatures is .*, expected 3 "
                                              "numbers above 0") as refused:
        load_calibration(tmp_path, 3)
    assert refused.value.where == str(file)


def test_an_unreadable_file_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="it cannot be read"):
        load_calibration(tmp_path, 3)
