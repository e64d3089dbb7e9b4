"""The cpu device and the ISA levels: what they refuse, by message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer.compiler import compile
from deepinfer.errors import CheckpointError, ProgramError, TargetError
from deepinfer.llm import LLM
from deepinfer.program import save
from deepinfer.runtime.devices import isa
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.weights import load_weights
from deepinfer.settings import KNOWN, cache_dir, forced_isa, warn_unknown
from deepinfer.targets.cpu.toolchain import compile_library
from tests.forward.cases import inputs, tokens_for

PHASES = {"prefill": {"values": [], "sizes": [], "outputs": [], "arena_bytes": 0,
                      "scratch_bytes": 0, "launches": []}}


@pytest.fixture
def device(case, program):
    weights = load_weights(program.manifest["weights"], case.path)
    made = CpuDevice(program, weights, case.sizes, num_threads=1)
    yield made
    made.close()


@pytest.fixture
def given(case):
    return inputs(case, [(0, tokens_for(case, 5), 0, 5)])


def bare(path: Path, library: bytes, **changes):
    return save(path, {"target": "cpu", "isa": ["generic"], "phases": PHASES, **changes},
                {"bin/generic.so": library})


def test_another_abi(tmp_path):
    out = tmp_path / "lib.so"
    compile_library({"abi": 'extern "C" __attribute__((visibility("default"))) '
                            "int deepinfer_abi() { return 1; }\n"}, "generic", out,
                    cache_dir() / "objects")
    with pytest.raises(ProgramError, match="native ABI is 1, expected 2"):
        CpuDevice(bare(tmp_path / "p", out.read_bytes()), {}, {})


def test_a_library_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ProgramError, match="bin/generic.so cannot be loaded") as caught:
        CpuDevice(bare(tmp_path / "p", b"not a library"), {}, {})
    assert caught.value.next == "compile the Program on a machine like this one"
    with pytest.raises(ProgramError, match="field target is 'sm100', expected 'cpu'"):
        CpuDevice(bare(tmp_path / "q", b"", target="sm100"), {}, {})


def test_levels(monkeypatch):
    monkeypatch.delenv("DEEPINFER_CPU_ISA", raising=False)
    monkeypatch.setattr(isa, "host_levels", lambda: ("generic", "avx2"))
    assert isa.choose_level(("generic", "avx2", "amx")) == "avx2"
    assert isa.choose_level(("amx", "generic")) == "generic"
    with pytest.raises(TargetError, match="the Program has levels amx, this machine runs generic"):
        isa.choose_level(("amx",))
    monkeypatch.setenv("DEEPINFER_CPU_ISA", "generic")
    assert isa.choose_level(("generic", "avx2")) == "generic"
    with pytest.raises(TargetError, match="the Program has no level 'generic', it has avx2") as e:
        isa.choose_level(("avx2",))
    assert e.value.next == "compile it with --isa generic"
    monkeypatch.setenv("DEEPINFER_CPU_ISA", "amx")
    with pytest.raises(TargetError, match="DEEPINFER_CPU_ISA is 'amx', this machine runs generic"):
        isa.choose_level(("amx",))
    monkeypatch.setenv("DEEPINFER_CPU_ISA", "sse9")
    with pytest.raises(TargetError, match="DEEPINFER_CPU_ISA is 'sse9', expected one of generic"):
        forced_isa()


def test_a_host_without_cpuinfo(monkeypatch):
    """Plain C is always right."""
    def absent(self, *args, **kwargs):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", absent)
    assert isa.host_levels.__wrapped__() == ("generic",)
    monkeypatch.undo()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert isa.host_levels.__wrapped__() == ("generic",)


def test_steps_that_do_not_fit(device, given):
    rows = 33
    for changed, message in (
            ({"tokens": None}, "input 'tokens' is nothing, expected int32"),
            ({"tokens": given["tokens"].astype(np.int64)}, r"input 'tokens' is int64\[5\]"),
            ({"positions": given["positions"][:4]}, r"'request' is int32\[5\], expected int32\[4"),
            ({n: np.zeros((rows, *a.shape[1:]), a.dtype) for n, a in given.items()},
             "size num_tokens is 33, expected 0..32")):
        step = {k: v for k, v in {**given, **changed}.items() if v is not None}
        with pytest.raises(ProgramError, match=message):
            device.run("prefill", step)
    pages = np.zeros((2, 16), np.int32)[:, ::2]
    spans = np.array([[0, 0, 5, 0], [1, 5, 5, 0]], np.int32)
    with pytest.raises(ProgramError, match="input 'pages' is not contiguous"):
        device.run("prefill", {**given, "pages": pages, "spans": spans})
    assert device.calls == 0


def test_misuse(device, given, case, program):
    with pytest.raises(ProgramError, match="no phase 'verify', expected one of decode, prefill"):
        device.run("verify", given)
    with pytest.raises(ProgramError, match="input 'tokens' cannot be traced, only what nodes make"):
        device.run("prefill", given, trace=["tokens"])
    with pytest.raises(ProgramError, match="phase 'prefill' has no value 'nothing'"):
        device.run("prefill", given, trace=["nothing"])
    weights = load_weights(program.manifest["weights"], case.path)
    del weights["embed.weight"]
    with pytest.raises(ProgramError, match="weight 'embed.weight' is nothing, expected bfloat16"):
        CpuDevice(program, weights, case.sizes)
    device.close()
    with pytest.raises(ProgramError, match="the device is closed"):
        device.run("prefill", given)
    device.close()  # twice is allowed


def test_a_prepared_step_reads_what_its_arrays_hold_when_it_runs(device, given, monkeypatch):
    plain = device.run("prefill", given)
    later = given | {"tokens": np.zeros_like(given["tokens"])}
    hidden = next(v.name for v in device.program.phases["prefill"].values if v.kind == "temp")
    for trace in ((), (hidden,)):
        device.prepare("prefill", later, trace=trace)
    later["tokens"][:] = given["tokens"]
    with monkeypatch.context() as patch:
        patch.setattr(device, "_bind", None)  # nothing is left to check
        found = device.run("prefill", later)
        traced = device.run("prefill", later, trace=[hidden])
        device.prepare("prefill", later)  # again, at no cost
        again = device.run("prefill", later)
        for other, names in ((later, [hidden]), (dict(later), ())):
            with pytest.raises(TypeError):  # what is traced is for one run, and a copy is another
                device.run("prefill", other, trace=names)
        later["tokens"] = later["tokens"].copy()
        with pytest.raises(TypeError):
            device.run("prefill", later)
    assert traced.keys() - found.keys() == {hidden}
    for name, value in plain.items():
        assert value.tobytes() == found[name].tobytes() == traced[name].tobytes(), name
        assert value.tobytes() == again[name].tobytes() and again[name] is not found[name]
    assert device.calls == 4
    device.prepare("prefill", later)
    device.close()
    with pytest.raises(ProgramError, match="the device is closed"):
        device.run("prefill", later)


def test_the_time_of_every_launch_is_added_up(device, given):
    plain = device.run("prefill", given)
    assert device.launch_ns is None
    device.time_launches()
    timed = device.run("prefill", given)
    once = device.launch_ns["prefill"].copy()
    assert len(once) == len(device.program.phases["prefill"].launches) and (once > 0).all()
    device.run("prefill", given)
    assert (device.launch_ns["prefill"] > once).all() and not device.launch_ns["decode"].any()
    for name, value in plain.items():
        np.testing.assert_array_equal(timed[name].view(np.uint8), value.view(np.uint8))
    device.time_launches(False)
    device.run("prefill", given)
    assert device.launch_ns is None


def test_unknown_variables_are_named(monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHEDIR", "x")
    message = "DEEPINFER_CACHEDIR is not read .*mean DEEPINFER_CACHE_"
    for doors in ((LLM, compile), (compile, LLM)):
        warn_unknown.cache_clear()
        with pytest.warns(UserWarning, match=message) as caught:
            for enter in doors:
                with pytest.raises(CheckpointError, match="none"):
                    enter("none")
        assert len(caught) == 1 and caught[0].filename == __file__  # once, at the user's own line
    warn_unknown.cache_clear()
    assert all(KNOWN.values())


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "~/x")
    assert cache_dir() == Path.home() / "x"
    monkeypatch.delenv("DEEPINFER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/deepinfer")
