"""The C++ compiler of the cpu target: which one, with which flags, one library per ISA level."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from deepinfer.errors import ToolchainError
from deepinfer.targets.base import LoweredKernel, Spec

MICRO = Path(__file__).parent / "micro"

# -ffp-contract=off: a*b+c stays two roundings. -fno-trapping-math and -fno-math-errno let loops
# vectorise and change no value. -fno-strict-aliasing: TileLang's reinterpret is a pointer cast.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing",
         "-fno-trapping-math", "-fno-math-errno", "-fvisibility=hidden", "-w", "-g0",
         "-fno-ident", "-pthread")

# No build id: it would differ from build to build. -z defs: a symbol that nothing defines is an
# error at link time, not when the library is loaded. Both are options of GNU-like linkers.
LINK_FLAGS = ("-Wl,--build-id=none", "-Wl,-z,defs") if sys.platform == "linux" else ()

# Flags by ISA level, lowest first; -march=native never, so that Programs are reproducible.
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-DDI_ISA_AVX2"),
    "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
               "-DDI_ISA_AVX512"),
    "amx": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
            "-mamx-tile", "-mamx-bf16", "-DDI_ISA_AMX"),
}


@cache
def compiler() -> str:
    """The C++ compiler: $CXX, else g++, clang++ or c++.

    Raises:
        ToolchainError: none is found, or not the one that CXX names.
    """
    given = os.environ.get("CXX")
    for name in (given,) if given else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    if given:
        raise ToolchainError(f"CXX is '{given}', no such program", where="cpu target",
                             next="name one program, without arguments, or unset CXX")
    raise ToolchainError("no C++ compiler found (looked for $CXX, g++, clang++, c++)",
                         where="cpu target",
                         next="install one, e.g. `apt-get install g++` or `dnf install gcc-c++`")


@cache
def compiler_version() -> str:
    """First line of the compiler's version text.

    Raises:
        ToolchainError: no compiler, or one that does not start.
    """
    command = [compiler(), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run: {error}", where="cpu target",
                             next="mend it, or name another compiler in CXX") from None
    if done.returncode or not done.stdout.strip():
        raise ToolchainError(f"`{' '.join(command)}` failed with {done.returncode}: "
                             f"{done.stderr.strip()[-200:]}", where="cpu target",
                             next="mend it, or name another compiler in CXX")
    return done.stdout.strip().splitlines()[0]


def micro_digest() -> str:
    """sha256 over the micro-kernel headers: part of every binary's content key."""
    digest = hashlib.sha256()
    for path in sorted(MICRO.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def thunk_text(lowered: LoweredKernel, spec: Spec) -> str:
    """The kernel's text followed by ``<symbol>_thunk`` with the one calling convention of all:
    ``(void* const* args, const int32_t* dims, uint8_t* scratch, int32_t lo, int32_t hi)``;
    ``args`` in the op's operand order, ``dims`` in the order of ``spec.dynamic()``."""
    signature = spec.op.signature
    position = {o.name: i for i, o in enumerate((*signature.inputs, *signature.outputs))}
    dynamic = {name: i for i, name in enumerate(spec.dynamic())}
    given = []
    for name, ctype in lowered.params:
        if name in ("lo", "hi"):
            given.append(name)
        elif name == "scratch":
            given.append(f"({ctype})scratch")
        elif name in position:
            given.append(f"({ctype})args[{position[name]}]")
        elif name in dynamic:
            given.append(f"dims[{dynamic[name]}]")
        else:
            raise ToolchainError(f"emitted parameter '{ctype} {name}' is no operand or dim of "
                                 f"{spec.op.name}", where=f"kernel {lowered.symbol}",
                                 next="name buffers and dims as the op's signature does")
    return (f"{lowered.text}\nextern \"C\" void {lowered.symbol}_thunk(void* const* args, "
            f"const int32_t* dims, uint8_t* scratch, int32_t lo, int32_t hi) {{\n"
            f"  {lowered.symbol}({', '.join(given)});\n}}\n")


def compile_library(sources: Mapping[str, str], isa: str, out: Path, cache_dir: Path,
                    jobs: int | None = None) -> None:
    """Compile each source (name -> text) and the micro-kernels, and link them into ``out``.

    Objects are cached by content in ``cache_dir``, each with its sha256, so that one damaged later
    is made anew; both they and the library appear by atomic rename, so an interrupted build leaves
    nothing half-made.

    Raises:
        ToolchainError: the compiler failed; holds its last lines.
    """
    cache_dir = cache_dir.absolute()  # the compiler runs in another directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    salt = "\0".join((micro_digest(), compiler_version(), *FLAGS, *ISA_FLAGS[isa]))

    def build(item: tuple[str, str]) -> Path:
        name, text = item
        key = hashlib.sha256(f"{salt}\0{text}".encode()).hexdigest()
        target = cache_dir / f"{key}.o"
        if not _is_whole(target):
            with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
                # A fixed relative name keeps the paths of this machine out of the object.
                (Path(scratch) / "kernel.cc").write_text(text, encoding="utf-8")
                _run([compiler(), *FLAGS, *ISA_FLAGS[isa], f"-I{MICRO}", "-include",
                      str(MICRO / "prelude.h"), "-c", "kernel.cc", "-o", "kernel.o"],
                     f"{name} ({isa})", scratch)
                digest = hashlib.sha256((Path(scratch) / "kernel.o").read_bytes()).hexdigest()
                (Path(scratch) / "kernel.sha256").write_text(digest)
                os.replace(Path(scratch) / "kernel.sha256", target.with_suffix(".sha256"))
                os.replace(Path(scratch) / "kernel.o", target)
        return target

    sources = {**sources, "micro": (MICRO / "micro.cc").read_text(encoding="utf-8")}
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        objects = list(pool.map(build, sorted(sources.items())))
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        made = Path(scratch) / "lib.so"
        _run([compiler(), "-shared", "-pthread", *LINK_FLAGS, "-o", str(made),
              *map(str, objects)], f"link ({isa})", scratch)
        os.replace(made, out)


def _is_whole(target: Path) -> bool:
    """Whether an object is there as it was written."""
    try:
        expected = target.with_suffix(".sha256").read_bytes()
        return hashlib.sha256(target.read_bytes()).hexdigest().encode() == expected
    except OSError:
        return False


def _run(command: list[str], what: str, cwd: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise ToolchainError(f"{Path(command[0]).name} failed with {done.returncode}:\n{tail}",
                             where=what, next="this is a fault of the cpu target: report it")
