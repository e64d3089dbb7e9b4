"""Medians with their noise, and who wins."""

from __future__ import annotations

import pytest

from autotune.stats import FLOOR, Timing, Verdict, decide, faster, geomean


def timing(median: float, error: float = 0.0) -> Timing:
    return Timing(median, error, error, 10, 2)


def test_of_one_visit():
    made = Timing.of([[100, 110, 90, 105, 95]])
    assert (made.median, made.mad, made.samples) == (100, 5, 5)
    assert made.error == pytest.approx(5 * 1.4826 * 1.2533 / 5**0.5)


def test_many_quiet_runs_do_not_hide_that_visits_differ():
    """Inside a visit nothing moves, between visits 10 %: the error is that of five visits."""
    quiet = Timing.of([[100] * 50 for _ in range(5)])
    moving = Timing.of([[m] * 50 for m in (100, 110, 90, 105, 95)])
    assert quiet.error == 0 and moving.median == quiet.median == 100
    assert moving.error == pytest.approx(5 * 1.4826 * 1.2533 / 5**0.5)


def test_one_outlier_moves_nothing():
    assert Timing.of([[100, 101, 99, 100, 5000]]).median == 100


def test_outside_the_noise():
    assert faster(timing(90), timing(100))
    assert not faster(timing(90, error=2), timing(100, error=2))  # 3 errors each way meet
    assert not faster(timing(100), timing(100 * (1 + FLOOR / 2)))  # drift that no sample shows
    assert not faster(timing(100), timing(90))


def test_the_default_stays_inside_the_noise():
    got = decide({0: [timing(100, 2)], 1: [timing(97, 2)], 2: [timing(99, 2)]})
    assert got == Verdict(0, 1.0, (1.0,), "no schedule beats the default outside the noise")
    assert decide({0: [timing(1)]}).reason == "there is only the default"


def test_ties_go_to_the_lowest_id():
    """4 is best by a hair; 2 cannot be told from it, 3 can."""
    times = {0: [timing(100)], 2: [timing(80.3)], 3: [timing(85)], 4: [timing(80)]}
    got = decide(times)
    assert got.winner == 2 and got.gain == pytest.approx(100 / 80.3)
    assert got.reason == "faster outside the noise, tied with 4"


def test_a_tie_partner_must_itself_beat_the_default():
    """1 cannot be told from the best, nor from the default: it does not win."""
    times = {0: [timing(100, 1)], 1: [timing(96, 2)], 2: [timing(90, 1)]}
    assert not faster(times[2][0], times[1][0]) and not faster(times[1][0], times[0][0])
    assert decide(times).winner == 2


def test_slower_anywhere_loses():
    times = {0: [timing(100), timing(100)], 1: [timing(50), timing(103)],
             2: [timing(95), timing(100)]}
    got = decide(times)
    assert got.winner == 2 and got.gains == pytest.approx((100 / 95, 1.0))
    assert got.gain == pytest.approx((100 / 95) ** 0.5)


def test_geomean():
    assert geomean([1, 4]) == pytest.approx(2) and geomean([3]) == pytest.approx(3)


def test_noise_does_not_hide_a_loss():
    """At a noisy point nothing is outside the noise; a median 5 % above the default's loses."""
    noisy = {0: [timing(1124, 30), timing(4452)], 1: [timing(1180, 30), timing(4076)],
             2: [timing(1130, 30), timing(4200)]}
    assert not faster(noisy[0][0], noisy[1][0])
    assert decide(noisy).winner == 2


def test_what_gains_nothing_over_all_points_does_not_win():
    times = {0: [timing(1000), timing(1000), timing(1000)],
             1: [timing(1009), timing(1009), timing(985)]}
    assert faster(times[1][2], times[0][2]) and not faster(times[0][0], times[1][0])
    assert decide(times).winner == 0


def test_one_visit_shows_nothing():
    """Not even of quiet runs: what differs between visits is not known."""
    once, often = Timing.of([[90] * 9]), Timing.of([[100] * 9, [100] * 9])
    assert not faster(once, often) and not faster(Timing.of([[80] * 9, [80] * 9]), once)
    assert faster(Timing.of([[90] * 9, [90] * 9]), often)
    assert decide({0: [often], 1: [once]}).winner == 0
