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
    """
    model = load(path, Precision())
    names = [f"layers.{i}.ffn.route.idx" for i in range(len(model.layers))]
    names += [f"layers.{i}.attn.indexer.topk" for i, block in enumerate(model.layers)
              if block.attn.roles.selects]
    same: dict[str, list[np.ndarray]] = {"free": [], "with_the_programs_picks": []}
    near: dict[str, list[np.ndarray]] = {name: [] for name in same}
    error: dict[str, list[np.ndarray]] = {name: [] for name in same}
    for ids in texts:
        trace = traced(llm, ids.tolist(), [*names, "head.logits"])
        theirs = torch.from_numpy(trace["head.logits"])
        for name, forced in (("free", None), ("with_the_programs_picks", picks(trace, model))):
            h, _, _ = model(torch.from_numpy(ids.astype(np.int64)).unsqueeze(0), forced=forced)
            logits = model.logits(h)[0]
            equal = logits.argmax(-1) == theirs.argmax(-1)
            largest = (logits - theirs).abs().amax(-1)
            top = theirs.topk(2, -1).values
            same[name].append(equal.numpy())
            near[name].append((top[:, 0] - top[:, 1] < 2 * largest)[~equal].numpy())
            error[name].append(largest.numpy())
    return {"tokens": sum(map(len, texts))} | {
        name: {"argmax": float(np.concatenate(same[name]).mean()),
               "differing": int((~np.concatenate(same[name])).sum()),
               "of_them_near_ties": int(np.concatenate(near[name]).sum()),
               "median_error": float(np.median(np.concatenate(error[name])))}
        for name in same}
