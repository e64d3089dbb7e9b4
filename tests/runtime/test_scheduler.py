"""The scheduler: fixed cuts, decode first, nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.prefix import PrefixCache
from deepinfer.runtime.request import Request, SamplingParams
from deepinfer.runtime.scheduler import Scheduler, default_chunk
from deepinfer.runtime.state import StateSizes
from tests.runtime.cache_device import FACTS, CacheDevice


def request(name: str, prompt: int, output: int = 4, arrival: int = 0, **params: Any) -> Request:
    made = Request(name, SamplingParams(**params), [5] * prompt, prompt, prompt + output)
    made.arrival = arrival
    return made


class Served(Scheduler):
    """A scheduler with a pool of its own and no device."""

    def __init__(self, *, slots=4, pages=32, rows=16, chunk=None, mode="off", interval=8, **given
                 ) -> None:
        sizes = StateSizes(slots, pages, 8, 8)
        pool = PagePool(pages, slots)
        prefix = PrefixCache(pool, CacheDevice(pages, slots), {**FACTS, "page_size": 8}, mode,
                             interval)
        self.admitted: list[tuple[str, int]] = []
        super().__init__(sizes, pool, prefix, max_num_batched_tokens=rows, chunk=chunk,
                         on_admit=self._note, **given)

    def _note(self, made: Request, hit: Any) -> None:
        self.admitted.append((made.request_id, hit.length))
        made.computed = hit.length

    def add_all(self, *requests: Request) -> None:
        for n, made in enumerate(requests, len(self.requests)):
            made.arrival = n
            self.add(made)

    def step(self, accepted: int = 0) -> list[tuple[str, int, int, str]]:
        """Run a step without a device; so many drafts of each request are accepted."""
        batch = self.schedule()
        assert sum(map(len, batch)) <= self.max_num_batched_tokens
        for rows in batch:
            made, kept = rows.request, min(accepted, len(rows.drafts))
            assert made.slot is not None and len(made.pages) * 8 >= rows.end
            made.tokens += rows.drafts[:kept]
            made.computed = rows.end - len(rows.drafts) + kept
            if rows.sampled:
                made.tokens.append(6)
            self.prefix.commit(made.request_id, made.tokens, made.computed, made.slot, "", "chat",
                               made.prompt_len)
        self.prefix.check()
        return [(r.request.request_id, r.start, r.end, r.sample) for r in batch]


def test_default_chunk():
    """Case C6: rows are reserved for decode with a floor; what cannot work is refused by name."""
    assert default_chunk(2048, 64, 128) == 1920 and default_chunk(16, 4, 8) == 8
    assert default_chunk(16, 4, 128) == 13 and default_chunk(4, 4, 8) == 1
    assert default_chunk(40, 4, 8, 5) == 16 and default_chunk(24, 4, 8, 5) == 6
    assert default_chunk(2048, 64, 128, 5) == 1664
    for rows, seqs, width, least in [(3, 4, 0, 4), (120, 60, 7, 480), (23, 4, 5, 24)]:
        with pytest.raises(RequestError, match=rf"(?m)max_num_batched_tokens is {rows}, expected"
                                               rf" at least .* = {least}$") as caught:
            default_chunk(rows, seqs, 8, width)
        assert "raise max_num_batched_tokens" in str(caught.value)
    for chunk in (14, 0, -1):
        with pytest.raises(RequestError, match=rf"prefill_chunk is {chunk}, expected 1..13"):
            Served(chunk=chunk)
    with pytest.raises(RequestError, match="expected 1..10"):
        Served(rows=40, chunk=11, draft_width=9)


def test_decode_first_and_chunks_wait_whole():
    s = Served(chunk=10)
    s.add_all(request("a", 3))
    assert s.step() == [("a", 0, 3, "last")]
    s.add_all(request("b", 25), request("c", 12))
    # 16 rows: a decodes, b's chunk of 10 fits, c's does not fit in the 5 left and is not cut.
    assert s.step() == [("a", 3, 4, "all"), ("b", 0, 10, "none")]
    assert s.step() == [("a", 4, 5, "all"), ("b", 10, 20, "none")]
    assert s.step() == [("a", 5, 6, "all"), ("b", 20, 25, "last"), ("c", 0, 10, "none")]
    assert s.step() == [("a", 6, 7, "all"), ("b", 25, 26, "all"), ("c", 10, 12, "last")]


@pytest.mark.parametrize("neighbours", [0, 1, 3])
def test_cuts_do_not_depend_on_neighbours(neighbours):
    """Case A4: chunk edges belong to the request."""
    s = Served(chunk=7)
    s.add_all(*(request(f"n{i}", 5 + 6 * i, output=20) for i in range(neighbours)),
              request("a", 30))
    cuts = [row[1:3] for _ in range(20) for row in s.step() if row[0] == "a" and row[1] < 30]
    assert cuts == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]


def test_cuts_after_a_hit_lie_on_the_requests_grid():
    """Case A4: a cached prefix moves no later edge, and a snapshot's place is an edge as well."""
    s = Served(chunk=12, mode="exact", interval=2)
    a, b = request("a", 45), request("b", 45)
    s.add_all(a)
    cuts = [row[1:3] for _ in range(7) for row in s.step() if row[1] < 45]
    assert cuts == [(0, 12), (12, 16), (16, 24), (24, 32), (32, 36), (36, 40), (40, 45)]
    s.prefix.finish("a", a.tokens, a.computed, a.slot, "", "chat", 45)
    s.remove(a)
    s.pool.clear_cache()
    assert s.pool.cached_pages == 0
    s.add_all(request("c", 20))
    while len(s.requests[0].tokens) < 24:
        s.step()
    c = s.requests[0]
    s.prefix.finish("c", c.tokens, c.computed, c.slot, "", "chat", 20)
    s.remove(c)
    s.add_all(b)
    assert [s.step()[0][1:3] for _ in range(5)] == cuts[2:]
    assert s.admitted == [("a", 0), ("c", 0), ("b", 16)]


def test_admission_in_order_and_by_pages():
    s = Served(slots=2, pages=5)
    a, b, c = request("a", 32, 9), request("b", 10, 8), request("c", 1, 1)  # 5, 3 and 1 pages
    s.add_all(a)
    while a.computed < 32:
        s.step()
    assert (a.slot, a.pages, s.pool.free_pages) == (0, [0, 1, 2, 3], 1)
    s.add_all(b, c)
    # b's prompt must wait for pages, and c behind it as well, though it would fit.
    assert [row[0] for row in s.step()] == ["a"] and b.slot is None and c.slot is None
    s.remove(a)
    assert a.slot is None and a.pages == []
    assert [row[0] for row in s.step()] == ["b", "c"]
    s.remove(b)
    s.remove(c)
    assert s.requests == [] and s.pool.free_pages == 5 and s.schedule() == []


def test_what_can_never_run_is_refused():
    """Case D1: at once, with what it needs and what there is; those behind it run."""
    s = Served(pages=3)
    s.add(request("a", 20, 5))  # 24 positions: the last token has no row
    for prompt, output, pages, positions in [(20, 6, 4, 25), (25, 1, 4, 25), (1, 100, 13, 100)]:
        with pytest.raises(RequestError) as caught:
            s.add(request("b", prompt, output))
        assert (f"needs {pages} pages for {positions} positions, expected at most 3"
                in caught.value.what)
    with pytest.raises(RequestError, match="expected at most 0"):
        Served(pages=0).add(request("c", 1, 1))
    assert [r.request_id for r in s.requests] == ["a"] and s.step()


def test_a_full_house_of_decodes_leaves_room_for_a_chunk():
    s = Served(slots=4, rows=5, chunk=2)
    s.add_all(*(request(f"d{i}", 1, output=20) for i in range(3)))
    while any(r.computed < 1 for r in s.requests):
        s.step()
    s.add_all(request("p", 3))
    assert [row for row in s.step() if row[0] == "p"] == [("p", 0, 2, "none")]


@pytest.mark.parametrize("width", [0, 1, 5])
def test_drafts_are_verified_with_their_anchor(width):
    s = Served(rows=24, draft_width=5)
    a = request("a", 3, output=9)
    s.add_all(a)
    s.step()
    a.drafts, a.width = [40, 41, 42, 43, 44], width
    (rows,) = s.schedule()
    assert (rows.start, rows.end, rows.sample) == (3, 4 + width, "all")
    assert rows.drafts == (40, 41, 42, 43, 44)[:width] and rows.tokens(2) == [5, 6, *rows.drafts]
    assert list(rows.sampled) == list(range(3, 4 + width))


def test_no_draft_past_the_last_token():
    """Case C4: a request with room for m more tokens verifies m - 1 drafts at most."""
    s = Served(rows=24, draft_width=5)
    a = request("a", 3, output=9)
    s.add_all(a)
    s.step()
    for made, wanted in [(1, 5), (3, 5), (4, 4), (7, 1), (8, 0)]:
        a.tokens = [5] * 3 + [6] * made
        a.computed, a.drafts, a.width = len(a.tokens) - 1, [4] * 5, 5
        (rows,) = s.schedule()
        assert len(rows.drafts) == wanted


def test_the_one_that_came_last_gives_way():
    """Preemption in the order of arrival; the first is never preempted, and all finish."""
    s = Served(slots=3, pages=6, rows=24)
    a, b, c = (request(name, 14, output=26) for name in "abc")  # 5 pages each in the end
    s.add_all(a, b, c)
    order, steps = [], 0
    while s.requests:
        s.step()
        steps += 1
        assert steps < 200
        order += [r.request_id for r in s.preempted]
        s.preempted = []
        for done in [r for r in s.requests if len(r.tokens) == r.max_len]:
            s.remove(done)
            order.append(f"{done.request_id} done")
    assert "a" not in order and order.index("c") < order.index("b")
    assert [x for x in order if "done" in x] == ["a done", "b done", "c done"]
    assert b.metrics.preemptions >= 1 and c.metrics.preemptions >= 1
    assert [len(r.tokens) for r in (a, b, c)] == [40] * 3 and s.pool.free_pages == 6


def test_a_preempted_request_keeps_its_place():
    s = Served(slots=1)
    a, b = request("a", 9), request("b", 1)
    s.add_all(a, b)
    s.step()
    assert s.preempt(a) and not s.preempt(a) and not s.preempt(b)
    assert (a.computed, a.slot, a.pages, a.drafts) == (0, None, [], [])
    assert [r.request_id for r in s.requests] == ["a", "b"]
    assert [row[:3] for row in s.step()] == [("a", 0, 10)]
    assert [r.request_id for r in s.preempted] == ["a"]


def test_what_may_come_from_the_cache():
    """Case B9: nothing where every row is asked for; and never the row that chooses a token."""
    for given, params, wanted in [({}, {}, 24), ({}, {"prompt_logprobs": 0}, 0),
                                  ({"keep_tokens": 9}, {}, 16), ({"keep_tokens": 10}, {}, 8),
                                  ({"keep_tokens": 30}, {}, 0), ({}, {"cache_salt": "x"}, 0)]:
        s = Served(rows=40, chunk=8, mode="exact", interval=1, **given)
        a, b = request("a", 25), request("b", 25, **params)
        s.add_all(a)
        for _ in range(4):
            s.step()
        s.prefix.finish("a", a.tokens, a.computed, a.slot, "", "chat", 25)
        s.remove(a)
        s.add_all(b)
        first, start, *_ = s.step()[0]
        assert (first, start) == ("b", wanted) and s.admitted[-1] == ("b", wanted), given


def test_forced_chunks_sample_every_row():
    s = Served(chunk=7)
    s.add_all(request("a", 10, prompt_logprobs=2))
    (rows,) = s.schedule()
    assert (rows.start, rows.end, rows.sample, rows.forced) == (0, 7, "all", True)
    assert list(rows.sampled) == list(range(7))


def test_removing_a_waiting_request():
    s = Served(slots=1)
    a, b = request("a", 1), request("b", 1)
    s.add_all(a, b)
    s.step()
    s.remove(b)
    s.remove(b)
    assert s.requests == [a] and s.running == [a]
