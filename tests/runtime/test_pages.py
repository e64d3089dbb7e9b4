"""The page pool: nothing leaks, nothing is shared by mistake, and ``check`` would see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.pages import PagePool
from deepinfer.runtime.state import StateSizes, bytes_per_page, bytes_per_snapshot


def pool_of(pages: int, slots: int = 3, *owners: str) -> PagePool:
    pool = PagePool(pages, slots)
    for owner in owners:
        assert pool.take_slot(owner) is not None
    return pool


def fill(pool: PagePool, owner: str, *keys: bytes) -> list[int]:
    """Give ``owner`` a page for each key and publish them."""
    first = len(pool.table(owner))
    assert pool.grow(owner, len(keys))
    for index, key in enumerate(keys, first):
        pool.publish(owner, index, key)
    return pool.table(owner)


MOVES = st.lists(st.tuples(st.sampled_from(["take", "grow", "publish", "share", "release", "resize",
                                            "clear"]),
                           st.integers(0, 4), st.integers(0, 4)), max_size=50)


@given(MOVES)
def test_any_order_of_moves(moves):
    """Pages are counted against a model that knows only what each move should do."""
    evicted: list[bytes] = []
    pool = PagePool(7, 3, evicted.append)
    for move, who, n in moves:
        owner, before = str(who), (pool.free_pages, pool.cached_pages)
        evicted.clear()
        if move == "take" and owner not in pool.owners:
            assert (pool.take_slot(owner) is None) == (len(pool.owners) == 3 and
                                                       owner not in pool.owners)
        elif move == "release":
            pool.release(owner)
        elif move == "resize":
            pool.resize(3 + n)
        elif move == "clear":
            pool.clear_cache()
            assert pool.free_pages == before[0]
        elif owner not in pool.owners:
            continue
        elif move == "grow":
            table = pool.table(owner)
            assert pool.grow(owner, n) == (n <= before[0])
            assert pool.table(owner)[:len(table)] == table
            assert len(pool.table(owner)) == len(table) + (n if n <= before[0] else 0)
        elif move == "publish" and len(pool.keys(owner)) < len(pool.table(owner)):
            index = len(pool.keys(owner))
            pool.publish(owner, index, bytes([index, n % 2]))
            assert pool.lookup(bytes([index, n % 2])) is not None
        elif move == "share" and not pool.table(owner):
            chain = [pool.lookup(bytes([i, n % 2])) for i in range(2)]
            found = chain[:chain.index(None) if None in chain else 2]
            room = pool.free_besides(found)
            pool.share(owner, found)
            assert pool.free_pages == room
        assert all(pool.lookup(key) is None for key in evicted)
        pool.check()
    for owner in [*pool.owners, "nobody"]:
        pool.release(owner)
    pool.check()
    assert (pool.free_pages, pool.free_slots) == (pool.num_pages, 3)


def test_lowest_first():
    pool = pool_of(6, 3, "a", "b")
    assert pool.grow("a", 2) and pool.grow("b", 2) and pool.table("b") == [2, 3]
    pool.release("a")
    assert pool.take_slot("c") == 0 and pool.grow("c", 3) and pool.table("c") == [0, 1, 4]


def test_all_or_nothing():
    pool = pool_of(3, 1, "a")
    assert not pool.grow("a", 4) and pool.table("a") == [] and pool.free_pages == 3
    assert pool.take_slot("b") is None
    pool.release("b")
    pool.check()


def test_published_pages_outlive_their_request_and_are_shared():
    pool = pool_of(4, 3, "a")
    fill(pool, "a", b"1", b"2")
    assert pool.grow("a", 1)  # a third page that is not final
    pool.release("a")
    assert (pool.free_pages, pool.cached_pages) == (4, 2)
    for owner in ("b", "c"):
        pool.take_slot(owner)
        pool.share(owner, [pool.lookup(b"1"), pool.lookup(b"2")])
        pool.check()
    assert pool.table("b") == pool.table("c") == [0, 1] and pool.free_pages == 2
    pool.release("b")
    assert pool.free_pages == 2 and pool.keys("c") == [b"1", b"2"]
    pool.release("c")
    assert pool.free_pages == 4 and pool.lookup(b"2") == 1


def test_eviction_order():
    """Least recently used first; of one request, its last page first; never a held one."""
    gone: list[bytes] = []
    pool = PagePool(6, 3, gone.append)
    for owner, keys in (("a", (b"a1", b"a2", b"a3")), ("b", (b"b1", b"b2"))):
        pool.take_slot(owner)
        fill(pool, owner, *keys)
    pool.release("a")
    pool.take_slot("c")
    assert pool.grow("c", 1) and gone == []  # page 5 was free
    pool.touch(pool.lookup(b"a3"))
    assert pool.grow("c", 2) and gone == [b"a2", b"a1"]
    assert pool.grow("c", 1) and gone[2:] == [b"a3"]
    assert not pool.grow("c", 1) and pool.lookup(b"b1") is not None
    pool.check()


def test_the_same_page_computed_twice():
    """Two requests with one prompt at once: one page is cached, the other stays private, and takes
    over when the cached one was evicted."""
    pool = pool_of(4, 3, "a", "b")
    fill(pool, "a", b"1")
    fill(pool, "b", b"1")
    assert pool.lookup(b"1") == 0 and pool.cached_pages == 1
    pool.check()
    pool.release("a")
    pool.take_slot("c")
    assert pool.grow("c", 3) and pool.lookup(b"1") is None
    pool.release("b")
    assert pool.lookup(b"1") == 1
    pool.check()


def test_discard_and_clear():
    pool = pool_of(4, 2, "a")
    fill(pool, "a", b"1", b"2")
    assert not pool.discard(b"1") and not pool.discard(b"none")
    pool.release("a")
    assert pool.discard(b"2") and pool.lookup(b"2") is None and pool.cached_pages == 1
    pool.clear_cache()
    assert pool.cached_pages == 0 and pool.free_pages == 4
    pool.check()


def test_a_pool_that_shrinks_withdraws_pages_as_they_come_back():
    gone: list[bytes] = []
    pool = PagePool(6, 3, gone.append)
    for owner in ("a", "b"):
        pool.take_slot(owner)
        fill(pool, owner, *(owner.encode() + bytes([i]) for i in range(3)))
    pool.release("b")
    pool.resize(2)
    assert set(gone) == {b"b\0", b"b\1", b"b\2"} and pool.free_pages == 0
    pool.check()
    assert not pool.grow("a", 1)
    pool.release("a")
    assert pool.free_pages == 2 and gone[3:] == [b"a\2"]
    pool.check()
    pool.resize(6)
    assert pool.free_pages == 6
    pool.check()
    with pytest.raises(RequestError, match="num_pages is 7, expected 0..6"):
        pool.resize(7)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda p: p._free_pages.append(0), "page 0 of 0..4 is held by free and a"),
        (lambda p: p._free_pages.remove(4), "1 pages leaked, the first are [4]"),
        (lambda p: p._free_pages.append(9), "page 9 of 0..4 is held by free and None"),
        (lambda p: p._free_slots.clear(), "1 slots leaked, the first are [2]"),
        (lambda p: p._slots.update(c=0), "slot 0 of 0..2 is held by c and a"),
        (lambda p: p._tables["b"].append(1), "page 1 has 1 references, expected 2: it is held by "),
        (lambda p: p._refs.update({0: 1}), "page 0 has 1 references, expected 2: it is held by "),
        (lambda p: (p._tables["b"].append(1), p._refs.update({1: 2})),
         "page 1 is held by a and b, but it is not published"),
        (lambda p: p._tables["a"].insert(0, p._tables["a"].pop()), "is held at different places"),
        (lambda p: p._keys["b"].__setitem__(0, b"?"), "page 0 is cached under another key than b"),
        (lambda p: p._refs.update({4: 0}), "3 pages are counted, expected 2"),
        (lambda p: p._idle.clear(), "the cache holds pages []"),
        (lambda p: p._page_of.update({b"x": 2}), "keys and pages do not name each other"),
    ],
)
def test_check_sees_faults(fault, message):
    pool = pool_of(5, 3, "a", "b")
    fill(pool, "a", b"1")
    pool.grow("a", 1)
    pool.share("b", [0])
    pool.take_slot("c")
    fill(pool, "c", b"3")
    pool.release("c")
    pool.check()
    if "cache holds" in message:
        pool._free_pages.append(2)
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
    assert bounded.num_pages == 4 and bounded.snapshot_bytes == 0
    with pytest.raises(RequestError, match=f"cache_bytes is {3 * one - 1}, expected at least"):
        StateSizes.plan(program, max_num_seqs=3, max_model_len=17, cache_bytes=3 * one - 1)


def test_a_budget_is_for_pages_and_snapshots(program):
    page, snapshot = bytes_per_page(program), bytes_per_snapshot(program)
    assert 0 < bytes_per_snapshot(program, ["encoder"]) < snapshot
    many = {"max_num_seqs": 3, "max_model_len": 64, "snapshot_interval": 4}
    for budget in (8 * page, 20 * page, 20 * page + 5 * snapshot, 10**9):
        sizes = StateSizes.plan(program, cache_bytes=budget, **many)
        assert sizes.num_pages >= 8
        assert sizes.num_pages * page + sizes.snapshot_bytes <= budget
    assert sizes.num_pages == 24 and sizes.snapshot_bytes == (24 // 4 + 6) * snapshot
    assert StateSizes.plan(program, **many) == sizes


@pytest.mark.parametrize(("positions", "fits"), [(783, True), (800, True), (801, False),
                                                 (1000, False)])
def test_case_d1_what_can_never_fit_is_refused(positions, fits):
    """50 pages of 16 tokens; no page is reserved, so all 800 positions can be used."""
    sizes = StateSizes(4, 50, 256, 16)
    if fits:
        sizes.require_room("r", positions)
        return
    with pytest.raises(RequestError) as caught:
        sizes.require_room("r", positions)
    assert f"needs {-(-positions // 16)} pages for {positions} positions, expected at most 50" \
        in caught.value.what and caught.value.where == "request r"
    with pytest.raises(RequestError):
        replace(sizes, num_pages=0).require_room("r", 1)
