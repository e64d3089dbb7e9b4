"""The page pool: nothing leaks, nothing is held twice, and ``check`` would see it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.pages import PagePool, StateSizes, bytes_per_page


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=40))
def test_takes_and_releases(moves):
    pool, held = PagePool(7, 3), {}
    for who, pages in moves:
        owner = str(who)
        if owner in held:
            pool.release(owner)
            del held[owner]
        elif (got := pool.take(owner, pages)) is not None:
            assert len(got[1]) == pages
            held[owner] = got
        else:
            assert pages > pool.free_pages or pool.free_slots == 0
        pool.check()
        assert pool.owners == held.keys()
        assert pool.free_pages == 7 - sum(len(pages) for _, pages in held.values())
        assert len({slot for slot, _ in held.values()}) == len(held)
    for owner in [*held, "nobody"]:
        pool.release(owner)
    pool.check()
    assert (pool.free_pages, pool.free_slots) == (7, 3)


def test_lowest_first():
    pool = PagePool(6, 2)
    assert pool.take("a", 2) == (0, [0, 1]) and pool.take("b", 2) == (1, [2, 3])
    pool.release("a")
    assert pool.take("c", 3) == (0, [0, 1, 4])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda p: p._free_pages.append(0), "page 0 of 0..3 is held by free and a"),
        (lambda p: p._free_pages.remove(3), "1 pages leaked, the first are [3]"),
        (lambda p: p._free_slots.clear(), "1 slots leaked, the first are [1]"),
        (lambda p: p._held.update(b=(0, ())), "slot 0 of 0..1 is held by b and a"),
        (lambda p: p._held.clear(), "pages leaked"),
        (lambda p: p._free_pages.append(4), "page 4 of 0..3 is held by free and None"),
    ],
)
def test_check_sees_faults(fault, message):
    pool = PagePool(4, 2)
    pool.take("a", 2)
    pool.check()
    fault(pool)
    with pytest.raises(DeepInferError) as caught:
        pool.check()
    assert message in str(caught.value)


def test_sizes(program):
    sizes = StateSizes.plan(program, max_num_seqs=3, max_model_len=17)
    assert (sizes.num_slots, sizes.pages_per_seq, sizes.num_pages) == (3, 3, 9)
    assert [sizes.pages_for(n) for n in (1, 8, 9, 17)] == [1, 1, 2, 3]
    # Per token of page 8, tiny: ratio 2 has half an entry, two layers of them; ratio 1 one layer.
    entry = (32 + 4) + (16 + 1)  # KV and index key, each with scales
    assert bytes_per_page(program) == 8 * (entry // 2 * 2 + entry) + 8 * (entry % 2)
    one = bytes_per_page(program)
    bounded = StateSizes.plan(program, max_num_seqs=3, max_model_len=17, cache_bytes=5 * one - 1)
    assert bounded.num_pages == 4
    with pytest.raises(RequestError, match=f"cache_bytes is {3 * one - 1}, expected at least"):
        StateSizes.plan(program, max_num_seqs=3, max_model_len=17, cache_bytes=3 * one - 1)
