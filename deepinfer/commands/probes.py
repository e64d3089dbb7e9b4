"""Probes of a machine: each looks for one thing and says what follows from having it or not."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from deepinfer.errors import DeepInferError
from deepinfer.settings import KNOWN, cache_dir, forced_isa

CORE = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "rich")
TIMEOUT_S = 120  # the first import of torch from a cold disk is slow


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Args:
        group: heading. name: the thing. found: whether it is here and works as far as was tried.
        detail: version, path, or how it failed. follows: what that means for the user.
        required: without it nothing runs.
    """

    group: str
    name: str
    found: bool
    detail: str
    follows: str
    required: bool = False


def findings() -> list[Finding]:
    """Everything, in the order shown."""
    return [*running(), *compiling(), *sm100(), *ascend950(), *settings()]


def output_of(command: Sequence[str]) -> tuple[bool, str]:
    """(success, what a command printed, or why it could not run)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    text = done.stdout.strip() or done.stderr.strip()
    return done.returncode == 0, text if done.returncode == 0 else done.stderr.strip() or text


def package(name: str) -> str:
    """The installed version of a distribution, or ""."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def importable(module: str) -> tuple[bool, str]:
    """(imports without error, its version or the error's last line), tried in another process:
    installed is not the same as working, and a broken one must not end the doctor."""
    if not package(module):
        return False, "not installed"
    ok, text = output_of([sys.executable, "-c", f"import {module}"])
    return ok, package(module) if ok else f"{package(module)}, import fails: {_last_line(text)}"


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "no message"


def tool_version(path: str, pattern: str) -> str:
    """What ``path --version`` says, cut to the pattern's match."""
    ok, text = output_of([path, "--version"])
    match = re.search(pattern, text)
    return (match.group(0) if match else _last_line(text)) if ok else f"fails: {_last_line(text)}"


def running() -> list[Finding]:
    """What running a compiled Program needs."""
    from deepinfer.runtime.devices.isa import host_levels

    group = "run Programs"
    new_enough = sys.version_info >= (3, 11)
    found = [Finding(group, "Python", new_enough, platform.python_version(),
                     "" if new_enough else "3.11 or later is needed", required=True)]
    have = {name: package(name) for name in CORE}
    missing = [n for n, v in have.items() if not v]
    found.append(Finding(
        group, "core packages", not missing, ", ".join(f"{n} {v}" for n, v in have.items() if v),
        f"pip install {' '.join(missing)}" if missing else "Programs load and run", required=True))
    levels = host_levels()
    found.append(Finding(
        group, "CPU", True, f"{platform.machine()}, {_cores()} cores, "
        f"ISA levels {', '.join(levels)}",
        f"target cpu builds level {levels[-1]} unless --isa says otherwise"))
    return [*found, huge_pages()]


def huge_pages() -> Finding:
    """Whether the system gives them to whoever asks: under [always] and [madvise]."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        text = ""
    there = "[always]" in text or "[madvise]" in text
    return Finding("run Programs", "huge pages", there, text or "none on this system",
                   "state and buffers lie on them" if there else "small pages: the same bits")


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def compiling() -> list[Finding]:
    """What lowering and compiling for target cpu needs."""
    from deepinfer.targets.cpu.toolchain import compiler, compiler_version

    group = "compile for cpu"
    try:
        cxx, text = compiler(), compiler_version()
        found = [Finding(group, "C++ compiler", True, f"{cxx}: {text}",
                         "target cpu compiles with it (CXX chooses another)")]
    except (DeepInferError, OSError, subprocess.CalledProcessError) as error:
        found = [Finding(group, "C++ compiler", False, str(error).splitlines()[0],
                         "nothing can be compiled here; install g++ or clang++")]
    for name, wanted in (("torch", "2.13.0"), ("tilelang", "0.1.15")):
        ok, detail = importable(name)
        follows = ("" if package(name).partition("+")[0] == wanted
                   else f"only {wanted} was tried") if ok else (
            "no kernel can be lowered here: pip install 'deepinfer-compiler[compile]'")
        found.append(Finding(group, name, ok, detail, follows))
    return found


def sm100() -> list[Finding]:
    """NVIDIA's toolchain, where the target looks for it, and devices."""
    from deepinfer.targets.sm100.toolchain import find

    group = "target sm100"
    found = []
    for name, follows in (("nvcc", "compiles kernels for the GPU"),
                          ("cuobjdump", "lists the code of a compiled kernel"),
                          ("nvdisasm", "lists the code of a compiled kernel")):
        path = find(name)
        detail = f"{path}: {tool_version(path, r'V[0-9]+[0-9.]*')}" if path else "not found"
        found.append(Finding(group, name, bool(path), detail, follows if path else
                             "pip install 'deepinfer-compiler[sm100]', or set CUDA_HOME"))
    smi = shutil.which("nvidia-smi")
    ok, text = output_of([smi, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
                         ) if smi else (False, "no nvidia-smi")
    fits = ok and any(line.rpartition(",")[2].strip().startswith("10.")
                      for line in text.splitlines())
    found.append(Finding(
        group, "GPU", ok, "; ".join(text.splitlines()) if ok else _last_line(text),
        "no GPU of compute capability 10.x: sm100 kernels cannot run here" if not fits
        else "" if find_spec("deepinfer.runtime.devices.cuda") is not None
        else "this version cannot run Programs on a GPU yet"))
    return found


def ascend950() -> list[Finding]:
    """Huawei's toolchain, where the target looks for it, and devices."""
    from deepinfer.targets.ascend950.toolchain import find

    group = "target ascend950"
    homes = [os.environ.get(n, "") for n in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    homes.append("/usr/local/Ascend/ascend-toolkit/latest")
    home = next((h for h in homes if h and Path(h).is_dir()), "")
    bisheng = find()
    found = [
        Finding(group, "CANN", bool(home), home or "not found",
                "" if home else "Ascend kernels can be neither compiled nor run here"),
        Finding(group, "bisheng", bool(bisheng),
                f"{bisheng}: {tool_version(bisheng, 'version [0-9.]+')}" if bisheng
                else "not found",
                "compiles kernels for the NPU" if bisheng
                else "it comes with CANN: source its set_env.sh, or set BISHENG_HOME"),
    ]
    npu = package("torch_npu") or package("torch-npu")
    found.append(Finding(
        group, "torch_npu", bool(npu), npu or "not installed",
        "uninstall it: without CANN it breaks `import torch`" if npu and not home
        else "" if npu else "needed only on a machine with CANN"))
    devices = sorted(str(p) for p in Path("/dev").glob("davinci[0-9]*"))
    found.append(Finding(group, "NPU", bool(devices), ", ".join(devices) or "no /dev/davinci*",
                         "" if devices else "Ascend kernels cannot run here"))
    return found


def packed_weights() -> Finding:
    """What is kept of models that were loaded before."""
    from deepinfer.commands.output import size
    from deepinfer.runtime.store_gc import entries
    from deepinfer.runtime.weight_store import weights_dir

    path = weights_dir()
    kept = [e for e in entries(path) if e.kind == "weights"] if path.is_dir() else []
    return Finding("settings", "packed weights", bool(kept),
                   f"{path}: {len(kept)} files, {size(sum(e.nbytes for e in kept))}",
                   "`deepinfer cache ls` lists them" if kept else "the first load of a model "
                   "makes them")


def settings() -> list[Finding]:
    """The cache and the environment variables."""
    group = "settings"
    path = cache_dir()
    at = next(p for p in (path, *path.absolute().parents) if p.exists())
    writable = at.is_dir() and os.access(at, os.W_OK)
    found = [Finding(group, "cache", writable, str(path),
                     "Programs and kernels are kept there" if writable
                     else "cannot be written: set DEEPINFER_CACHE_DIR")]
    found.append(packed_weights())
    for name, meaning in KNOWN.items():
        if name in os.environ:
            found.append(Finding(group, name, True, os.environ[name], meaning))
    try:
        forced_isa()
    except DeepInferError as error:
        found.append(Finding(group, "DEEPINFER_CPU_ISA", False, error.what, error.next))
    return found
