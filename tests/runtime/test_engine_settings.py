"""Settings: refused before anything is compiled, and handed to the engine as they were given."""

from __future__ import annotations

import inspect
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer.api import load
from deepinfer.api.settings import EngineSettings
from deepinfer.errors import ProgramError, RequestError
from deepinfer.llm import LLM
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.prepacked import Weights
from deepinfer.runtime.state import StateSizes
from deepinfer.settings import cache_dir
from tests.runtime.fake_engine import FakeEngine


class Loaded(FakeEngine):
    """Remembers how it was made. Args: fail: raises this instead."""

    made: list[dict[str, Any]] = []

    def __init__(self, program: Any, device: Any, sizes: Any, **given: Any) -> None:
        self.made.append(given | {"device": device, "sizes": sizes})
        if given["prefill_chunk"] == 7:
            raise RequestError("the chunk does not fit", where="engine")
        super().__init__()


@pytest.fixture
def compiled(monkeypatch) -> SimpleNamespace:
    """Loading without compiler, weights and device; what was compiled and planned is kept."""
    seen = SimpleNamespace(limits=[], plans=[], devices=[], stores=[], engines=Loaded.made)
    Loaded.made.clear()

    def compile(cfg, *, target, limits, report):
        seen.limits.append(limits)
        return program(limits)

    def open_weights(program, model, store):
        seen.stores.append(store)
        return Weights({}, "known")

    class Device:
        def __init__(self, *args, num_threads) -> None:
            self.num_threads, self.closed = num_threads, False
            seen.devices.append(self)

        def close(self) -> None:
            self.closed = True

    def plan(program, **given):
        seen.plans.append(given)
        return StateSizes(4, 8, 2, 128)

    class FakeProgram(SimpleNamespace):
        @staticmethod
        def load(path):
            return loaded

        def require(self, **given) -> None:
            pass

    def program(limits) -> Any:
        return FakeProgram(path=Path("p"), manifest={
            "limits": asdict(limits), "facts": {"bos": 0}, "weights": {}})

    from deepinfer.graph.limits import Limits
    loaded = program(Limits(max_model_len=200, page_size=16, max_num_seqs=8))
    for name, value in (("compile", compile), ("CpuDevice", Device), ("Engine", Loaded),
                        ("Program", FakeProgram), ("open_weights", open_weights),
                        ("StateSizes", SimpleNamespace(plan=plan))):
        monkeypatch.setattr(load, name, value)
    return seen


def test_every_setting_reaches_the_engine(tiny, compiled, tmp_path):
    given = {"prefill_chunk": 32, "prefix_cache": "replay", "cache_dir": str(tmp_path),
             "cache_dir_bytes": 10**9,
             "snapshot_interval": 4, "replay": "compact", "keep_tokens": 150, "draft": "adaptive",
             "draft_width": 3, "verification": "block", "overlap": False}
    assert given.keys() == {f.name for f in fields(EngineSettings)}
    assert all(given[f.name] != f.default for f in fields(EngineSettings))
    llm = LLM(tiny, page_size=64, max_num_seqs=4, max_num_batched_tokens=100, num_threads=3,
              progress=False, cache_bytes=10**6, cache_weights=False, **given)
    [made] = compiled.engines
    assert compiled.stores == [None] and made["fingerprint"] == "known"
    assert {name: made[name] for name in given} == given | {"cache_dir": tmp_path}
    assert made["max_num_batched_tokens"] == 100 and made["model"] == tiny
    assert made["device"].num_threads == 3 and llm.engine.text is not None
    [limits] = compiled.limits
    assert (limits.page_size, limits.max_num_seqs) == (64, 4)
    [plan] = compiled.plans
    assert plan["cache_bytes"] == 10**6 and plan["snapshot_interval"] is None
    assert plan["parts"] == ("encoder",)


def test_defaults_are_those_of_the_engine(tiny, compiled):
    LLM(tiny, progress=False)
    [made] = compiled.engines
    assert compiled.stores[0].path == cache_dir() / "weights"
    real = inspect.signature(Engine).parameters
    for setting in fields(EngineSettings):
        if setting.name in real and real[setting.name].default is not inspect.Parameter.empty:
            assert made[setting.name] == real[setting.name].default, setting.name
    assert compiled.plans[0]["snapshot_interval"] == 8
    assert compiled.plans[0]["parts"] == ("encoder", "decoder", "draft")


def test_a_given_program_has_its_own_sizes(tiny, compiled):
    LLM(tiny, program="p", progress=False)
    assert compiled.limits == [] and compiled.engines[0]["max_model_len"] == 200
    assert compiled.plans[0]["max_num_seqs"] == 8
    with pytest.raises(ProgramError, match="limits.page_size is 16, expected 64\n  where: Program"):
        LLM(tiny, program="p", page_size=64)


def test_an_engine_that_refuses_leaves_no_device(tiny, compiled):
    with pytest.raises(RequestError, match="the chunk does not fit"):
        LLM(tiny, prefill_chunk=7)
    assert [device.closed for device in compiled.devices] == [True]


@pytest.mark.parametrize(("setting", "message"), [
    ({"prefix_cache": "on"}, "prefix_cache is 'on', expected one of 'exact', 'replay', 'off'"),
    ({"replay": True}, "replay is True, expected one of 'off', 'mask', 'compact'"),
    ({"draft": None}, "draft is None, expected one of 'fixed', 'adaptive', 'off'"),
    ({"verification": "loose"}, "verification is 'loose', expected one of 'exact', 'rejection'"),
    ({"overlap": 1}, "overlap is 1, expected True or False"),
    ({"snapshot_interval": 0}, "snapshot_interval is 0, expected an int >= 1"),
    ({"keep_tokens": 1.5}, "keep_tokens is 1.5, expected an int >= 1"),
    ({"draft_width": -1}, "draft_width is -1, expected an int >= 0"),
    ({"draft_width": 6}, "draft_width is 6, expected an int in 0..5: the model drafts 5 at once"),
    ({"page_size": 3}, "page_size is 3, expected an even number"),
    ({"page_size": "8"}, "page_size is '8', expected an int >= 1"),
    ({"cache_dir": 5}, "cache_dir is 5, expected a directory"),
    ({"cache_dir": ""}, "cache_dir is '', expected a directory"),
    ({"cache_dir": "d", "prefix_cache": "off"}, "cache_dir is 'd' and prefix_cache is 'off'"),
    ({"replay": "mask", "keep_tokens": 13}, "keep_tokens is 13, expected at least 14 .the window "
                                            "of 8, 5 drafts and 1. with replay='mask'"),
    ({"max_num_batched_tokens": 300}, "max_num_batched_tokens is 300, expected at least .*384"),
])
def test_settings_are_refused_before_compiling(tiny, setting, message, monkeypatch):
    monkeypatch.setattr(load, "compile", lambda *args, **named: pytest.fail("compiled"))
    with pytest.raises(RequestError, match=message) as caught:
        LLM(tiny, **setting)
    assert caught.value.where and caught.value.next


def test_without_drafts_a_step_needs_one_row_each(tiny, compiled):
    """Case C6: the budget says what it needs, and no more."""
    LLM(tiny, max_num_batched_tokens=64, draft="off")
    LLM(tiny, max_num_batched_tokens=64, draft_width=0)
    LLM(tiny, max_num_batched_tokens=300, draft_width=3)
    LLM(tiny, replay="compact", keep_tokens=14)
    assert len(compiled.engines) == 4
    with pytest.raises(RequestError, match="max_num_batched_tokens is 255, expected.*256"):
        LLM(tiny, max_num_batched_tokens=255, draft_width=3)


def test_a_model_without_draft_stages_drafts_nothing():
    settings = EngineSettings(draft="adaptive")
    assert [settings.for_engine(n)["draft"] for n in (0, 5)] == ["off", "adaptive"]
    assert settings.width(0) == 0 and settings.snapshot_parts(0) == ("encoder", "decoder")
    settings.check_model(window=8, drafts=0)
    with pytest.raises(RequestError, match="draft_width is 1, expected an int in 0..0"):
        EngineSettings(draft_width=1).check_model(window=8, drafts=0)


def test_a_model_that_reads_across_its_cut_is_not_replayed():
    with pytest.raises(RequestError, match="replay is 'mask', expected 'off': this model reads"):
        EngineSettings(replay="mask").check_model(window=8, drafts=5, can_replay=False)
    EngineSettings().check_model(window=8, drafts=5, can_replay=False)
