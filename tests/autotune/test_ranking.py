"""What halving visits: the model's best, the default, earlier winners; the rest stays unseen."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest

from autotune import ranking
from autotune.cli import main
from autotune.effort import Effort
from autotune.ranking import visited, winners
from autotune.report import rows_of_report, text
from autotune.results import Result, last_tuned, quarantine, results
from autotune.session import Session
from autotune.shipping import file_text
from deepinfer.codegen.schedules import Entry
from tests.autotune.fakes import (
    MACHINE,
    SPACE,
    FakeRunner,
    Heard,
    Ticks,
    run_search,
    task,
    temporary,
    use_space,
)

EXHAUSTIVE = Effort("exhaustive")


@pytest.fixture(autouse=True)
def space(monkeypatch):
    use_space(monkeypatch)


def ranked(*first):
    """A model in whose opinion these come first, in this order, and all others are alike."""
    return lambda c, sizes: float(first.index(c.index) if c.index in first else len(first))


def flat(candidate, sizes):
    return 10_000.0


def fast(*ids):
    return lambda c, sizes: 10_000.0 * (0.5 if c.index in ids else 1.0)


def guess(first):
    order = ranked(*first)
    return FakeRunner(flat, guess=lambda c, sizes: 1 + order(c, sizes))


def test_the_best_of_the_model():
    assert visited(task(), guess((7, 12, 3, 9)), Effort()) == [0, 3, 7, 12]
    assert visited(task(), guess((7, 0, 12, 3)), Effort()) == [0, 3, 7, 12]
    assert visited(task(), guess(()), Effort()) == [0, 1, 2, 3]  # ties: the lowest ids
    assert visited(task(), guess((7, 12, 3)), Effort(), {5, 7}) == [0, 3, 5, 7, 12]
    assert visited(task(), guess((7,)), EXHAUSTIVE) == list(range(len(SPACE)))


def test_the_best_of_each_phase_in_turns():
    orders = {1: ranked(5, 6, 7), 256: ranked(8, 9, 10)}
    runner = FakeRunner(flat, guess=lambda c, sizes: 1 + orders[dict(sizes)["rows"]](c, sizes))
    assert visited(task(), runner, Effort()) == [0, 5, 6, 8]


def test_the_rest_is_not_visited(tmp_path):
    """It is neither built nor gated nor timed nor refused; an exhaustive search visits it."""
    store, now = temporary(tmp_path), Ticks()
    runner = FakeRunner(fast(9, 3), guess=guess((3, 4, 5)).guess, bits={4: "other"})
    got = run_search(runner, store, now=now)
    assert {i for _, i in runner.calls} == {0, 3, 4, 5} and got.verdict.winner == 3
    assert set(got.quarantined) == {4} and len(quarantine(store)) == 1
    (result,) = results(store, MACHINE.id)
    assert result.unvisited() == [str(s) for i, s in enumerate(SPACE) if i not in (0, 3, 4, 5)]
    assert {(r.measured, r.schedules) for r in rows_of_report([result], None)} == {(3, 16)}
    shown = text([result], None, quarantine(store), [])
    assert "not visited: 12 of 16 schedules" in shown and "3/16" in shown
    run_search(runner, store, "every", effort=EXHAUSTIVE, now=now)
    (result,) = results(store, MACHINE.id)
    assert result.unvisited() == [] and "not visited" not in text([result], None, {}, [])


def test_status_says_what_was_not_visited(tmp_path, capsys):
    run_search(FakeRunner(flat), temporary(tmp_path))
    db = ["--db", str(tmp_path / "t.db")]
    assert main(["status", *db]) == 0
    assert "schedules not visited" in capsys.readouterr().out
    assert main(["status", *db, "--json"]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"].values()
    assert machine["not_visited"] == 12


def test_a_wrong_model_costs_the_gain_and_nothing_else(tmp_path):
    got = run_search(FakeRunner(fast(9), guess=guess((1, 2, 3)).guess), temporary(tmp_path))
    assert got.verdict.winner == 0 and got.quarantined == {}


def session(store, runner, name, effort, now):
    store.save_run(name, now(), "running", {})
    made = Session(name, runner, store, effort, Heard(), now=now)
    assert made.run([task()]) == "done"
    return made.outcomes[0]


def test_what_won_before_is_visited_again(tmp_path):
    """The model ranks it last; an exhaustive run found it on this machine."""
    store, now, last = temporary(tmp_path), Ticks(), guess(range(9)).guess
    first = session(store, FakeRunner(fast(9), guess=last), "every", EXHAUSTIVE, now)
    assert first.verdict.winner == 9 and winners(task(), store, MACHINE.id) == {9}
    runner = FakeRunner(fast(9), guess=last)
    again = session(store, runner, "again", Effort(fresh=True), now)
    assert {i for _, i in runner.calls} == {0, 1, 2, 3, 9} and again.verdict.winner == 9
    other = FakeRunner(fast(9), guess=last, machine=replace(MACHINE, cpu="other"))
    elsewhere = session(store, other, "elsewhere", Effort(), now)
    assert 9 not in {i for _, i in other.calls} and elsewhere.verdict.winner == 0


def test_what_ships_is_visited(tmp_path, monkeypatch):
    path, key = tmp_path / "schedules.json", task().problem.key
    monkeypatch.setattr(ranking, "path_of", lambda target: path)
    store = temporary(tmp_path)
    assert winners(task(), store, MACHINE.id) == set()
    path.write_text(file_text({(key, ""): Entry(key, "", SPACE[11], {}),
                               (key, "prefill"): Entry(key, "prefill", SPACE[14], {}),
                               ("another", ""): Entry("another", "", SPACE[2], {})}))
    assert winners(task(), store, MACHINE.id) == {11, 14}


def test_a_run_that_goes_on_visits_what_it_began_with(tmp_path):
    """Another run's winner is no part of it: its times would be compared with older ones."""
    with closing(temporary(tmp_path)) as store:
        runner, kernel = guess((7, 12, 3)), store.kernel(task().problem)
        begun = Session("one", runner, store, Effort(), Heard())
        first = begun._chosen(task())
        store.add_fact(kernel, "duel", {"machine": MACHINE.id, "session": "else", "at": 1,
                                        "winners": [str(SPACE[9])]})
        again = Session("one", runner, store, Effort(), Heard())
        other = Session("two", runner, store, Effort(), Heard())
        assert begun._chosen(task()) == again._chosen(task()) == first == [0, 3, 7, 12]
        assert other._chosen(task()) == [0, 3, 7, 9, 12]


def test_the_machine_tuned_last(tmp_path):
    with closing(temporary(tmp_path)) as store:
        kernel = store.kernel(task().problem)
        for at, name in ((3, "b"), (9, "a"), (5, "b"), (7, "c")):
            store.add_fact(kernel, "duel", {"machine": name, "at": at})
        assert last_tuned(store, ["a", "b", "c"]) == ["a"]
        assert last_tuned(store, ["b", "c", "d"]) == ["c"] and last_tuned(store, ["d"]) == []


def test_a_kernel_that_is_no_more_has_nothing_unvisited():
    gone = replace(task().problem, op="gone")
    assert Result("", gone, "", "").unvisited() == []
    assert len(Result("", task().problem, "", "").unvisited()) == len(SPACE)
