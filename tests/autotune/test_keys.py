"""Keys: each thing that matters changes them, nothing else does (DESIGN §8, cases H2)."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from autotune import keys
from autotune.commands import tasks_of_model
from autotune.keys import Machine, compile_body
from autotune.space import Candidate, Problem, digest
from deepinfer.ir.op import Attrs
from deepinfer.targets.base import Schedule


@pytest.fixture(scope="module")
def candidate() -> Candidate:
    (task, *_) = tasks_of_model("tiny", "cpu", (1,), ["packed_linear_fp8"])
    return task.candidates()[0]


def key(candidate: Candidate, isa: str = "generic") -> str:
    return digest(compile_body(candidate, isa))


def other_problem(candidate: Candidate, **attrs: object) -> Candidate:
    p = candidate.problem
    made = Problem(p.target, p.op, Attrs({**p.attrs, **attrs}), p.inputs)
    return replace(candidate, problem=made)


def test_each_part_of_the_compile_key(candidate, monkeypatch):
    found = {key(candidate), key(candidate, "avx2"),
             key(replace(candidate, schedule=Schedule((("rows", 5),)))),
             key(other_problem(candidate, m=candidate.problem.attrs.m - 1)),
             key(other_problem(candidate, out="f32"))}
    monkeypatch.setattr(keys, "FLAGS", (*keys.FLAGS, "-O1"))
    found.add(key(candidate))
    for name in ("tilelang_version", "compiler_version", "micro_digest"):
        monkeypatch.setattr(keys, name, lambda: "other")
        found.add(key(candidate))
    monkeypatch.setattr(keys, "sources_digest", lambda target, op: "edited")
    found.add(key(candidate))
    assert len(found) == 10


def test_what_does_not_matter_leaves_the_key(candidate, tmp_path, monkeypatch):
    """Build order, file times, the directory that the process runs in."""
    first = key(candidate)
    keys.sources_digest.cache_clear()
    os.utime(keys.NATIVE)
    monkeypatch.chdir(tmp_path)
    again = Problem.from_json(candidate.problem.to_json())
    assert key(replace(candidate, problem=again)) == first


def test_the_measurement_key_names_the_machine():
    body = Machine.here("generic", 2).measure_body("text")
    assert set(body) == {"cpu", "isa", "threads", "cores", "cache_bytes", "versions", "policy",
                         "kernel_source"}
    assert {"compiler", "tilelang", "numpy", "ml_dtypes", "deepinfer-compiler", "libc",
            "kernel", "stand"} == set(body["versions"])
    assert body["policy"]["cold_bytes"] == 2 * body["cache_bytes"] > 0
    assert body["threads"] == 2 and body["cpu"]
