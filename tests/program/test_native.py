"""A compiled Program runs by itself: native code for every node, nothing of the compiler loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer.codegen.emit import lower_graph
from deepinfer.compiler import build_graphs
from deepinfer.ir.text import graph_digest, graph_text
from deepinfer.targets.base import load_target
from deepinfer.testing.reference import EvaluatorDevice
from tests.forward.cases import inputs, same_bits, tokens_for

ROOT = Path(__file__).parents[2]
RUN = """
import sys
REFUSED = ("torch", "tilelang", "tvm", "deepinfer.ops", "deepinfer.ir", "deepinfer.graph",
           "deepinfer.codegen", "deepinfer.passes", "deepinfer.targets", "deepinfer.compiler",
           "deepinfer.testing", "deepinfer.numerics.sums")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == r or name.startswith(r + ".") for r in REFUSED):
            raise ImportError(name + " is refused")
sys.meta_path.insert(0, Refuse())
from pathlib import Path
import numpy as np
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.weights import load_weights
program_path, model, given, out, decoded = sys.argv[1:]
program = Program.load(program_path)
weights = load_weights(program.manifest["weights"], Path(model))
sizes = {"num_slots": 4, "num_pages": 32, "pages_per_seq": 8}
device = CpuDevice(program, weights, sizes, num_threads=2, poison=True)
arrays = dict(np.load(given))
trace = [v.name for v in program.phases["prefill"].values if v.kind == "temp"]
got = device.run("prefill", arrays, trace=trace)
assert device.calls == 1
decode = {k.removeprefix("decode."): v for k, v in arrays.items() if k.startswith("decode.")}
np.savez(decoded, device.run("decode", decode)["head.token"])
assert device.calls == 2
np.savez(out, **{f"{i}": got[name].view(np.uint8) for i, name in enumerate(trace)})
device.close()
assert not [m for m in sys.modules if any(m == r or m.startswith(r + ".") for r in REFUSED)]
try:
    import deepinfer.ops.norm
except ImportError:
    print("refused")
"""


def test_no_op_falls_back(case, program, tmp_path):
    """In a process that can import no op, reference, IR or compiler, every value of a step has the
    bits of the references."""
    a, b = tokens_for(case, 9), tokens_for(case, 4, 2)
    given = inputs(case, [(1, a, 0, 8), (3, b, 0, 3)])
    decode = inputs(case, [(1, a, 8, 9), (3, b, 3, 4)])
    del decode["sample_rows"]
    np.savez(tmp_path / "given.npz", **given, **{f"decode.{k}": v for k, v in decode.items()})
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(program.path), str(case.path),
         *(str(tmp_path / f"{name}.npz") for name in ("given", "got", "decoded"))],
        capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    lowered = {n: lower_graph(g, load_target("cpu"))
               for n, g in build_graphs(case.cfg, case.limits).items()}
    temps = [v.name for v in program.phases["prefill"].values if v.kind == "temp"]
    reference = EvaluatorDevice(lowered, case.cfg, case.path, case.sizes)
    want = reference.run("prefill", given, trace=temps)
    got = np.load(tmp_path / "got.npz")
    assert len(got.files) == len(temps) > 60
    for i, name in enumerate(temps):
        assert same_bits(got[f"{i}"], np.ascontiguousarray(want[name]).view(np.uint8)), name
    tokens = np.load(tmp_path / "decoded.npz")["arr_0"]
    assert same_bits(tokens, reference.run("decode", decode)["head.token"])


def test_every_launch_has_native_code(program):
    """Each kernel's function is defined in a source, named by the step tables and in the library's
    symbols."""
    library = (program.path / "bin" / "generic.so").read_bytes()
    step = (program.path / "src" / "step.cc").read_text()
    symbols = {symbol for phase in program.phases.values() for _, symbol, _ in phase.launches}
    assert len(symbols) > 30
    for symbol in symbols:
        source = (program.path / "src" / f"{symbol}.cc").read_text()
        assert re.search(rf"^(int32_t|void|extern).*\b{symbol}\(", source, re.M), symbol
        assert f'extern "C" void {symbol}_thunk(' in source
        assert f"{{{symbol}_thunk, " in step and f"{symbol}_thunk\0".encode() in library
    for name in program.phases:
        assert f"deepinfer_{name}\0".encode() in library
    sources = {p.stem for p in (program.path / "src").glob("*.cc")}
    assert sources == symbols | {"step"}  # and no kernel that nobody launches


LINE = re.compile(r"""
    (?:(?P<outputs>%\S+:\ \S+(?:,\ %\S+:\ \S+)*)\ =\ )?   # %name: dtype[dims], ...
    (?P<op>\w+)\((?P<inputs>[^()]*)\)                     # op(%temp, $input, @weight, !state)
    (?P<attrs>(?:\ \w+=(?:'[^']*'|\([^)]*\)|\S+))*)       # attributes by name
    (?:\ \ \ \#\ (?P<loc>\S+))?$                          # where in the model it stands
""", re.X)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_graph_texts_parse(case, program, name):
    """The documented text form holds the whole graph: names, types, order, locations."""
    text = (program.path / "graphs" / f"{name}.txt").read_text()
    first, *lines = text.splitlines()
    phase, types, nodes = program.phases[name], {}, []
    assert first == f"graph {name}" and text.endswith("\n")
    for line in lines:
        assert line.startswith("  ")
        word, _, rest = line[2:].partition(" ")
        if word in ("input", "weight", "state"):
            value, _, type_text = rest.partition(": ")
            assert value[0] == {"input": "$", "weight": "@", "state": "!"}[word] and not nodes
            types[value] = type_text
        elif word != "return":
            found = LINE.match(line[2:])
            assert found, line
            assert all(v in types for v in filter(None, found["inputs"].split(", "))), line
            for output in re.findall(r"(%\S+): (\S+?)(?:, (?=%)|$)", found["outputs"] or ""):
                types[output[0]] = output[1]
            nodes.append((found["op"], found["loc"] or ""))
    assert nodes == [(op, loc) for op, _, loc in phase.launches]
    assert rest.split(", ") == [f"%{v}" for v in phase.outputs]
    for value in phase.values:
        sigil = {"input": "$", "weight": "@", "state": "!", "temp": "%"}[value.kind]
        dims = [d if isinstance(d, int) else d[0] if d[1] == 1 else f"{d[0]}*{d[1]}"
                for d in value.shape]
        assert types.pop(sigil + value.name) == f"{value.dtype}[{','.join(map(str, dims))}]"
    assert types == {}
    graph = lower_graph(build_graphs(case.cfg, case.limits)[name], load_target("cpu"))
    assert text == graph_text(graph)
    assert program.manifest["phases"][name]["graph_digest"] == graph_digest(graph)
