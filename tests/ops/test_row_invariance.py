"""Every op, generated from its signature: a row's bits depend on nothing but the row.

The bytes of f(x)[i] are those of f(x[i:i+1]); what rows write is what each writes alone; no rows
work; a NaN row stays alone. The kernels equal these references bit for bit (tests/cpu).
"""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.ir import ELEMENTWISE, OPS, op
from tests.ops.generated import ALL, HINTS, NOT_BY_ROW, Array, Step, make

CONSTANT = ("hyper_start", "recent_start")  # their rows are all alike
BY_ROW = [name for name in ALL if name not in NOT_BY_ROW]


def copied(step: Step) -> Step:
    return step.with_arrays(**{n: a.copy() for n, a in step.named().items()})


def rows_of(step: Step, outputs: tuple[Array, ...], i: int) -> list[bytes]:
    """The bytes of row i in each output."""
    found = []
    for output in outputs:
        size = len(output) // step.rows
        assert size * step.rows == len(output) and size > 0
        found.append(output[i * size:(i + 1) * size].tobytes())
    return found


def written(step: Step) -> list[bytes]:
    return [step.arrays[i].tobytes() for i in step.op.written()]


def test_every_op_is_here():
    assert len(BY_ROW) > 50 and set(NOT_BY_ROW) <= set(ALL) and set(HINTS) <= set(ALL)
    for name in BY_ROW:
        step = make(name)
        assert any(step.led(o) for o in step.op.signature.inputs), f"{name} has no rows"


@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_alone(name):
    step = make(name)
    whole, state = copied(step), copied(step)
    outputs = whole.run()
    assert outputs or whole.op.written()
    differing = set()
    for i in range(step.rows):
        got = state.alone([i]).run()  # written operands are shared: each row writes after another
        expected = rows_of(step, outputs, i)
        assert [g.tobytes() for g in got] == expected, f"row {i}"
        differing.add(tuple(expected))
    assert len(differing) > 1 or name in CONSTANT or not outputs, "rows are all alike"
    assert written(state) == written(whole)
    if step.op.written():
        assert written(whole) != written(step), "nothing was written"


def test_the_check_itself():
    """An op that looks at its neighbours is caught, by bits and by NaN."""
    def softened(x):
        return x / np.abs(x).max()

    op("x:f32[N,C] -> y:f32[N,C]", order=ELEMENTWISE)(softened)
    for check in (test_a_row_alone, test_rows_in_another_order, test_a_nan_row_stays_alone):
        with pytest.raises(AssertionError, match="row "):
            check("softened")
    del OPS["softened"]


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_in_another_order(name):
    step = make(name, seed=1)
    outputs, order = copied(step).run(), [3, 1]
    mixed = copied(step).alone(order)
    got = mixed.run()
    for at, i in enumerate(order):
        assert rows_of(mixed, got, at) == rows_of(step, outputs, i), f"row {i} at place {at}"


@pytest.mark.parametrize("name", ALL)
def test_no_rows(name):
    if name in NOT_BY_ROW:
        order, offsets = OPS["group_rows"](np.zeros((0, 2), np.int32), experts=4)
        assert order.shape == (0,) and not offsets.any()
        return
    step = make(name)
    empty = copied(step).alone([])
    assert all(len(output) == 0 for output in empty.run())
    assert written(empty) == written(step)


def is_rows(step: Step) -> dict[str, int]:
    """The float operands that are led by rows, with the entries of one row."""
    return {o.name: step.led(o) for o, a in zip(step.op.signature.inputs, step.arrays, strict=True)
            if step.led(o) and a.dtype.kind not in "iu"}


@pytest.mark.parametrize("name", [n for n in BY_ROW if is_rows(make(n))])
def test_a_nan_row_stays_alone(name):
    """Row 2 is NaN in every float operand (codes and scales too); the others keep their bits."""
    clean = make(name, seed=2)
    poisoned = copied(clean)
    for operand, n in is_rows(clean).items():
        poisoned.named()[operand][2 * n:3 * n].view(np.uint8)[...] = 0xFF  # NaN in every format
    expected, got = copied(clean).run(), poisoned.run()
    for i in range(clean.rows):
        if i != 2:
            assert rows_of(clean, got, i) == rows_of(clean, expected, i), f"row {i}"
    without = copied(clean)
    rest = without.alone([0, 1, 3, 4])
    rest.run()
    for at in poisoned.op.written():
        # The NaN row wrote its own places; where the others wrote, nothing differs.
        a, b = poisoned.arrays[at].view(np.uint8), without.arrays[at].view(np.uint8)
        before = clean.arrays[at].view(np.uint8)
        touched = b != before
        assert touched.any() and np.array_equal(a[touched], b[touched])
