"""Comparing what a request gave: which difference is found first, and what is not compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepinfer.runtime.request import TokenLogprobs
from deepinfer.testing.invariance.compare import Counts, Difference, compare
from deepinfer.testing.invariance.record import Logits, Run, Served

ROW = np.arange(4, dtype=np.float32)


def served(**changes: object) -> Served:
    logits = [Logits(p, 1, "decode", ROW + p) for p in (1, 2, 3)]
    made = Served((7, 8), [5, 6, 9], [TokenLogprobs(-1.5, [(5, -1.5), (4, -2.0)])] * 3, "length",
                  logits)
    return replace(made, **changes)  # type: ignore[arg-type]


def first(found: Served, *, logits_only: bool = False, counts: Counts | None = None
          ) -> Difference | None:
    got = compare("x", {"r": served()}, Run(served={"r": found}), counts or Counts(),
                  logits_only=logits_only)
    return got[0] if got else None


def test_equal_is_counted() -> None:
    counts = Counts()
    assert first(served(), counts=counts) is None
    assert (counts.requests, counts.tokens, counts.logprobs, counts.rows) == (1, 3, 9, 3)
    assert counts.bits == 3 * 32 + 3 * (32 + 2 * 64) + 3 * 4 * 32


def test_one_bit_of_a_logit() -> None:
    row = ROW + 2
    row[3] = np.nextafter(row[3], np.float32(9))
    found = first(served(logits=[*served().logits, Logits(2, 8, "prefill", row)]))
    assert found is not None and (found.what, found.position, found.step) == ("logits", 2, 8)
    assert str(found) == ("request r under x: logits at position 2, step 8: element [3]: 5.0000005 "
                          "(0x40a00001), expected 5.0 (0x40a00000), 1 ulp; 1 of 4 elements differ")


def test_logprobs_and_their_ids() -> None:
    good = served().logprobs
    assert good is not None
    chosen = first(served(logprobs=[*good[:2], TokenLogprobs(-1.5000001, good[2].top)]))
    assert chosen is not None and (chosen.what, chosen.position) == ("logprob", 3)
    top = first(served(logprobs=[TokenLogprobs(-1.5, [(5, -1.5), (4, -2.0000002)]), *good[1:]]))
    assert top is not None and (top.what, top.position) == ("top logprob", 1)
    ids = first(served(logprobs=[TokenLogprobs(-1.5, [(4, -1.5), (5, -2.0)]), *good[1:]]))
    assert ids is not None and ids.detail == "ids [4, 5], expected [5, 4]"


def test_tokens_and_what_follows_them() -> None:
    """After a differing token nothing is comparable; the row that chose it still is."""
    other = [*served().logits[:2], Logits(3, 1, "decode", ROW * 0)]
    found = first(served(tokens=[5, 1, 2], logits=other))
    assert found is not None and (found.what, found.position) == ("token", 2)
    assert found.detail == "1 (0x00000001), expected 6 (0x00000006): token 1 of the output"
    short = first(served(tokens=[5, 6]))
    assert short is not None and short.detail.startswith("the end, expected 9 (0x00000009)")
    cause = first(served(tokens=[5, 1], logits=[Logits(2, 4, "verify", ROW)]))
    assert cause is not None and cause.what == "logits", "the logits explain the token"


def test_the_reason_it_ended() -> None:
    found = first(served(finish_reason="stop"))
    assert found is not None and (found.what, found.detail) == ("finish", "stop, expected length")


def test_a_request_that_never_finished() -> None:
    (found,) = compare("x", {"r": served()}, Run(), Counts())
    assert found.detail == "it never finished"


def test_rows_alone_can_be_compared() -> None:
    row = Served((7, 8, 5), [1], None, "length", [Logits(2, 1, "prefill", ROW + 2)])
    counts = Counts()
    assert first(row, logits_only=True, counts=counts) is None and counts.rows == 1
    row.logits = [Logits(2, 1, "prefill", ROW)]
    found = first(row, logits_only=True)
    assert found is not None and found.what == "logits"
