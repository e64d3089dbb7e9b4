"""The runner: builds schedules in parallel processes, checks and times them in one, serially."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from autotune.building import Built
from autotune.child import Child, ChildFailed
from autotune.keys import Machine
from autotune.lock import exclusive
from autotune.model import model
from autotune.space import Candidate, Sizes
from autotune.worker import candidate_json


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a schedule has no result: ``kind`` is "build", "timeout", "crash", "error",
    "mismatch" or "cut"."""

    kind: str
    reason: str


class Runner(Protocol):
    """What a search needs of a machine."""

    @property
    def machine(self) -> Machine: ...

    def expected(self, candidate: Candidate, sizes: Sizes) -> float:
        """Nanoseconds that it should take, before anything is built: to rank, not to report."""
        ...

    def build(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Built | Failure]]:
        """Build all, in any order of completion."""
        ...

    def gate(self, candidate: Candidate, built: Built, sizes: Sizes) -> str | Failure:
        """Digest of all bits that the kernel writes."""
        ...

    def reference(self, candidate: Candidate, built: Built, sizes: Sizes) -> str | Failure:
        """Digest of all bits that the op's numpy reference writes."""
        ...

    def time(self, candidate: Candidate, built: Built, sizes: Sizes, repeats: int,
             share: float = 1.0) -> tuple[int, ...] | Failure:
        """Nanoseconds of each run; ``share``: part of the policy's time after which it ends."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that one request may take."""

    build: float = 180.0
    gate: float = 300.0
    time: float = 60.0
    lock: float = 600.0


@dataclass(slots=True)
class LocalRunner:
    """Runs on this machine.

    Args:
        machine: where, and how to time. jobs: builds at once. timeouts: of each kind of request.
        waiting: called when another tuner holds the machine.
    """

    machine: Machine
    jobs: int = 1
    timeouts: Timeouts = field(default_factory=Timeouts)
    waiting: Callable[[], None] = lambda: None
    _builders: list[Child] = field(default_factory=list)
    _bench: Child = field(default_factory=Child)

    def expected(self, candidate: Candidate, sizes: Sizes) -> float:
        return model(candidate, sizes, {}, self.machine.threads).ns

    def build(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Built | Failure]]:
        with exclusive(self.timeouts.lock, self.waiting):  # compilers are noise to whoever measures
            yield from self._build(candidates)

    def _build(self, candidates: Sequence[Candidate]
               ) -> Iterator[tuple[Candidate, Built | Failure]]:
        left = list(candidates)[::-1]
        while len(self._builders) < min(self.jobs, len(left)):
            self._builders.append(Child())
        running: dict[int, tuple[Child, Candidate]] = {}
        try:
            while left or running:
                for child in self._builders:
                    if not child.busy and left:
                        candidate = left.pop()
                        child.send({"do": "build", "candidate": candidate_json(candidate),
                                    "isa": self.machine.isa}, self.timeouts.build)
                        running[id(child)] = (child, candidate)
                select.select([c for c, _ in running.values()], [], [], 0.2)
                for key, (child, candidate) in list(running.items()):
                    try:
                        answer = child.take()
                    except ChildFailed as failed:
                        kind = "build" if failed.kind == "error" else failed.kind
                        del running[key]
                        yield candidate, Failure(kind, failed.reason)
                        continue
                    if answer is not None:
                        del running[key]
                        yield candidate, Built(**answer)
        finally:
            for child, _ in running.values():
                child.kill()  # nobody waits for what it builds any more

    def _ask(self, what: str, candidate: Candidate, built: Built, sizes: Sizes, seconds: float,
             **more: object) -> dict[str, object] | Failure:
        request = {"do": what, "candidate": candidate_json(candidate), "built": asdict(built),
                   "sizes": [list(s) for s in sizes], "isa": self.machine.isa,
                   "threads": self.machine.threads, **more}
        with exclusive(self.timeouts.lock, self.waiting):
            try:
                return self._bench.ask(request, seconds)
            except ChildFailed as failed:
                return Failure(failed.kind, failed.reason)

    def gate(self, candidate: Candidate, built: Built, sizes: Sizes) -> str | Failure:
        got = self._ask("gate", candidate, built, sizes, self.timeouts.gate)
        if isinstance(got, Failure):
            return got
        if got["whole"] != got["cut"]:
            return Failure("cut", "other bits when its items are run in ranges")
        return str(got["whole"])

    def reference(self, candidate: Candidate, built: Built, sizes: Sizes) -> str | Failure:
        got = self._ask("reference", candidate, built, sizes, self.timeouts.gate)
        return got if isinstance(got, Failure) else str(got["digest"])

    def time(self, candidate: Candidate, built: Built, sizes: Sizes, repeats: int,
             share: float = 1.0) -> tuple[int, ...] | Failure:
        policy = self.machine.policy.part(share)
        got = self._ask("time", candidate, built, sizes, self.timeouts.time,
                        policy=asdict(policy), repeats=repeats)
        if isinstance(got, Failure):
            return got
        ns = got["ns"]
        assert isinstance(ns, list)
        return tuple(ns)

    def ceilings(self) -> dict[str, float]:
        """This machine's own peaks: "flops" (multiply-adds) and "bytes" (read) a second.

        Raises:
            ChildFailed: they could not be measured.
        """
        with exclusive(self.timeouts.lock, self.waiting):
            got = self._bench.ask({"do": "ceilings", "isa": self.machine.isa,
                                   "threads": self.machine.threads}, self.timeouts.build)
        return {name: float(value) for name, value in got.items()}

    def close(self) -> None:
        for child in (*self._builders, self._bench):
            child.close()
