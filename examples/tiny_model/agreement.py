"""How closely the training module and the compiled Program agree on logits."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import picks
from load import load
from quant import Precision

from deepinfer import LLM, SamplingParams


def traced(llm: LLM, ids: list[int], names: list[str]) -> dict[str, np.ndarray]:
    """Values of the compiled Program for all rows of a text, by name."""
    steps: list[Any] = []
    engine = llm.engine
    engine.trace, engine.on_step = tuple(names), steps.append
    try:  # with prompt_logprobs every row is computed, and none is taken from the prefix cache
        llm.generate(ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    finally:
        engine.trace, engine.on_step = (), None
    joined = {n: np.concatenate([s.outputs[n] for s in steps])[:len(ids)] for n in names}
    assert all(len(v) == len(ids) for v in joined.values())
    return joined


@torch.no_grad()
def agreement(llm: LLM, path: Path, texts: list[np.ndarray]) -> dict[str, Any]:
    """Compare the logits of both on every token of the texts, free and with the Program's picks.

    For a token on which the likeliest differs, the Program's gap between its first and second
    must be below twice the largest difference of that row's logits: else it was no near tie.

    The last comparison is of the module with itself, accumulating in fp32 and in float64, with the
    same picks: what the order of additions alone does through the roundings to bf16, fp8 and fp4.
    No other implementation can agree more closely.
    """
    model, wide = load(path, Precision()), load(path, Precision(wide=True))
    names = [f"layers.{i}.ffn.route.idx" for i in range(len(model.layers))]
    names += [f"layers.{i}.attn.indexer.topk" for i, block in enumerate(model.layers)
              if block.attn.roles.selects]
    kinds = ("free", "with_the_programs_picks", "of_the_module_with_itself")
    rows: dict[str, list[tuple[np.ndarray, ...]]] = {kind: [] for kind in kinds}
    for ids in texts:
        trace = traced(llm, ids.tolist(), [*names, "head.logits"])
        forced = picks(trace, model)
        tokens = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
        theirs = torch.from_numpy(trace["head.logits"])
        free = model.logits(model(tokens)[0])[0]
        mine = model.logits(model(tokens, forced=forced)[0])[0]
        itself = wide.logits(wide(tokens, forced=forced)[0])[0]
        for kind, a, b in zip(kinds, (free, mine, mine), (theirs, theirs, itself), strict=True):
            rows[kind].append(_compare(a, b))
    return {"tokens": sum(map(len, texts))} | {
        kind: _summary([np.concatenate(parts) for parts in zip(*found, strict=True)])
        for kind, found in rows.items()}


def _compare(a: torch.Tensor, b: torch.Tensor) -> tuple[np.ndarray, ...]:
    """By row: whether the likeliest is the same, whether b is near a tie, the largest error."""
    error = (a - b).abs().amax(-1)
    top = b.topk(2, -1).values
    return ((a.argmax(-1) == b.argmax(-1)).numpy(), (top[:, 0] - top[:, 1] < 2 * error).numpy(),
            error.numpy())


def _summary(rows: list[np.ndarray]) -> dict[str, float]:
    same, near, error = rows
    return {"argmax": float(same.mean()), "differing": int((~same).sum()),
            "of_them_near_ties": int((near & ~same).sum()), "median_error": float(np.median(error))}
