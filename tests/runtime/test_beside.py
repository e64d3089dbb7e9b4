"""One other thread: its work is done, its errors come back, and it is never out of step."""

from __future__ import annotations

import threading
import weakref

import pytest

from deepinfer.runtime.beside import Beside


@pytest.fixture
def beside():
    made = Beside()
    yield made
    made.close()
    made.close()


def test_work_is_done_on_another_thread_before_the_end(beside):
    threads = []
    for _ in range(3):
        beside.begin(lambda: threads.append(threading.get_ident()))
        beside.end()
    assert len(threads) == 3 and len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_an_error_is_raised_at_its_own_end(beside):
    beside.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        beside.end()
    done = []
    beside.begin(lambda: done.append(1))
    beside.end()
    assert done == [1]


def test_a_wait_that_was_cut_short_is_made_up_for(beside):
    """As by an interrupt between ``begin`` and ``end``: outcomes stay with their work."""
    order = []
    beside.begin(lambda: order.append("first"))
    beside.begin(lambda: order.append("second"))  # waits for the first
    assert order[0] == "first"
    beside.end()
    assert order == ["first", "second"]
    beside.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        beside.begin(lambda: order.append("never"))
    beside.begin(lambda: order.append("third"))
    beside.end()
    assert order == ["first", "second", "third"]


def test_what_it_held_is_let_go(beside):
    class Held:
        def __call__(self) -> None:
            pass

    held = Held()
    gone = weakref.ref(held)
    beside.begin(held)
    beside.end()
    beside.begin(lambda: None)  # by then the thread has dropped the first
    beside.end()
    del held
    assert gone() is None
