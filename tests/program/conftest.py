"""The smallest Program in which tokens go in and come out: one layer, no drafts, no Engram."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from deepinfer.compiler import compile
from deepinfer.graph.limits import Limits
from deepinfer.graph.make_model import byte_level_tokenizer, tiny_config, write_random_model
from deepinfer.program import Program
from deepinfer.settings import cache_dir
from tests.forward.cases import SLOTS, Case

SMALL = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "dspark_target_layer_ids": (),
         "compress_ratios": (1,), "kv_source_layer_ids": (0,), "index_source_layer_ids": (0,),
         "candidate_source_layer_id": 0, "engram_layer_ids": (), "engram_num_embeddings": ()}


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path, cfg = tmp_path_factory.mktemp("small") / "model", tiny_config(**SMALL)
    write_random_model(cfg, path, 7, tokenizer=byte_level_tokenizer(cfg.vocab_size))
    return Case(path, cfg, Limits.for_model(cfg, max_num_seqs=SLOTS, max_num_batched_tokens=32,
                                            max_model_len=64, page_size=8))


@pytest.fixture(scope="session")
def program(case: Case) -> Program:
    """Compiled for plain C, so that the test is the same on every x86-64 machine; by one of the
    test processes, while the others wait."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile(case.cfg, limits=case.limits, isa=("generic",))


def files_of(path: Path) -> dict[str, bytes]:
    """Every file below a directory by its relative name."""
    return {p.relative_to(path).as_posix(): p.read_bytes()
            for p in sorted(path.rglob("*")) if p.is_file()}
