"""From a difference to its cause: the first value of the graph that differs for the request.

Both sides run once more with every value copied out. Of each value only a hash a row is kept, so
that long runs fit in memory; then both run a last time for the one value that is to be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.program import Phase
from deepinfer.testing.bits import Element, first_element
from deepinfer.testing.invariance.bench import Bench, Stage, Trial
from deepinfer.testing.invariance.compare import Difference
from deepinfer.testing.invariance.subject import REFERENCE, Made

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """The first value that differs, in the order of positions and then of execution.

    Args:
        request, step, phase, position: where. layer: None outside the layers. op, loc: of the node
            that makes it. value: its name. row: of the step's array of it.
        element: which element of the row, with both bit patterns.
    """

    request: str
    step: int
    phase: str
    position: int
    layer: int | None
    op: str
    loc: str
    value: str
    row: int
    element: Element

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return (f"request {self.request}, step {self.step} ({self.phase}), position "
                f"{self.position}{layer}, op {self.op} at {self.loc}, value {self.value}, row "
                f"{self.row}, {self.element}")


# (position, value) -> what each computation of it gave: step, phase, row, hash or array
Seen = dict[tuple[int, str], list[tuple[int, str, int, Any]]]


class _Rows:
    """Collects a request's rows of traced values from the records of steps.

    Args:
        sequence: the tokens that the rows must have seen: those of refused drafts are left out.
        only: (position, value) to keep the arrays of; None: hashes of all.
    """

    def __init__(self, bench: Bench, request: str, sequence: Sequence[int],
                 only: tuple[int, str] | None = None) -> None:
        self.seen: Seen = {}
        self._bench, self._request, self._sequence = bench, request, sequence
        self._only = only

    def __call__(self, record: Any) -> None:
        index = next((i for i, r in enumerate(record.rows) if r.request_id == self._request), None)
        if index is None:
            return
        phase = self._bench.subject.program.phases[record.phase]
        end = self._known_until(record, index)
        for by, (owner, positions) in row_maps(phase, record.inputs).items():
            rows = np.flatnonzero((owner == index) & (positions < end)).tolist()
            for value in names_by_rows(phase)[by]:
                if value in record.outputs:
                    self._take(record, value, rows, positions)

    def _known_until(self, record: Any, index: int) -> int:
        """The first position of the step whose token is another than the sequence's."""
        _, first, end = record.inputs["spans"][index][:3].tolist()
        start = int(record.inputs["positions"][first])
        pairs = zip(record.inputs["tokens"][first:end].tolist(), self._sequence[start:],
                    strict=False)
        equal = [a == b for a, b in pairs]
        return start + (equal.index(False) if False in equal else len(equal))

    def _take(self, record: Any, value: str, rows: Sequence[int], positions: Array) -> None:
        for row in rows:
            key = int(positions[row]), value
            if self._only is None or self._only == key:
                array = record.outputs[value][row]
                kept = array.copy() if self._only else hashlib.blake2b(
                    np.ascontiguousarray(array).tobytes(), digest_size=12).digest()
                self.seen.setdefault(key, []).append((record.step, record.phase, row, kept))


def row_maps(phase: Phase, inputs: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """By the name of a run-time size: the request and the position of each row of that size."""
    maps = {}
    for prefix in ("", "kept_"):
        if f"{prefix}positions" in inputs:
            size = _size(phase, f"{prefix}positions")
            maps[size] = (inputs[f"{prefix}request"], inputs[f"{prefix}positions"])
    if "group_rows" in inputs:  # a group belongs to the position that closes it
        closing = inputs["group_rows"]
        maps[_size(phase, "group_rows")] = (inputs["request"][closing],
                                            inputs["positions"][closing])
    if "sample_rows" in inputs:
        rows = "kept_positions" if "kept_positions" in inputs else "positions"
        owner, positions = maps[_size(phase, rows)]
        picked = inputs["sample_rows"]
        maps[_size(phase, "sample_rows")] = (owner[picked], positions[picked])
    return maps


def _size(phase: Phase, name: str) -> str:
    dim = phase.value(name).shape[0]
    assert not isinstance(dim, int)
    return dim[0]


def names_by_rows(phase: Phase) -> dict[str, list[str]]:
    """The values that a step makes, by the size that their rows are counted in. Rows that belong
    to no single position (experts' tiles, say) have a multiple of a size, and are left out."""
    out: dict[str, list[str]] = {size: [] for size, _ in phase.sizes}
    for v in phase.values:
        if v.kind == "temp" and v.shape and not isinstance(v.shape[0], int) and v.shape[0][1] == 1:
            out.setdefault(v.shape[0][0], []).append(v.name)
    return out


def locate(bench: Bench, trial: Trial, difference: Difference) -> Origin | None:
    """Run both sides again and find the first value that differs; None if none does.

    Then no value of the graph differs up to where the results do: the runtime itself chose another
    token, or the difference does not come back.
    """
    job = {name: origin for stage in trial.stages for name, origin in stage.tested.items()}
    alone = Trial("reference", REFERENCE, [Stage([job[difference.request]])])
    clean = Bench(bench.subject, requests=0, seed=0)
    order = _order(bench)
    trace = _traceable(bench)
    sides = ((clean, alone, job[difference.request].name), (bench, trial, difference.request))
    sequence = bench.alone(job[difference.request]).sequence
    seen = []
    for side, which, name in sides:
        rows = _Rows(bench, name, sequence)
        side.serve(which, also=rows, trace=trace)
        seen.append(rows.seen)
    key = _first(seen[0], seen[1], order, difference.position)
    if key is None:
        return None
    arrays = []
    for side, which, name in sides:
        rows = _Rows(bench, name, sequence, key)
        side.serve(which, also=rows, trace=[key[1]])
        arrays.append(rows.seen[key])
    expected = arrays[0][0][3]
    for step, phase, row, found in arrays[1]:
        element = first_element(expected, found)
        if element is not None:
            made = order.get(key[1], (0, Made("?", "?", ())))[1]
            return Origin(difference.request, step, phase, key[0], made.layer, made.op, made.loc,
                          key[1], row, element)
    return None


def _order(bench: Bench) -> dict[str, tuple[int, Made]]:
    """Of each value: its place in the order of execution and the node that makes it."""
    order: dict[str, tuple[int, Made]] = {}
    for phase in bench.subject.program.phases:
        if phase != "draft":
            for i, made in enumerate(bench.subject.made(phase)):
                for value in made.values:
                    order.setdefault(value, (i, made))
    return order


def _traceable(bench: Bench) -> list[str]:
    """The values that every phase of the target makes and whose rows have positions."""
    phases = [p for name, p in bench.subject.program.phases.items() if name != "draft"]
    named = [{n for names in names_by_rows(p).values() for n in names} for p in phases]
    return sorted(set.intersection(*named))


def _first(expected: Seen, found: Seen, order: Mapping[str, tuple[int, Made]], last: int
           ) -> tuple[int, str] | None:
    differing = [
        (position, order.get(value, (len(order), None))[0], value)
        for (position, value), computed in found.items()
        if position <= last and (position, value) in expected
        and any(kept != expected[position, value][0][3] for _, _, _, kept in computed)]
    if not differing:
        return None
    position, _, value = min(differing)
    return position, value
