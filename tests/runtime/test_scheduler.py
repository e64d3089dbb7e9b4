"""The scheduler: fixed cuts, decode first, nobody waits for ever."""

from __future__ import annotations

import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.pages import StateSizes
from deepinfer.runtime.request import Request, SamplingParams
from deepinfer.runtime.scheduler import Scheduler, default_chunk


def request(name: str, prompt: int, output: int = 4) -> Request:
    return Request(name, SamplingParams(), [5] * prompt, prompt, prompt + output)


def scheduler(*, slots=4, pages=32, rows=16, chunk=None) -> Scheduler:
    return Scheduler(StateSizes(slots, pages, 8, 8), max_num_batched_tokens=rows, chunk=chunk)


def step(s: Scheduler) -> list[tuple[str, int, int, str]]:
    """Run a step without a device."""
    batch = s.schedule()
    for rows in batch:
        rows.request.computed = rows.end
        if rows.sample == "last":
            rows.request.tokens.append(6)
    return [(r.request.request_id, r.start, r.end, r.sample) for r in batch]


def test_default_chunk():
    assert default_chunk(2048, 64, 128) == 1920 and default_chunk(16, 4, 8) == 8
    assert default_chunk(16, 4, 128) == 13 and default_chunk(4, 4, 8) == 1
    with pytest.raises(RequestError, match="max_num_batched_tokens is 3, expected at least"):
        default_chunk(3, 4, 8)
    with pytest.raises(RequestError, match="prefill_chunk is 14, expected 1..13"):
        scheduler(chunk=14)


def test_decode_first_and_chunks_wait_whole():
    s = scheduler(chunk=10)
    s.add(request("a", 3))
    assert step(s) == [("a", 0, 3, "last")]
    s.add(request("b", 25))
    s.add(request("c", 12))
    # 16 rows: a decodes, b's chunk of 10 fits, c's does not fit in the 5 left and is not cut.
    assert step(s) == [("a", 3, 4, "last"), ("b", 0, 10, "none")]
    assert step(s) == [("a", 4, 5, "last"), ("b", 10, 20, "none")]
    assert step(s) == [("a", 5, 6, "last"), ("b", 20, 25, "last"), ("c", 0, 10, "none")]
    assert step(s) == [("a", 6, 7, "last"), ("b", 25, 26, "last"), ("c", 10, 12, "last")]


@pytest.mark.parametrize("neighbours", [0, 1, 3])
def test_cuts_do_not_depend_on_neighbours(neighbours):
    s = scheduler(chunk=7)
    for i in range(neighbours):
        s.add(request(f"n{i}", 5 + 6 * i, output=20))
    s.add(request("a", 30))
    cuts = [row[1:3] for _ in range(20) for row in step(s) if row[0] == "a" and row[1] < 30]
    assert cuts == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]


def test_admission_in_order_and_by_pages():
    s = scheduler(slots=2, pages=5)
    a, b, c = request("a", 20, 13), request("b", 10, 8), request("c", 1, 1)  # 4, 3 and 1 pages
    for r in (a, b, c):
        s.add(r)
    assert [row[0] for row in step(s)] == ["a"]  # b must wait for pages, c behind it as well
    assert a.slot == 0 and a.pages == [0, 1, 2, 3] and b.slot is None
    s.remove(a)
    assert a.slot is None and a.pages == []
    assert [row[0] for row in step(s)] == ["b", "c"]
    s.pool.check()
    s.remove(b)
    s.remove(c)
    assert s.requests == [] and s.pool.free_pages == 5 and s.schedule() == []


def test_what_can_never_run_is_refused():
    s = scheduler(pages=3)
    s.add(request("a", 20, 5))  # 24 positions: the last token has no row
    with pytest.raises(RequestError) as caught:
        s.add(request("b", 20, 6))
    assert "needs 4 pages for 25 positions, expected at most 3" in caught.value.what


def test_a_full_house_of_decodes_leaves_room_for_a_chunk():
    s = scheduler(slots=4, rows=5, chunk=2)
    for i in range(3):
        s.add(request(f"d{i}", 1, output=20))
    while any(r.computed < 1 for r in s.requests):
        step(s)
    s.add(request("p", 3))
    assert [row for row in step(s) if row[0] == "p"] == [("p", 0, 2, "none")]


def test_removing_a_waiting_request():
    s = scheduler(slots=1)
    a, b = request("a", 1), request("b", 1)
    s.add(a)
    s.add(b)
    step(s)
    s.remove(b)
    s.remove(b)
    assert s.requests == [a]
