"""Load a model: find or compile its Program, and make an Engine that runs it."""

from __future__ import annotations

from pathlib import Path

from deepinfer.api.progress import progress_bar
from deepinfer.api.settings import EngineSettings
from deepinfer.compiler import compile, read_config
from deepinfer.errors import ProgramError, TargetError
from deepinfer.graph.limits import Limits
from deepinfer.program import Program
from deepinfer.runtime.devices.cpu import CpuDevice
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.prepacked import open_weights
from deepinfer.runtime.scheduler import default_chunk
from deepinfer.runtime.state import StateSizes
from deepinfer.runtime.text import Text
from deepinfer.runtime.weight_store import WeightStore


def load_engine(model: Path, settings: EngineSettings, sizes: dict[str, int], *,
                program: Program | str | Path | None, target: str, num_threads: int | None,
                cache_bytes: int | None, cache_weights: bool, progress: bool) -> Engine:
    """An engine for a checkpoint.

    Args:
        model: the checkpoint directory. settings: of the engine. sizes: fields of Limits, those
            that were asked for. The rest: as of LLM.

    Raises:
        CheckpointError, ProgramError, RequestError, TargetError, ToolchainError: say what is wrong.
    """
    cfg = read_config(model)
    drafts = cfg.dspark_block_size if cfg.n_stages else 0
    settings.check_model(window=cfg.sliding_window, drafts=drafts, can_replay=cfg.can_replay)
    limits = Limits.for_model(cfg, **sizes) if program is None else Limits(**sizes)
    # Refused before a minute goes into compiling.
    default_chunk(limits.max_num_batched_tokens, limits.max_num_seqs, 1, settings.width(drafts))
    if program is None:
        with progress_bar(progress) as report:
            program = compile(cfg, target=target, limits=limits, report=report)
    elif not isinstance(program, Program):
        program = Program.load(program)
    program.require(target=target, model=cfg.to_json())
    if target != "cpu":
        raise TargetError(f"target is '{target}', expected 'cpu': no other device can run here",
                          where="LLM", next="compile for it with `deepinfer compile`")
    built = program.manifest["limits"]
    length = built["max_model_len"] if "max_model_len" not in sizes else limits.max_model_len
    if not 1 < length <= built["max_model_len"]:
        raise ProgramError(f"field limits.max_model_len is {built['max_model_len']}, "
                           f"max_model_len {length} needs 2 or more, and no more than that",
                           where=f"Program {program.path}",
                           next="lower max_model_len or compile with a larger one")
    if sizes.get("page_size", built["page_size"]) != built["page_size"]:
        raise ProgramError(f"field limits.page_size is {built['page_size']}, expected "
                           f"{sizes['page_size']}", where=f"Program {program.path}",
                           next="leave page_size out or compile with it")
    state = StateSizes.plan(
        program, max_num_seqs=min(limits.max_num_seqs, built["max_num_seqs"]),
        max_model_len=length, cache_bytes=cache_bytes,
        snapshot_interval=settings.snapshot_interval if settings.prefix_cache == "exact" else None,
        parts=settings.snapshot_parts(drafts))
    text = Text.load(model, program.manifest["facts"]["bos"])
    weights = open_weights(program, model, WeightStore.default() if cache_weights else None)
    device = CpuDevice(program, weights.arrays, state.for_device(), num_threads=num_threads)
    rows = min(limits.max_num_batched_tokens, built["max_num_batched_tokens"])
    try:
        return Engine(program, device, state, max_num_batched_tokens=rows, max_model_len=length,
                      text=text, model=model, fingerprint=weights.fingerprint,
                      **settings.for_engine(drafts))
    except BaseException:
        device.close()
        raise
