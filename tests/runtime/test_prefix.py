"""The prefix cache: what is taken from it is what computing would have left, byte for byte."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import DeepInferError, RequestError
from deepinfer.runtime.prefix_keys import page_keys, root_key
from deepinfer.runtime.store import PageStore
from tests.runtime.cache_device import FACTS, PAGE, RING, RINGS, WIDTH, WINDOW, Serving

ONE = 3 * RING * 4  # bytes of a snapshot


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(50) for i in range(n)]


def last_end(positions: int) -> int:
    return positions - positions % PAGE


def test_case_a3_a_repeated_prompt_hits_until_the_cache_is_cleared():
    s = Serving()
    p = prompt(23)
    assert [s.serve(p), s.serve(p)] == [0, 20]
    s.cache.clear()
    assert s.serve(p) == 0 and s.serve(p) == 20
    assert s.pool.free_pages == s.num_pages


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 40, 41])
@pytest.mark.parametrize("garbage", [0, 0xFFFFFFFF, 0x7F800001])
def test_case_d2_rings_come_back_with_the_pages(length, garbage):
    """Cold, again, with one new token, with a long tail, and after other requests; whatever was in
    the unused slots and pages (case D7). ``start`` compares the state with a cold run's."""
    p = prompt(length)
    for tail in ([], [1], prompt(13, 5)):
        s = Serving(garbage=garbage)
        assert s.serve(p) == 0
        for other in range(3):
            s.serve(prompt(21, 10 + other))
        # The last page end before the last position; a hit is there for a prompt of two pages.
        assert s.serve(p + tail) == last_end(length - 1 + bool(tail))


def test_a_hit_ends_at_a_snapshot():
    """Every second page end, and the last of a request, has one; what lies between has none."""
    s = Serving(num_pages=64)
    p = prompt(31)
    s.serve(p)
    for same, length in ((31, 28), (28, 28), (27, 24), (24, 24), (23, 16), (17, 16), (15, 8),
                         (8, 8), (7, 0)):
        hit = s.cache.lookup(p[:same] + prompt(9, 3), "", same)
        assert hit.length == length == hit.replay_from and len(hit.pages) == length // PAGE
        assert s.cache.lookup(p, "", same).length == length


def test_the_end_of_the_output_is_kept_for_the_next_turn():
    s = Serving(interval=8)
    p = prompt(10)
    slot, _ = s.start("a", p)
    s.prefill("a", slot, p, 0)
    tokens = [*p, 3]
    for i in range(12):
        s.decode("a", slot, tokens, [i] * (i % 2), len(p))
    s.end("a", slot, tokens, len(tokens) - 1, len(p))
    assert len(s.cache.snapshots) == 2  # end of the prompt, end of the output: none between
    for same, length in ((len(tokens), last_end(len(tokens) - 1)), (11, 8), (7, 0)):
        assert s.cache.lookup(tokens[:same] + [49] * 5, "", same).length == length


def test_a_prompt_is_cut_where_its_snapshots_are():
    s = Serving(interval=2)
    cuts, at = [], 0
    while at < 31:
        at = s.cache.cuts(at, min(at + 100, 31), 31)
        cuts.append(at)
    assert cuts == [8, 16, 24, 28, 31]
    assert s.cache.cuts(9, 12, 31) == 12 and s.cache.cuts(16, 31, 31) == 24
    assert Serving(given={"keep_tokens": 10}, interval=9).cache.cuts(0, 31, 31) == 20
    assert Serving(mode="replay").cache.cuts(0, 31, 31) == Serving(mode="off").cache.cuts(
        0, 31, 31) == 31


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 100])
def test_case_a4_hits_and_cuts_do_not_depend_on_chunks(chunk):
    s = Serving()
    p = prompt(30)
    assert s.serve(p, chunk=chunk) == 0 and s.serve(p, chunk=chunk) == 28
    assert s.cache.lookup(p[:17], "", 16).length == 16


def test_case_d3_keys_have_domains():
    """Salts "a", "b", none and empty; tokens that read alike; layouts, weights and modes."""
    same = prompt(64)
    s = Serving(num_pages=200, num_slots=2)
    for salt in ("a", "b", None, ""):
        assert s.serve(same, salt) == 0
        assert s.serve(same, salt) == 60
    assert s.serve([1, 23] * 8) == 0 and s.serve([12, 3] * 8) == 0
    assert s.serve([*same[:4], 49, *same[5:]]) == 0  # snapshots are at 8, 16, ...
    assert s.serve([*same[:8], 49, *same[9:]]) == 8
    keys = {root_key(*given) for given in (
        ("w", "exact", FACTS, ("a", "b")), ("w", "replay", FACTS, ("a", "b")),
        ("wexact", "", FACTS, ("a", "b")), ("w", "exact", FACTS, ("a",)),
        ("w", "exact", FACTS, ("ab",)), ("w", "exact", FACTS | {"page_size": 8}, ("a", "b")),
        ("w", "exact", FACTS | {"state": FACTS["state"][1:]}, ("a", "b")))}
    assert len(keys) == 7
    chains = [list(page_keys(b"r", t, 9, 2, salt)) for t in ([1, 2, 3, 4, 5], [3, 4, 1, 2])
              for salt in ("", None, "\0")]
    assert [len(c) for c in chains] == [2] * 6 and len({k for c in chains for k in c}) == 12
    assert list(page_keys(b"r", [1, 2, 3], 1, 4, "")) == []


def test_case_d3_keys_are_the_same_in_every_process():
    code = ("import json; from deepinfer.runtime.prefix_keys import *\n"
            "from tests.runtime.cache_device import FACTS\n"
            "root = root_key('w', 'exact', FACTS, ['a'])\n"
            "print(json.dumps([k.hex() for k in page_keys(root, range(16), 4, 4, 's')]))")
    found = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed},
                            cwd=Path(__file__).parents[2], check=True, capture_output=True,
                            text=True).stdout for seed in ("1", "77")}
    here = list(page_keys(root_key("w", "exact", FACTS, ["a"]), range(16), 4, 4, "s"))
    assert [json.loads(f) for f in found] == [[k.hex() for k in here]]


@pytest.mark.parametrize("chunks", [0, 1, 2, 6])
def test_case_d4_abort_during_chunked_prefill(chunks):
    """Only pages whose tokens are committed are published; others take the freed ones."""
    s = Serving(num_pages=14, num_slots=2)
    p = prompt(40)
    slot, _ = s.start("a", p)
    s.device.compute(slot, s.pool.table("a"), [9] * 40, 0, 40)  # a step that was never committed
    done = 0
    for _ in range(chunks):
        end = s.cache.cuts(done, done + 6, 40)
        s.device.compute(slot, s.pool.table("a"), p, done, end)
        s.cache.commit("a", p, end, slot, "", "chat", 40)
        done = end
    assert s.pool.cached_pages == done // PAGE
    s.end("a", slot, p, done, 40)
    s.pool.release("a")
    assert s.pool.free_pages == 14
    other = prompt(16, 9)
    s.start("b", other)
    _, hit = s.start("c", p)
    # Chunks end at 6, 8, 14, 16, 22, 24: the last whole page but one may have no snapshot.
    assert hit.length == {0: 0, 1: 4, 2: 8, 6: 24}[chunks]


def test_preempted_and_resumed():
    """What a request had computed is cached when it comes back, unless it was needed meanwhile."""
    s = Serving(num_pages=12, num_slots=2)
    p = prompt(18)
    slot, _ = s.start("a", p)
    s.prefill("a", slot, p, 0)
    tokens = [*p, 3]
    for i in range(5):
        s.decode("a", slot, tokens, [i], len(p))
    s.end("a", slot, tokens, len(tokens) - 1, len(p))
    _, hit = s.start("a", tokens)
    assert hit.length == last_end(len(tokens) - 1) == 28
    s.pool.release("a")
    slot, _ = s.start("b", prompt(44, 4))
    s.pool.release("b")
    _, hit = s.start("a", tokens)
    assert hit.length == 0 and s.cache.lookup(tokens, "", 8).length == 0


def test_decode_takes_snapshots_whatever_is_rejected():
    """A page end passed by a verify step is restorable although rejected rows came after it."""
    for seed in range(20):
        s, rng = Serving(interval=3), random.Random(seed)
        p = prompt(rng.randrange(1, 12), seed)
        slot, _ = s.start("a", p)
        s.prefill("a", slot, p, 0)
        tokens = [*p, 3]
        for _ in range(12):
            accepted = [rng.randrange(50) for _ in range(rng.randrange(WIDTH + 1))]
            s.decode("a", slot, tokens, accepted, len(p))
            hit = s.cache.lookup(tokens, "", len(tokens) - 1)
            assert hit.length == last_end(len(tokens) - 1)
            other, _ = s.start("b", tokens)
            s.pool.release("b")
            assert other != slot


@pytest.mark.parametrize(("passed", "taken"), [(0, True), (WIDTH + 1, True),
                                               (WIDTH + 2, False)])
def test_a_ring_that_was_overwritten_gives_no_snapshot(passed, taken):
    s = Serving(interval=99)
    p = prompt(6 * PAGE + passed)
    slot, _ = s.start("a", p)
    s.device.compute(slot, s.pool.table("a"), p, 0, len(p))
    s.cache.commit("a", p, len(p), slot, "", "chat", len(p))
    assert s.pool.cached_pages == len(p) // PAGE
    assert len(s.cache.snapshots) == int(taken)


def test_snapshots_have_a_budget_and_go_with_their_pages():
    s = Serving(num_pages=16, max_snapshot_bytes=2 * ONE)
    s.serve(prompt(9, 1))  # one snapshot, at 8
    s.serve(prompt(9, 2))
    assert len(s.cache.snapshots) == 2 and s.pool.cached_pages == 4
    s.serve(prompt(9, 1))
    s.serve(prompt(9, 3))
    # 2 was used least recently; its pages lead nowhere now and are free.
    assert s.serve(prompt(9, 1)) == 8 and s.pool.cached_pages == 4
    assert s.cache.lookup(prompt(9, 2), "", 8).length == 0
    s.start("big", prompt(60, 4))
    assert len(s.cache.snapshots) <= 1 and s.cache.snapshots.nbytes <= ONE
    tiny = Serving(max_snapshot_bytes=ONE - 1)
    assert tiny.serve(prompt(9)) == tiny.serve(prompt(9)) == 0 and len(tiny.cache.snapshots) == 0


def test_an_evicted_page_takes_along_what_follows_it():
    s = Serving(num_pages=12)
    p = prompt(33)
    s.serve(p)
    assert s.pool.cached_pages == 8 and len(s.cache.snapshots) == 4
    first = next(iter(s.cache.snapshots._parent))  # the page at 0 .. 3
    s.pool.discard(first)
    s.cache.snapshots.page_evicted(first)
    s.cache.check()
    assert s.pool.cached_pages == 0 and len(s.cache.snapshots) == 0
    assert s.cache.snapshots._children == {} == s.cache.snapshots._parent


def test_replay_keeps_no_snapshots_and_starts_a_window_earlier():
    s = Serving(mode="replay")
    p = prompt(31)
    s.serve(p)
    for limit, length in ((30, 28), (27, 24), (7, 4), (3, 0)):
        hit = s.cache.lookup(p, "", limit)
        assert (hit.length, hit.replay_from) == (length, max(0, length - WINDOW))
        assert hit.snapshot is None
    assert "read_slot" not in s.device.moved and len(s.cache.snapshots) == 0
    assert s.serve(p) == 28 and "write_slot" not in s.device.moved


def test_off_does_nothing():
    s = Serving(mode="off")
    assert s.serve(prompt(20)) == s.serve(prompt(20)) == 0
    assert s.pool.cached_pages == 0 and s.device.moved == []


def test_decoder_replay_keeps_the_encoders_rings_only():
    s = Serving(given={"parts": ("encoder",), "keep_tokens": 10}, interval=99)
    p = prompt(31)
    s.serve(p)
    # A hit ends before the rows that are always computed; a longer prompt can take more.
    assert s.cache.lookup(p, "", 21).length == 20
    hit = s.cache.lookup(p + prompt(20, 2), "", 41)
    assert hit.length == 28 and list(hit.snapshot) == list(RINGS[:1])


def test_a_snapshot_that_another_request_took_stays():
    s = Serving(interval=99)
    p = prompt(10)
    slot, _ = s.start("a", p)
    s.prefill("a", slot, p, 0)
    tokens = [*p, 3]
    while len(tokens) <= 14:
        s.decode("a", slot, tokens, [], len(p))
    branch = [*tokens[:12], 49, 49]
    assert s.start("b", branch)[1].length == 12
    while len(tokens) <= 18:
        s.decode("a", slot, tokens, [], len(p))
    assert s.cache.lookup(tokens, "", 16).length == 16
    assert s.cache.lookup(branch, "", 13).length == 12


def test_two_requests_with_one_prompt_at_once():
    s = Serving()
    p = prompt(22)
    slots = [s.start(owner, p)[0] for owner in "ab"]
    for owner, slot in zip("ab", slots, strict=True):
        s.prefill(owner, slot, p, 0)
    assert s.pool.cached_pages == 5
    s.end("a", slots[0], p, 22, 22)
    assert s.start("c", p)[1].length == 20
    s.end("b", slots[1], p, 22, 22)
    assert s.pool.free_pages == s.num_pages - 6


def test_a_stale_or_too_large_hit_is_refused():
    s = Serving(num_pages=8)
    p = prompt(17)
    s.serve(p)
    hit = s.cache.lookup(p, "", 16)
    assert s.cache.fits(hit, 8) and not s.cache.fits(hit, 9)
    s.start("b", prompt(32, 3))
    slot = s.pool.take_slot("a")
    with pytest.raises(DeepInferError) as caught:
        s.cache.restore("a", slot, hit)
    assert caught.value.what == "a hit of 16 positions cannot be restored any more"
    assert caught.value.where == "request a"


@pytest.mark.parametrize(("given", "message"), [
    ({"mode": "maybe"}, "prefix_cache is 'maybe', expected one of exact, replay, off"),
    ({"interval": 0}, "snapshot_interval is 0, expected at least 1"),
    ({"given": {"keep_tokens": 0}}, "keep_tokens is 0, expected at least 1"),
])
def test_wrong_settings(given, message):
    with pytest.raises(RequestError, match=message):
        Serving(**given)


def test_check_sees_faults():
    s = Serving()
    s.serve(prompt(9))
    s.cache.snapshots.nbytes += 1
    with pytest.raises(DeepInferError, match=f"1 snapshots of {ONE} bytes, expected {ONE + 1}"):
        s.cache.check()
    s.cache.snapshots.nbytes -= 1
    s.pool.on_evict = None
    s.pool.clear_cache()
    with pytest.raises(DeepInferError, match="1 belong to no cached page"):
        s.cache.check()


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_a_restart_finds_what_was_stored(tmp_path, mode):
    p = prompt(31)
    store = PageStore(tmp_path, "weights")
    assert Serving(store=store, mode=mode).serve(p) == 0
    s = Serving(store=PageStore(tmp_path, "weights"), mode=mode)
    assert s.serve(p) == 28 and "write_pages" in s.device.moved
    s.device.moved.clear()
    assert s.serve(p) == 28 and "write_pages" not in s.device.moved  # now it is in the pool
    for different in ({"identity": "other"}, {"mode": "replay" if mode == "exact" else "exact"}):
        assert Serving(store=store, **({"mode": mode} | different)).serve(p) == 0


def test_pool_and_store_together(tmp_path):
    """Some pages of a hit are in the pool, those between and after come from files."""
    p = prompt(33)
    s = Serving(num_pages=9, store=PageStore(tmp_path, "weights"))
    s.serve(p)
    for index in (1, 2, 5, 7):
        assert s.pool.discard(s.cache.lookup(p, "", 32).keys[index])
    s.cache.snapshots.clear()
    s.serve(prompt(17, 3))  # four pages that were used after those of the hit, and one free one
    assert s.pool.cached_pages == 8
    hit = s.cache.lookup(p, "", 32)
    assert [i for i, page in enumerate(hit.pages) if page is None] == [1, 2, 5, 7]
    assert s.cache.fits(hit, 9) and not s.cache.fits(hit, 10)
    assert s.start("a", p)[1].length == 32
    assert s.pool.table("a")[0] == hit.pages[0]


def test_the_end_of_the_output_is_stored(tmp_path):
    s = Serving(interval=99, store=PageStore(tmp_path, "weights"))
    p = prompt(10)
    slot, _ = s.start("a", p)
    s.prefill("a", slot, p, 0)
    tokens = [*p, 3]
    for i in range(12):
        s.decode("a", slot, tokens, [i] * (i % 2), len(p))
    s.end("a", slot, tokens, len(tokens) - 1, len(p))
    again = Serving(store=PageStore(tmp_path, "weights"))
    assert again.start("b", [*tokens, 1])[1].length == last_end(len(tokens) - 1) == 28
    assert again.cache.lookup(tokens, "", 27).length == 8  # of the pages between, no snapshot


def test_a_damaged_file_shortens_the_hit(tmp_path):
    p = prompt(33)
    Serving(store=PageStore(tmp_path, "weights")).serve(p)
    s = Serving(store=PageStore(tmp_path, "weights"))
    keys = s.cache.lookup(p, "", 32).keys
    file = tmp_path / keys[5].hex()[:2] / f"{keys[5].hex()}.page"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    s = Serving(store=PageStore(tmp_path, "weights"))
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        assert s.start("a", p)[1].length == 16
    s.prefill("a", 0, p, 16)
    assert file.exists()  # written anew
    s.pool.release("a")
    assert Serving(store=PageStore(tmp_path, "weights")).serve(p) == 32
    snapshot = tmp_path / keys[7].hex()[:2] / f"{keys[7].hex()}.snapshot"
    snapshot.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged entry"):
        assert Serving(store=PageStore(tmp_path, "weights")).serve(p) == 24


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**16)), max_size=40)


@settings(max_examples=60)
@given(STEPS, st.sampled_from(["exact", "replay"]), st.sampled_from([None, 0, 3 * ONE]))
def test_any_order_of_events(events, mode, budget):
    """Requests with common beginnings come, run, are aborted, preempted and resumed while the pool
    shrinks and is cleared. Every hit is compared with a cold run, all books after every step."""
    s = Serving(num_pages=14, num_slots=3, mode=mode, max_snapshot_bytes=budget)
    running: dict[str, tuple[int, list[int], int]] = {}  # slot, tokens, computed
    made = 0
    for event, arg in events:
        rng = random.Random(arg)
        owner = rng.choice(sorted(running)) if running else None
        if event <= 3:
            n = rng.randrange(1, 20)
            tokens = ([rng.randrange(2)] * 30)[:n] + prompt(rng.randrange(4), arg % 3)
            hit = s.cache.lookup(tokens, "", len(tokens) - 1)
            if s.pool.free_slots and s.cache.fits(hit, -(-len(tokens) // PAGE)):
                slot, hit = s.start(str(made), tokens)
                running[str(made)] = (slot, tokens, hit.length)
                made += 1
        elif event == 9:
            s.pool.resize(rng.randrange(6, 15))
        elif event == 8 and arg % 4 == 0:
            s.cache.clear()
        elif owner is not None:
            slot, tokens, computed = running.pop(owner)
            if event <= 5:
                s.end(owner, slot, tokens, computed, len(tokens))
            elif computed < len(tokens):
                end = s.cache.cuts(computed, min(len(tokens), computed + 1 + arg % 7),
                                   len(tokens))
                s.device.compute(slot, s.pool.table(owner), tokens, computed, end)
                s.cache.commit(owner, tokens, end, slot, "", "chat", len(tokens))
                running[owner] = (slot, tokens, end)
            else:
                tokens = [*tokens, arg % 2]
                if s.pool.free_pages < 2:
                    s.end(owner, slot, tokens, computed, len(tokens))
                else:
                    s.decode(owner, slot, tokens, [arg % 2] * (arg % (WIDTH + 1)), len(tokens))
                    running[owner] = (slot, tokens, len(tokens) - 1)
        s.cache.check()
    for owner, (slot, tokens, computed) in running.items():
        s.end(owner, slot, tokens, computed, len(tokens))
    assert s.pool.free_pages == s.pool.num_pages and s.pool.free_slots == 3
