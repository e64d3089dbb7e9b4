"""`deepinfer doctor`: each probe says what it found and what follows; nothing found is no crash."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from deepinfer.cli import main
from deepinfer.commands import probes
from deepinfer.errors import ToolchainError


@pytest.fixture(autouse=True)
def nothing_is_imported(monkeypatch):
    """Importing torch takes seconds: no test but one does it."""
    monkeypatch.setattr(probes, "importable", lambda name: (False, "not installed"))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with Python and nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("deepinfer.targets.sm100.toolchain._PIP_BIN", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME",
                 "BISHENG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def by_name(found: list[probes.Finding]) -> dict[str, probes.Finding]:
    return {f.name: f for f in found}


def program(folder: Path, name: str, prints: str, code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!{sys.executable}\nprint('''{prints}''')\nraise SystemExit({code})\n")
    file.chmod(0o755)
    return file


def test_doctor_reports_for_readers_and_for_machines(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {f["name"] for f in found} >= {
        "Python", "core packages", "CPU", "C++ compiler", "torch", "tilelang", "nvcc", "cuobjdump",
        "nvdisasm", "GPU", "CANN", "bisheng", "torch_npu", "NPU", "cache"}
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(f["name"] in out and f["follows"] in out for f in found)


def test_a_bare_machine_is_told_what_is_missing(bare, monkeypatch):
    def none() -> str:
        raise ToolchainError("no C++ compiler found")

    monkeypatch.setattr("deepinfer.targets.cpu.toolchain.compiler", none)
    found = by_name(probes.findings())
    for name in ("C++ compiler", "torch", "tilelang", "nvcc", "GPU", "CANN", "bisheng"):
        assert not found[name].found
    assert "install g++" in found["C++ compiler"].follows
    assert "deepinfer-compiler[compile]" in found["tilelang"].follows
    assert "deepinfer-compiler[sm100]" in found["nvcc"].follows
    assert found["Python"].found and found["core packages"].found


def test_a_missing_core_package_is_an_environment_error(monkeypatch, capsys):
    monkeypatch.setattr(probes, "package", lambda name: "" if name == "safetensors" else "1.0")
    assert main(["doctor"]) == 3
    assert "pip install safetensors" in capsys.readouterr().out


@pytest.mark.parametrize(("capability", "device", "follows"), [
    ("9.0", object(), "no GPU of compute capability 10.x: sm100 kernels cannot run here"),
    ("10.0", object(), ""), ("10.3", None, "this version cannot run Programs on a GPU yet"),
])
def test_a_gpu_must_have_the_right_capability(monkeypatch, tmp_path, capability, device, follows):
    monkeypatch.setattr(probes, "find_spec", lambda name: device)
    program(tmp_path, "nvidia-smi", f"NVIDIA X, {capability}")
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = by_name(probes.sm100())["GPU"]
    assert gpu.found and gpu.detail == f"NVIDIA X, {capability}" and gpu.follows == follows


def test_a_driver_that_fails_is_no_gpu(monkeypatch, tmp_path):
    program(tmp_path, "nvidia-smi", "could not talk to the driver", code=9)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = by_name(probes.sm100())["GPU"]
    assert not gpu.found and gpu.detail == "could not talk to the driver"


@pytest.mark.parametrize(("text", "there"), [
    ("always [madvise] never\n", True), ("[always] madvise never\n", True),
    ("always madvise [never]\n", False), (None, False)])
def test_huge_pages(monkeypatch, text, there):
    def read(self, *args, **given):
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read)
    found = probes.huge_pages()
    assert (found.found, found.detail) == (there, (text or "none on this system").strip())
    assert found.follows.endswith("lie on them" if there else "the same bits")


@pytest.mark.parametrize(("target", "name", "home", "prints", "version"), [
    ("sm100", "nvcc", "CUDA_HOME", "Cuda compilation tools, release 13.0, V13.0.88", "V13.0.88"),
    ("ascend950", "bisheng", "BISHENG_HOME", "bisheng version 15.0.5", "version 15.0.5"),
])
def test_doctor_and_compile_find_the_same_tools(bare, monkeypatch, target, name, home, prints,
                                                version):
    toolchain = import_module(f"deepinfer.targets.{target}.toolchain")
    probe = getattr(probes, target)

    def found() -> str | None:
        return toolchain.find(name) if target == "sm100" else toolchain.find()

    assert found() is None and not by_name(probe())[name].found
    for folder, variable, value in ((bare / "home" / "bin", home, bare / "home"),
                                    (bare / "path", "PATH", bare / "path")):
        there = program(folder, name, prints)
        with monkeypatch.context() as only:
            only.setenv(variable, str(value))
            assert found() == str(there)
            assert by_name(probe())[name].detail == f"{there}: {version}"
    assert found() is None


def test_cann_makes_torch_npu_welcome(bare, monkeypatch):
    monkeypatch.setattr(probes, "package", lambda name: "2.13.0" if "npu" in name else "")
    assert "breaks `import torch`" in by_name(probes.ascend950())["torch_npu"].follows
    monkeypatch.setenv("ASCEND_HOME_PATH", str(bare))
    found = by_name(probes.ascend950())
    assert found["CANN"].detail == str(bare) and found["torch_npu"].follows == ""


def test_a_bad_variable_is_reported(monkeypatch):
    monkeypatch.setenv("DEEPINFER_CPU_ISA", "sse9")
    assert "'sse9'" in probes.settings()[-1].detail and not probes.settings()[-1].found


def test_installed_is_not_the_same_as_working(monkeypatch, tmp_path):
    monkeypatch.undo()
    (tmp_path / "brokenlib.py").write_text("raise RuntimeError('no backend')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probes, "package", lambda name: "1.2")
    assert probes.importable("brokenlib") == (
        False, "1.2, import fails: RuntimeError: no backend")
    (tmp_path / "brokenlib.py").write_text("")
    assert probes.importable("brokenlib") == (True, "1.2")
    monkeypatch.setattr(probes, "package", lambda name: "")
    assert probes.importable("brokenlib") == (False, "not installed")
