"""What a build depends on and what a measurement depends on: two keys, kept apart.

The *compile key* names everything that shapes a kernel's binary. The *measurement key* names
everything that may change its speed: the machine, the tools, how it was timed, and the generated
source that ran. An edit that leaves the generated source as it was keeps the measurements.
"""

from __future__ import annotations

import inspect
import platform
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotune.space import Candidate, digest
from deepinfer.codegen.cache import tilelang_version
from deepinfer.codegen.sources import closure
from deepinfer.settings import usable_cpus
from deepinfer.targets.base import load_target
from deepinfer.targets.cpu.toolchain import FLAGS, ISA_FLAGS, compiler_version, micro_digest

NATIVE = Path(__file__).parent / "native.cc"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a measurement is taken.

    Args:
        warmup: runs before the clock starts. warm_seconds: which last that long at least: a core
            comes to its rate only while it works, and in a step it does.
        seconds: after this long a measurement ends with the repeats it has, if they are enough.
        least: repeats that are.
        cold_bytes: weights are copied until the copies in use exceed this, so that each run finds
            its weights in memory, as a step of a model does; 0: warm.
    """

    warmup: int = 2
    seconds: float = 0.5
    cold_bytes: int = 0
    least: int = 3
    warm_seconds: float = 0.005

    def part(self, share: float) -> Policy:
        """The policy of a visit that only has a share of the time: one warm-up, two repeats."""
        if share >= 1:
            return self
        return replace(self, warmup=min(1, self.warmup), least=min(2, self.least),
                       seconds=self.seconds * share)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where measurements are taken, and with which tools.

    Args:
        cpu: the model's name. isa: level of the kernels. threads: of the pool. cores: usable.
        cache_bytes: of the last level. versions: of compiler and libraries. policy: of timing.
    """

    cpu: str
    isa: str
    threads: int
    cores: int
    cache_bytes: int
    versions: tuple[tuple[str, str], ...]
    policy: Policy

    @staticmethod
    def here(isa: str, threads: int | None = None, policy: Policy | None = None) -> Machine:
        """This machine; by default weights are cold: twice the last level of cache is in use."""
        cache_bytes = last_level_bytes()
        return Machine(cpu_model(), isa, threads or usable_cpus(), usable_cpus(), cache_bytes,
                       tool_versions(), policy or Policy(cold_bytes=2 * cache_bytes))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "versions": dict(self.versions)}

    @property
    def id(self) -> str:
        return digest(self.to_json())

    def measure_body(self, source: str) -> dict[str, Any]:
        """What the measurement key is the digest of; ``source``: digest of the generated text."""
        return {**self.to_json(), "kernel_source": source}


def compile_body(candidate: Candidate, isa: str) -> dict[str, Any]:
    """What the compile key is the digest of."""
    target = load_target(candidate.problem.target)
    body = {"spec": candidate.problem.spec(candidate.schedule).key(), "target": target.name,
            "sources": sources_digest(target.name, candidate.problem.op),
            "tilelang": tilelang_version()}
    if target.name == "cpu":
        body |= {"isa": isa, "flags": " ".join((*FLAGS, *ISA_FLAGS[isa])),
                 "compiler": compiler_version(), "micro": micro_digest(),
                 "native": digest(NATIVE.read_text(encoding="utf-8"))}
    return body


@cache
def sources_digest(target: str, op: str) -> str:
    """sha256 over every file that the kernel, or the way to its text, depends on."""
    made = load_target(target)
    files = [inspect.getsourcefile(f) for f in (made.kernels[op].build, made.lower)]
    return digest([p.read_text(encoding="utf-8")
                   for p in closure(*(Path(f) for f in files if f is not None))])


@cache
def tool_versions() -> tuple[tuple[str, str], ...]:
    """Compiler and libraries that a measurement may depend on, and how it is taken."""
    found = {"compiler": compiler_version(), "tilelang": tilelang_version(),
             "stand": digest([Path(__file__).with_name(name).read_text(encoding="utf-8")
                              for name in ("stand.py", "clock.py", "native.cc", "inputs.py")]),
             "libc": "-".join(platform.libc_ver()), "kernel": platform.release()}
    for name in ("deepinfer-compiler", "numpy", "ml_dtypes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return tuple(sorted(found.items()))


def cpu_model() -> str:
    """The processor's name, with family, model and stepping where /proc tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    numbers = "/".join(found.get(n, "?") for n in ("cpu family", "model", "stepping"))
    return f"{found.get('model name', platform.machine())} ({numbers})"


def last_level_bytes() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 10, "M": 20}.get(text[-1:], 0)
        if text.rstrip("KM").isdigit():
            sizes.append(int(text.rstrip("KM")) << unit)
    return max(sizes[1:], default=sizes[0])
