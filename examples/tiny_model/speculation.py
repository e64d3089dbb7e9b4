"""Draft acceptance of the compiled Program by real speculation, and what each DSpark stage adds."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_training import calibration_errors

from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint import CheckpointReader, write_checkpoint
from deepinfer.compiler import compile

CONTINUE = 48  # tokens after each prompt
EVERY = 32  # a prompt may end after so many tokens, or a multiple of them
LONGEST = 768


def prompts(documents: list[np.ndarray], count: int) -> list[list[int]]:
    """Beginnings of the documents, spread evenly over all there are."""
    ends = [(d, end) for d in documents for end in range(EVERY, min(len(d), LONGEST), EVERY)]
    chosen = np.linspace(0, len(ends) - 1, min(count, len(ends))).astype(int)
    return [ends[i][0][:ends[i][1]].tolist() for i in chosen]


class Rounds:
    """Confidences and outcomes of an engine's rounds of drafts, in the order in which they fell.

    A request's k-th drafting is judged by its k-th verification.
    """

    def __init__(self, llm: LLM) -> None:
        self.confidences: dict[str, list[list[float]]] = {}
        self.outcomes: dict[str, list[tuple[int, int]]] = {}
        policy = llm.engine.policy
        observe = policy.observe

        def watched(name, drafts, confidences=None):
            self.confidences.setdefault(name, []).append(confidences)
            observe(name, drafts, confidences)

        policy.observe = watched
        llm.engine.on_step = self._step

    def _step(self, record) -> None:
        for name, accepted in record.accepted.items():
            self.outcomes.setdefault(name, []).append((record.widths[name], accepted))

    def whole(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds in which all drafts were verified: survival and acceptance, fp32 [N, block]."""
        sure, accepted = [], []
        for name, outcomes in self.outcomes.items():
            for given, (width, count) in zip(self.confidences[name], outcomes, strict=False):
                if width == block:
                    sure.append(np.cumprod(given))
                    accepted.append(np.arange(block) < count)
        return (torch.from_numpy(np.array(sure, np.float32)),
                torch.from_numpy(np.array(accepted)).float())


def open_llm(model: Path, threads: int, **settings: Any) -> LLM:
    """The model with the Program that `deepinfer run` uses."""
    return LLM(model, program=compile(model), num_threads=threads, progress=False,
               **{"max_num_seqs": 16} | settings)


def speculate(model: Path, texts: list[list[int]], threads: int) -> dict[str, Any]:
    """Continue the texts greedily with the model's own drafts.

    Returns:
        tokens per step with the target's own one, the share of first, second, .. drafts accepted
        (all before included), rounds, and the confidences' ECE at each position.
    """
    with open_llm(model, threads) as llm:
        rounds = Rounds(llm)
        outputs = llm.generate(texts, SamplingParams(max_tokens=CONTINUE, temperature=0))
        accepts = llm.stats().accepts
        sure, accepted = rounds.whole(int(llm.engine.facts["block"]))
    distinct = [len(set(o.token_ids)) / len(o.token_ids) for o in outputs]
    return {"tokens_per_step": accepts.length, "accepted": accepts.rates, "rounds": accepts.rounds,
            "prompts": len(texts), "tokens": sum(len(o.token_ids) for o in outputs),
            "ece": calibration_errors(sure, accepted),
            "distinct_tokens": float(np.mean(distinct))}


def drop_stage(model: Path, stage: int, out: Path) -> Path:
    """Write the checkpoint without one DSpark stage.

    What lies beside the stages (the taps' projection, the norm, Markov and confidence heads) is
    stored with the first or the last stage, and moves to the new first or last.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    last = text["num_nextn_predict_layers"] - 1
    text["num_nextn_predict_layers"] = last
    text["compress_ratios"].pop()
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(model / name, out / name)
    with CheckpointReader(model) as reader:
        tensors = {}
        for name in reader.names():
            new = _renamed(name, stage, last)
            if new is not None:
                raw = np.array(reader.raw(name))
                tensors[new] = raw.view(np.int8) if raw.dtype == np.uint8 else raw
        write_checkpoint(out, tensors)
    return out


def _renamed(name: str, stage: int, last: int) -> str | None:
    found = re.fullmatch(r"mtp\.(\d+)\.(.*)", name)
    if found is None:
        return name
    index, rest = int(found[1]), found[2]
    if rest.startswith("main_"):
        return f"mtp.0.{rest}"
    if rest.startswith(("norm.", "markov_head.", "confidence_head.")):
        return f"mtp.{last - 1}.{rest}"
    return None if index == stage else f"mtp.{index - (index > stage)}.{rest}"
