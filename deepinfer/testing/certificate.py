"""The certificate of a check: what was compared, under which conditions, on which machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from deepinfer.errors import DeepInferError, DeterminismError, RequestError
from deepinfer.runtime.devices.isa import host_levels
from deepinfer.settings import usable_cpus

FORMAT = 1
Verdict = Literal["equal", "different", "not shown", "failed", "skipped", "approximate"]
BAD = ("different", "not shown", "failed")


@dataclass(frozen=True, slots=True)
class Control:
    """The negative control of an axis.

    Args:
        fault: its name. text: what it does. caught: whether the axis saw it. silent: whether the
            reference did not, so that only the varied condition could. first: what was seen.
    """

    fault: str
    text: str
    caught: bool
    silent: bool
    first: str | None

    @property
    def good(self) -> bool:
        return self.caught and self.silent


@dataclass(frozen=True, slots=True)
class AxisReport:
    """What a check found along one axis.

    Args:
        name, text: of the axis. verdict: "equal"; "different"; "not shown" (a condition did not
            occur); "failed" (the engine raised an error); "skipped" (it cannot occur here);
            "approximate". reason: for the last ones.
        conditions: that were tried. counts: requests, tokens, logprobs, rows and bits compared.
        evidence: that the conditions occurred. differences: the first of each request.
        origin: of the first of them: step, layer, op, row, element, bits. control: see there.
        drift: of an approximate axis. seconds: it took.
    """

    name: str
    text: str
    verdict: Verdict
    reason: str | None
    conditions: Sequence[str]
    counts: Mapping[str, int]
    evidence: Mapping[str, Any]
    differences: Sequence[str]
    origin: Mapping[str, Any] | None
    control: Control | None
    drift: Mapping[str, Any] | None
    seconds: float

    @property
    def good(self) -> bool:
        """Nothing differed, all was shown, and the control was caught, if it was run."""
        return self.verdict not in BAD and (self.control is None or self.control.good)

    @property
    def summary(self) -> str:
        """Why it is not good, or the verdict."""
        if self.verdict == "different":
            return self.differences[0]
        if self.verdict in ("not shown", "failed", "skipped"):
            return f"{self.verdict}: {self.reason}"
        if self.control is not None and not self.control.caught:
            return f"the control {self.control.fault} was not caught"
        if self.control is not None and not self.control.silent:
            return f"the control {self.control.fault} shows in the reference itself"
        return self.verdict


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of a check.

    Args:
        subject: the Program's digest, the weights' fingerprint, and so on. axes: one report each.
        settings: requests, seed, and what else was asked for. machine, versions: where it ran.
        date: when it ended, UTC.
    """

    subject: Mapping[str, Any]
    axes: Sequence[AxisReport]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str

    @property
    def clean(self) -> bool:
        """Whether every axis is good."""
        return all(axis.good for axis in self.axes)

    def to_json(self) -> dict[str, Any]:
        axes = [{**asdict(a), "good": a.good} for a in self.axes]
        return {"format": FORMAT, "clean": self.clean, "date": self.date,
                "subject": dict(self.subject), "settings": dict(self.settings),
                "machine": dict(self.machine), "versions": dict(self.versions), "axes": axes}

    def write(self, path: Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            RequestError: the file cannot be written.
        """
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            scratch.write_text(text, encoding="utf-8")
            os.replace(scratch, path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise RequestError(f"the certificate cannot be written: {error.strerror or error}",
                               where=str(path), next="give another path") from None


class NotInvariant(DeterminismError):
    """A check that is not clean. ``certificate`` is the whole report."""

    def __init__(self, certificate: Certificate) -> None:
        bad = [a for a in certificate.axes if not a.good]
        first = bad[0]
        where = first.origin["text"] if first.origin else f"axis {first.name}"
        super().__init__(f"{len(bad)} of {len(certificate.axes)} axes are not clean, expected all; "
                         f"{first.name}: {first.summary}", where=where,
                         next=f"repeat it alone with `deepinfer check --axis {first.name}`")
        self.certificate = certificate


def machine_facts() -> dict[str, Any]:
    """What this machine is, as far as it could matter."""
    return {"cpu": _cpu(), "architecture": platform.machine(), "isa": list(host_levels()),
            "threads": usable_cpus(), "system": f"{platform.system()} {platform.release()}"}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not every system has it
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Of Python and of the packages that results could depend on."""
    found = {"python": platform.python_version()}
    for name in ("deepinfer-compiler", "numpy", "ml_dtypes", "tokenizers", "llguidance"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def failure(error: DeepInferError) -> str:
    """An error as a reason: what and where."""
    return f"{type(error).__name__}: {error.what}" + (f" ({error.where})" if error.where else "")
