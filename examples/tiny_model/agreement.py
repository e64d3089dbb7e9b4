"""How closely the training module and the compiled Program agree on logits."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from arithmetic import Native, Wide
from compare import picks
from declared import Declared
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
    """Compare the logits of both on every token of the texts, in four ways.

    free: the module picks experts and entries itself, and adds up in PyTorch's order.
    with_the_programs_picks: in PyTorch's order, experts and entries as the Program picked them.
    of_the_module_with_itself: with the same picks, summing matrix products in fp32 and in float64.
        So much do roundings to bf16, fp8 and fp4 make of the order of additions alone, and no
        implementation with an order of its own can be expected to agree more closely.
    with_the_declared_order: with the same picks, in the order of additions that DeepInfer declares.
        What differs then was read differently.

    For a token on which the likeliest differs, the gap between first and second must be below twice
    the largest difference of that row's logits: else it was no near tie.
    """
    kinds = ("free", "with_the_programs_picks", "of_the_module_with_itself",
             "with_the_declared_order")
    model, wide, declared = (load(path, Precision(arithmetic=arithmetic))
                             for arithmetic in (Native(), Wide(), Declared()))
    names = [f"layers.{i}.ffn.route.idx" for i in range(len(model.layers))]
    names += [f"layers.{i}.attn.indexer.topk" for i, block in enumerate(model.layers)
              if block.attn.roles.selects]
    rows: dict[str, list[tuple[np.ndarray, ...]]] = {kind: [] for kind in kinds}
    for ids in texts:
        trace = traced(llm, ids.tolist(), [*names, "head.logits"])
        forced = picks(trace, model)
        tokens = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
        theirs = torch.from_numpy(trace["head.logits"])
        free = model.logits(model(tokens)[0])[0]
        mine, itself, same = (m.logits(m(tokens, forced=forced)[0])[0]
                              for m in (model, wide, declared))
        for kind, a, b in zip(kinds, (free, mine, mine, same), (theirs, theirs, itself, theirs),
                              strict=True):
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
            "of_them_near_ties": int((near & ~same).sum()),
            "median_error": float(np.median(error)), "rows_equal": float((error == 0).mean())}
