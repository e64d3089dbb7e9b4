"""A row's bits do not depend on its batch, on chunking, on threads or on the host's float mode.

Cases A1-A4 and A6 of the field's bug reports: neighbours, row counts, chunk edges, ties.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from deepinfer.compiler import compile
from deepinfer.graph.limits import Limits
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.runtime.weights import load_weights
from tests.forward.cases import Array, Case, inputs, make_case, only, same_bits, tokens_for

TRACE = ("head.logits", "taps.hidden.1")
SEQS = 64


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    small = make_case(tmp_path_factory.mktemp("invariance"), seed=3)
    limits = Limits.for_model(small.cfg, max_num_seqs=SEQS, max_num_batched_tokens=512,
                              page_size=16)
    return Case(small.path, small.cfg, limits)


@pytest.fixture(scope="module")
def program(case: Case) -> Program:
    return compile(case.path, isa=host_levels(), limits=case.limits)


@pytest.fixture(params=host_levels())
def device(case: Case, program: Program, request: pytest.FixtureRequest,
           monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuDevice]:
    monkeypatch.setenv("DEEPINFER_CPU_ISA", request.param)
    made = open_device(case, program, threads=2)
    assert made.isa == request.param
    yield made
    made.close()


def open_device(case: Case, program: Program, threads: int) -> CpuDevice:
    pages = case.limits.pages_per_seq
    sizes = {"num_slots": SEQS, "num_pages": SEQS * pages, "pages_per_seq": pages}
    return CpuDevice(program, load_weights(program.manifest["weights"], case.path), sizes,
                     num_threads=threads, poison=True)


def run(device: CpuDevice, case: Case, rows: list[tuple[int, Array, int, int]]) -> dict[str, Array]:
    return device.run("prefill", inputs(case, rows), trace=TRACE)


def solo(device: CpuDevice, case: Case, tokens: Array, slot: int = 0) -> dict[str, Array]:
    return run(device, case, [(slot, tokens, 0, len(tokens))])


def test_any_chunking(device: CpuDevice, case: Case) -> None:
    """Whole prompt = token by token = odd chunks = chunks cut at the window, page and groups."""
    tokens = tokens_for(case, 70)
    whole = solo(device, case, tokens)
    for slot, cuts in enumerate(([*range(1, 70)], [1, 4, 9, 16, 25, 36, 49, 64], [7, 8, 9, 17],
                                 [16, 32, 48], [69], [33]), start=1):
        edges = [0, *cuts, 70]
        parts = [run(device, case, [(slot, tokens, a, b)])
                 for a, b in zip(edges, edges[1:], strict=False)]
        for name in whole:
            joined = np.concatenate([p[name] for p in parts])
            assert same_bits(joined, whole[name]), f"cut at {cuts}: {name}"


@pytest.mark.parametrize("count", [2, 3, 7, 16, 33, 64])
def test_alone_and_among_many(device: CpuDevice, case: Case, count: int) -> None:
    """A request's rows in a batch of ``count`` requests of other lengths, at any place."""
    tokens = tokens_for(case, 9)
    alone = solo(device, case, tokens)
    for place in {0, count // 2, count - 1}:
        rows = [(slot, tokens_for(case, 1 + slot % 7, slot), 0, 1 + slot % 7)
                for slot in range(count)]
        rows[place] = (place, tokens, 0, 9)
        first = sum(b - a for _, _, a, b in rows[:place])
        got = run(device, case, rows)
        for name in alone:
            assert same_bits(got[name][first:first + 9], alone[name]), f"place {place}: {name}"


def test_a_decode_step_of_64(device: CpuDevice, case: Case) -> None:
    """One row of each of 64 requests in phase decode = the same row alone, and = prefill's."""
    tokens = [tokens_for(case, 6, seed) for seed in range(SEQS)]
    for first in range(0, SEQS, 16):
        run(device, case, [(s, tokens[s], 0, 5) for s in range(first, first + 16)])
    together = decode(device, case, [(s, tokens[s], 5, 6) for s in range(SEQS)])
    for slot in (0, 31, 63):
        alone = decode(device, case, [(slot, tokens[slot], 5, 6)])
        prefill = run(device, case, [(slot, tokens[slot], 5, 6)])
        for name in alone:
            assert same_bits(together[name][slot:slot + 1], alone[name]), f"slot {slot}: {name}"
            assert same_bits(prefill[name], alone[name]), f"slot {slot}: {name}"


def decode(device: CpuDevice, case: Case, rows: list[tuple[int, Array, int, int]]
           ) -> dict[str, Array]:
    return device.run("decode", only("decode", inputs(case, rows)), trace=TRACE)


def test_the_comparisons_can_fail(device: CpuDevice, case: Case) -> None:
    """Negative controls: another token, a chunk without its history, a neighbour's pages."""
    tokens = tokens_for(case, 40)
    whole = solo(device, case, tokens)
    other = tokens.copy()
    other[3] ^= 1
    changed = solo(device, case, other)
    assert same_bits(changed["head.logits"][:3], whole["head.logits"][:3])
    assert not same_bits(changed["head.logits"][39:], whole["head.logits"][39:])
    run(device, case, [(5, tokens, 0, 20)])
    lost = run(device, case, [(6, tokens, 20, 40)])  # slot 6 has not seen the first chunk
    assert not same_bits(lost["head.logits"], whole["head.logits"][20:])
    given = inputs(case, [(5, tokens, 20, 40)])
    given["pages"] = given["pages"] ^ 1  # pages of other positions
    wrong = device.run("prefill", given, trace=TRACE)
    assert not same_bits(wrong["head.logits"], whole["head.logits"][20:])


def test_neighbours_of_nan(case: Case, program: Program) -> None:
    """Rows whose embedding, and so whole forward, is NaN do not touch their neighbours, nor does
    the state they leave behind touch the slot's and pages' next owner."""
    weights = load_weights(program.manifest["weights"], case.path)
    poisoned = weights["embed.weight"].copy()
    poisoned[7] = np.nan
    pages = case.limits.pages_per_seq
    device = CpuDevice(program, {**weights, "embed.weight": poisoned},
                       {"num_slots": SEQS, "num_pages": SEQS * pages, "pages_per_seq": pages},
                       num_threads=2, poison=True)
    tokens = tokens_for(case, 20)
    tokens[tokens == 7] = 8
    bad = np.full(40, 7, np.int32)
    alone = solo(device, case, tokens)
    got = run(device, case, [(1, bad, 0, 13), (2, tokens, 0, 20), (3, bad, 0, 5)])
    assert np.isnan(got["head.logits"][0]).all(), "the neighbour's logits were to be NaN"
    assert same_bits(got["head.logits"][13:33], alone["head.logits"])
    after = solo(device, case, tokens, slot=1)
    assert same_bits(after["head.logits"], alone["head.logits"])
    device.close()


def test_threads(case: Case, program: Program) -> None:
    tokens = [tokens_for(case, 40, s) for s in range(3)]
    results = []
    for threads in (1, 2, 3, 5):
        device = open_device(case, program, threads)
        assert device.num_threads == threads
        results.append([run(device, case, [(s, t, 0, 40) for s, t in enumerate(tokens)]),
                        run(device, case, [(1, np.append(tokens[1], 9), 40, 41)])])
        device.close()
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert all(same_bits(a[name], b[name]) for name in a)


def test_host_float_modes(device: CpuDevice, case: Case, program: Program) -> None:
    """A host that flushes denormals or rounds upward gets the same bits, and its mode back."""
    tokens = tokens_for(case, 30)
    expected = solo(device, case, tokens)
    library = ctypes.CDLL(None)
    mode = (ctypes.c_uint8 * 32)()  # fenv_t of x86-64: MXCSR is its last word
    library.fegetenv(mode)
    saved = bytes(mode)
    try:
        for mxcsr in (0x9FC0, 0x5F80):  # flush to zero and denormals are zero; round upward
            changed = (ctypes.c_uint8 * 32)(*saved)
            changed[28:32] = list(mxcsr.to_bytes(4, "little"))
            library.fesetenv(changed)
            got = solo(device, case, tokens)
            library.fegetenv(mode)
            assert int.from_bytes(bytes(mode)[28:32], "little") & 0xFFC0 == mxcsr & 0xFFC0
            library.fesetenv((ctypes.c_uint8 * 32)(*saved))
            for name in expected:
                assert same_bits(got[name], expected[name]), f"MXCSR {mxcsr:#x}: {name}"
    finally:
        library.fesetenv((ctypes.c_uint8 * 32)(*saved))


def test_no_rows_and_one_call_a_step(device: CpuDevice, case: Case) -> None:
    before = device.calls
    empty = inputs(case, [])
    out = device.run("prefill", empty)
    assert out["head.token"].shape == (0,)
    assert device.calls == before + 1
