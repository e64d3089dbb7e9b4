"""What a step costs, by its rows: from the Program, or measured on this machine.

A Program holds costs on paper. `deepinfer profile` writes measured ones to a file of their own,
outside the Program's digest: they weigh drafts better, and no bit of a result depends on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from deepinfer.errors import DeepInferError, ProgramError
from deepinfer.program import Program
from deepinfer.settings import cache_dir

FORMAT = 1  # of the file; another one is ignored
PHASES = ("decode", "verify", "draft")
# What reading a file that holds anything at all can raise.
_DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
           RecursionError)
Points: TypeAlias = tuple[tuple[int, float], ...]  # (rows or requests, nanoseconds), ascending


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Nanoseconds of a step; only ratios matter.

    Args:
        steps: by rows of a verify or decode step. drafts: by requests of a draft step; may be
            empty. source: "static", "measured", or "flat" where nothing is known.
    """

    steps: Points
    drafts: Points = ()
    source: str = "static"

    def __post_init__(self) -> None:
        for name, points in (("steps", self.steps), ("drafts", self.drafts)):
            _check(points, name)
        if not self.steps:
            raise ProgramError("a cost curve has no points, expected at least one",
                               where="CostCurve", next="compile or profile the Program again")

    def cost(self, rows: int, drafting: int = 0) -> float:
        """A step of this many rows, and the draft of this many requests that comes with it."""
        return _at(self.steps, rows) + (_at(self.drafts, drafting) if drafting else 0.0)

    @staticmethod
    def flat() -> CostCurve:
        """Rows cost nothing, so every draft is worth its row."""
        return CostCurve(((1, 1.0),), (), "flat")

    @staticmethod
    def of(program: Program) -> CostCurve:
        """The costs on paper that the Program holds."""
        held = program.manifest.get("cost", {})
        if not held.get("verify"):
            return CostCurve.flat()
        return CostCurve(_points(held["verify"]), _points(held.get("draft", ())))

    @staticmethod
    def measured(steps: Mapping[str, Points]) -> CostCurve:
        """From medians by phase. A step of one row a request is a decode step, others verify; where
        both were timed, verify counts. Noise is smoothed away: more rows never cost less."""
        both = sorted({**dict(steps.get("decode", ())), **dict(steps.get("verify", ()))}.items())
        return CostCurve(rising(both), rising(steps.get("draft", ())), "measured")

    @staticmethod
    def load(program: Program, machine: Machine | None = None, directory: Path | None = None
             ) -> CostCurve:
        """The measured curve of this Program on this machine, or the Program's own.

        Args:
            machine: what runs it; None: there is nothing to look for.
            directory: of the measured ones; default: in the cache.
        """
        path = None if machine is None else sidecar(machine, directory)
        if machine is None or path is None or not path.exists():
            return CostCurve.of(program)
        try:
            return CostCurve.measured(_read(path, machine))
        except (*_DAMAGE, DeepInferError) as error:
            what = error.what if isinstance(error, DeepInferError) else error
            warnings.warn(f"measured costs are ignored: {what}; where: {path}; next: delete it or "
                          "run `deepinfer profile` again", stacklevel=2)
            return CostCurve.of(program)


@dataclass(frozen=True, slots=True)
class Machine:
    """All that a measured time belongs to.

    Args:
        digest: the Program's. cpu: the processor's name. threads: of the device. isa: its level.
    """

    digest: str
    cpu: str
    threads: int
    isa: str

    @staticmethod
    def of(program: Program, device: object) -> Machine | None:
        """Of a device that says its ``num_threads`` and ``isa``; None of any other."""
        threads, isa = getattr(device, "num_threads", None), getattr(device, "isa", None)
        if threads is None or isa is None:
            return None
        return Machine(program.digest, cpu_model(), int(threads), str(isa))


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no /proc: Python may know
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine() or "unknown"


def sidecar(machine: Machine, directory: Path | None = None) -> Path:
    """Where measured costs of a Program on a machine are kept."""
    key = json.dumps(asdict(machine), sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return (directory or cache_dir() / "profiles") / f"{name}.json"


def save(machine: Machine, steps: Mapping[str, Sequence[tuple[int, float]]],
         directory: Path | None = None) -> Path:
    """Write measured costs: the whole file or none of it, whatever happens meanwhile.

    Args:
        steps: (rows, nanoseconds) by phase, of "decode", "verify" and "draft".

    Returns:
        The file.
    """
    path = sidecar(machine, directory)
    CostCurve.measured({name: tuple(points) for name, points in steps.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"format": FORMAT, **asdict(machine),
            "steps": {name: [list(p) for p in points] for name, points in steps.items()}}
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(body, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
    return path


def _read(path: Path, machine: Machine) -> dict[str, Points]:
    body = json.loads(path.read_text(encoding="utf-8"))
    for name, expected in {"format": FORMAT, **asdict(machine)}.items():
        if body[name] != expected:
            raise ProgramError(f"its {name} is {body[name]!r}, expected {expected!r}",
                               where=str(path), next="measure it again with `deepinfer profile`")
    return {name: _points(points) for name, points in body["steps"].items() if name in PHASES}


def _points(pairs: Any) -> Points:
    return tuple((int(n), float(cost)) for n, cost in pairs)


def _check(points: Points, name: str) -> None:
    """Counts rise from 1 or more; costs are positive and never fall."""
    before = (0, 0.0)
    for point in points:
        if not (point[0] > before[0] and 0 < point[1] < math.inf and point[1] >= before[1]):
            raise ProgramError(f"{name} goes from {list(before)} to {list(point)}, expected rising "
                               "counts and costs above 0 that do not fall", where="CostCurve",
                               next="compile or profile the Program again")
        before = point


def _at(points: Points, count: int) -> float:
    """On straight lines between the points; level before the first, as steep as the last two show
    after the last."""
    if len(points) < 2 or count <= points[0][0]:
        return points[0][1] if points else 0.0
    at = min(bisect_left(points, count, key=lambda p: p[0]), len(points) - 1)
    (low, below), (high, above) = points[at - 1], points[at]
    return below + (above - below) * (count - low) / (high - low)


def rising(points: Sequence[tuple[int, float]]) -> Points:
    """The non-decreasing curve nearest to some measured one, in squares: neighbours that fall are
    replaced by their mean until none does."""
    pools: list[tuple[float, list[int]]] = []
    for count, cost in points:
        pools.append((cost, [count]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, first), (high, second) = pools.pop(-2), pools.pop(-1)
            weight = len(first) + len(second)
            pools.append(((low * len(first) + high * len(second)) / weight, first + second))
    return tuple((count, cost) for cost, counts in pools for count in counts)
