"""The report: figures that follow from the samples, and a page that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from autotune.effort import Effort
from autotune.report import page, rows_of_report, text, totals
from autotune.results import quarantine, results
from autotune.svg import Plot
from tests.autotune.fakes import (
    MACHINE,
    SPACE,
    FakeRunner,
    landscape,
    run_search,
    task,
    temporary,
    use_space,
)

CEILINGS = {"flops": 1e11, "bytes": 1e10}
MODELLED = [{"target": "sm100", "op": "topk", "shape": "N=1", "schedule": "threads=256",
             "ns": 2500.0, "bound": "memory", "use": 0.5}]


@pytest.fixture
def found(tmp_path, monkeypatch):
    use_space(monkeypatch)
    store = temporary(tmp_path)
    run_search(FakeRunner(landscape(1), bits={5: "other"}), store, effort=Effort("exhaustive"))
    return results(store, MACHINE.id), quarantine(store)


def test_rows(found):
    """Each figure from its definition."""
    (result,), _ = found
    rows = rows_of_report([result], CEILINGS)
    assert [r.shape for r in rows] == ["N=1 I=64", "N=256 I=64"]
    for row, point in zip(rows, result.points, strict=True):
        at = result.points.index(point)
        winner = next(i for i, s in result.schedules.items() if s == row.schedule)
        times = sorted(t[at].median for t in result.times.values())
        nbytes, flops = task().problem.work(point)
        seconds = result.times[winner][at].median / 1e9
        assert row.gain == pytest.approx(result.times[0][at].median / 1e9 / seconds)
        assert row.over_median == pytest.approx(times[len(times) // 2] / 1e9 / seconds, rel=0.01)
        assert row.nbytes == pytest.approx(nbytes / seconds)
        assert row.flops == pytest.approx(flops / seconds)
        assert row.roof == pytest.approx(max(nbytes / 1e10, flops / 1e11) / seconds)
        assert row.measured == len(SPACE) - 1
    assert "2 rows" in totals(rows)
    assert rows_of_report([result], None)[0].roof is None


def test_text(found):
    got = text(found[0], CEILINGS, found[1], MODELLED)
    assert "quarantined:" in got and "mismatch: other bits than the default at N=1 I=64" in got
    assert "modelled, not measured:" in got and "modelled us" in got
    assert "100.0 GFLOP/s" in got and "10.0 GB/s" in got
    assert text([], None, {}, []) == "nothing was measured yet"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not {"src", "href", "onload"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained(found):
    made = page(found[0], CEILINGS, found[1], MODELLED, MACHINE.to_json())
    tags = Tags()
    tags.feed(made)
    assert tags.open == [] and "script" not in tags.seen and "link" not in tags.seen
    assert not re.search(r"https?:|@import|url\(", made)
    assert tags.seen.count("svg") == 2 + 2  # gains, roofline, and a landscape a point
    dots = len(SPACE) - 1
    assert tags.seen.count("circle") == 2 + 2 + 2 * dots
    assert "fake, generic, 1 threads" in made and "&quot;" not in made.partition("<pre>")[0]


def test_a_page_of_nothing():
    assert "nothing was measured yet" in page([], None, {}, [], {})


def test_plot_places():
    """A point at each end of an axis stands inside the frame; logarithms are even."""
    plot = Plot("p", "x", "y", x_log=True, y_log=True)
    for x in (1, 10, 100):
        plot.point(x, x, f"<{x}>")
    got = plot.svg()
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', got)]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[0][1] > places[1][1] > places[2][1]
    assert all(0 <= x <= plot.width and 0 <= y <= plot.height for x, y in places)
    assert "&lt;10&gt;" in got and Plot("p", "x", "y").svg() == ""
    plot = Plot("flat", "x", "y")
    plot.point(3, 0.0, "one")
    assert "circle" in plot.svg()
