"""Faults to inject: for each axis a device that breaks its promise, to prove that a check sees it.

Every fault is a device around a device. It is silent under the reference condition (a request
alone, in an engine of its own) and shows only under the condition that its axis varies. Most are
faults that served models really had; the docstrings name them by their cause.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from deepinfer.testing.bits import flip_last_bit

Array = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]
PREFILL, VERIFY = "prefill", "verify"


class Fault:
    """A device that does as ``inner`` does, but for what a child changes.

    Args:
        inner: the device. setting: of its engine, as the harness has it. facts: of the Program.
    """

    text: ClassVar[str]

    def __init__(self, inner: Any, setting: Any, facts: Mapping[str, Any]) -> None:
        self.inner, self.setting, self.facts = inner, setting, facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, phase_name: str, inputs: Mapping[str, Array], *, trace: Sequence[str] = ()
            ) -> Arrays:
        if phase_name == "draft":  # what it proposes may be anything: no result depends on it
            return dict(self.inner.run(phase_name, inputs, trace=trace))
        out: Arrays = dict(self.inner.run(phase_name, self.before(phase_name, dict(inputs)),
                                          trace=trace))
        self.after(phase_name, inputs, out)
        return out

    def before(self, phase: str, inputs: Arrays) -> Arrays:
        """The inputs that the device gets."""
        return inputs

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        """Changes the outputs in place."""

    def nudge(self, phase: str, out: Arrays, rows: Sequence[int]) -> None:
        """Change these sampled rows as little as can be: the last bit of each number."""
        if len(rows):
            logprob = self.facts["outputs"][phase]["logprob"]
            for name in (logprob, self.facts["values"]["logits"]):
                if name in out:
                    out[name] = out[name].copy()
                    out[name][rows] = flip_last_bit(out[name][rows])


def owners(inputs: Mapping[str, Array]) -> Array:
    """Of each sampled row, the index of its request in the step."""
    owner = inputs.get("kept_request", inputs["request"])
    return np.asarray(owner[inputs.get("sample_rows", np.arange(len(owner)))])


def starts(inputs: Mapping[str, Array]) -> Iterator[tuple[int, int, int, Array]]:
    """(request, slot, first position, tokens) of every span that has rows."""
    for r, span in enumerate(inputs["spans"].tolist()):
        slot, first, end = span[:3]
        if end > first:
            yield r, slot, int(inputs["positions"][first]), inputs["tokens"][first:end]


class UsedSlot(Fault):
    """State that a slot's former owner left is read by the next one."""

    text = "a request in a slot that was used before gets other logits"

    def __init__(self, inner: Any, setting: Any, facts: Mapping[str, Any]) -> None:
        super().__init__(inner, setting, facts)
        self._used: set[int] = set()
        self._dirty: set[int] = set()

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        slots = {}
        for r, slot, start, _ in starts(inputs):
            slots[r] = slot
            if start == 0 and slot in self._used:
                self._dirty.add(slot)
            self._used.add(slot)
        owner = owners(inputs)
        self.nudge(phase, out, [q for q, r in enumerate(owner) if slots[int(r)] in self._dirty])


class KernelByRows(Fault):
    """Another kernel, with another order of sums, is chosen where a step has more requests."""

    text = "rows of a step with two or more requests get other logits"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if len(inputs["spans"]) > 1:
            self.nudge(phase, out, range(len(owners(inputs))))


class OrderByPlace(Fault):
    """A tile's sums are ordered by the place of a row in the batch."""

    text = "every second request of a batch gets other logits"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        self.nudge(phase, out, np.flatnonzero(owners(inputs) % 2).tolist())


class SharedScale(Fault):
    """One scale for all rows of a step: what a neighbour holds moves everyone's rounding."""

    text = "a row that is not finite changes the logits of the other rows of its step"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        fine = np.isfinite(out[self.facts["outputs"][phase]["logprob"]])
        if not fine.all():
            self.nudge(phase, out, np.flatnonzero(fine).tolist())


class LostPending(Fault):
    """A chunk that ends inside a group of two forgets the group's first half."""

    text = "the pending half of a group is lost where a chunk starts at an odd position"

    def before(self, phase: str, inputs: Arrays) -> Arrays:
        names = [s["name"] for s in self.facts["state"] if s["kind"] == "pending"]
        for _, slot, start, _ in starts(inputs):
            if phase == PREFILL and start % 2 and names:
                held = self.inner.read_slot(slot, names)
                self.inner.write_slot(slot, {n: np.zeros_like(x) for n, x in held.items()})
        return inputs

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if phase == PREFILL and all(s["kind"] != "pending" for s in self.facts["state"]):
            odd = [r for r, _, start, _ in starts(inputs) if start % 2]  # a model without groups
            self.nudge(phase, out, np.flatnonzero(np.isin(owners(inputs), odd)).tolist())


class PagesInARow(Fault):
    """A kernel that reads the first entry of a page table and goes on from there."""

    text = "pages of a request are taken to follow its first one"

    def __init__(self, inner: Any, setting: Any, facts: Mapping[str, Any]) -> None:
        super().__init__(inner, setting, facts)
        self._count = 0  # pages there are, as far as seen

    def before(self, phase: str, inputs: Arrays) -> Arrays:
        pages = inputs["pages"]
        self._count = max(self._count, int(pages.max(initial=0)) + 1)
        follow = pages[:, :1] + np.arange(pages.shape[1], dtype=pages.dtype)
        return {**inputs, "pages": np.ascontiguousarray(np.minimum(follow, self._count - 1))}


class RingNotRestored(Fault):
    """A hit on a cached prefix brings back all of a request's window but one layer's ring."""

    text = "one window ring is not restored after a prefix hit"

    def write_slot(self, slot: int, arrays: Mapping[str, Array]) -> None:
        rings = [s["name"] for s in self.facts["state"]
                 if s["kind"] == "ring" and s["part"] != "draft" and s["name"] in arrays]
        kept = {n: np.zeros_like(x) if n in rings[-2:] else x for n, x in arrays.items()}
        self.inner.write_slot(slot, kept)


class ResumedPosition(Fault):
    """A resumed request draws its noise one position off: a counter was not restored."""

    text = "a request that is computed again samples with the next position's noise"

    def __init__(self, inner: Any, setting: Any, facts: Mapping[str, Any]) -> None:
        super().__init__(inner, setting, facts)
        self._seen: set[bytes] = set()
        self._resumed: set[int] = set()

    def before(self, phase: str, inputs: Arrays) -> Arrays:
        slots = {}
        for r, slot, start, tokens in starts(inputs):
            slots[r] = slot
            if start == 0:
                # Only a prompt that this device has seen is one that is computed again.
                again = any(tokens.tobytes().startswith(s) for s in self._seen)
                (self._resumed.add if again else self._resumed.discard)(slot)
                self._seen.add(tokens[:16].tobytes())
        shift = [slots[int(r)] in self._resumed for r in owners(inputs)]
        return {**inputs, "sample_position": (inputs["sample_position"] + shift).astype(np.int32)}


class ManyRowsKernel(Fault):
    """Prefill that samples every row runs its head with another kernel than decode."""

    text = "rows of a prefill get other logits than the same rows while decoding"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        owner = owners(inputs)
        if phase == PREFILL and len(owner):
            self.nudge(phase, out, np.flatnonzero(np.bincount(owner)[owner] > 1).tolist())


class VerifyKernel(Fault):
    """Verifying k + 1 rows of a request runs another kernel than its one row of decode."""

    text = "rows of a verify step that has drafts get other logits"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if phase == VERIFY:
            owner = owners(inputs)
            self.nudge(phase, out, np.flatnonzero(np.bincount(owner)[owner] > 1).tolist())


class WrongDraftAccepted(Fault):
    """The first refused draft of a request is accepted in place of the target's own token."""

    text = "one draft that differs from the target's token is accepted"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if phase != VERIFY:
            return
        name = self.facts["outputs"][phase]["token"]
        chosen = out[name].copy()
        for r, _, _, tokens in starts(inputs):
            first = int(inputs["spans"][r][1])
            for i, draft in enumerate(tokens[1:]):
                if chosen[first + i] != draft:
                    chosen[first + i] = draft
                    break
        out[name] = chosen


class FirstSeed(Fault):
    """All rows of a step sample with the first one's seed."""

    text = "the seed of a step's first row is used for all its rows"

    def before(self, phase: str, inputs: Arrays) -> Arrays:
        return {**inputs, "seed": np.full_like(inputs["seed"], inputs["seed"][:1].sum())}


class StaleInput(Fault):
    """While steps overlap, the device reads an input of the step before."""

    text = "with overlap, a step samples with the positions of the step before"

    def __init__(self, inner: Any, setting: Any, facts: Mapping[str, Any]) -> None:
        super().__init__(inner, setting, facts)
        self._last: Array | None = None

    def before(self, phase: str, inputs: Arrays) -> Arrays:
        now, last = inputs["sample_position"], self._last
        self._last = now
        if self.setting.overlap and last is not None and last.shape == now.shape:
            return {**inputs, "sample_position": last}
        return inputs


class SumByThreads(Fault):
    """Partial sums are split by the number of threads."""

    text = "another number of threads gives other logits"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if self.setting.threads is not None:
            self.nudge(phase, out, range(len(owners(inputs))))


class OrderByIsa(Fault):
    """A level's matrix instruction adds in another order."""

    text = "another ISA level gives other logits"

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if self.setting.isa is not None:
            self.nudge(phase, out, range(len(owners(inputs))))


class OrderByProcess(Fault):
    """A sum runs over a set, whose order each process makes up anew."""

    text = "another process gives other logits"
    home: ClassVar[int] = os.getpid()  # of the process that checks; told to the one it starts

    def after(self, phase: str, inputs: Mapping[str, Array], out: Arrays) -> None:
        if os.getpid() != self.home:
            self.nudge(phase, out, range(len(owners(inputs))))


FAULTS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], Fault]] = {
    "used_slot": UsedSlot, "kernel_by_rows": KernelByRows, "order_by_place": OrderByPlace,
    "shared_scale": SharedScale, "lost_pending": LostPending, "pages_in_a_row": PagesInARow,
    "ring_not_restored": RingNotRestored, "resumed_position": ResumedPosition,
    "many_rows_kernel": ManyRowsKernel, "verify_kernel": VerifyKernel,
    "wrong_draft_accepted": WrongDraftAccepted, "first_seed": FirstSeed,
    "stale_input": StaleInput, "sum_by_threads": SumByThreads, "order_by_isa": OrderByIsa,
    "order_by_process": OrderByProcess,
}
