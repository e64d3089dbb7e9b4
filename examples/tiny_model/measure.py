"""Measure an exported model through its compiled CPU Program, and say what falls short.

    python examples/tiny_model/measure.py MODEL [--json FILE] [--only loss,chats]

Parts: loss, agreement (of logits), ablations, copying, drafts (real speculation), stages (of the
draft), chats, sample. With --json the figures are merged into FILE, which `card.py` reads.
Exit code 1: a figure misses its bound.
"""

import argparse
import json
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import chats
import numpy as np
import torch
from agreement import agreement
from data import encode_files, held_out, read_corpus
from evaluate import SKIP, HeldOut, ablations, bits, copying, drafts, five_gram
from load import load
from model import Model
from quant import Precision
from speculation import drop_stage, open_llm, prompts, speculate
from tokenizer import EOS
from tokenizers import Tokenizer

from deepinfer import LLM, SamplingParams

PROMPT = "def fibonacci(n):\n"
Figures = dict[str, Any]


@dataclass
class Measured:
    """A model under measurement.

    Args:
        tokens: of each held-out file, at most. files: held-out files; None: all.
        prompts: beginnings of held-out files that are continued.
    """

    path: Path
    threads: int
    tokens: int
    files: int | None
    prompts: int

    @cached_property
    def llm(self) -> LLM:
        return open_llm(self.path, self.threads)

    @cached_property
    def module(self) -> Model:
        return load(self.path, Precision())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    @cached_property
    def data(self) -> HeldOut:
        return HeldOut(self.tokenizer, self.files, self.tokens)

    def loss(self) -> Figures:
        """Held-out bits per byte: the Program's, the training module's, a 5-gram model's."""
        data = self.data
        return {"program": data.per_byte([self._bits(d) for d in data.documents]),
                "module": data.per_byte([bits(self.module, d) for d in data.documents]),
                "five_gram": five_gram(data, self.tokenizer, self.module.cfg.vocab_size),
                "files": len(data.documents), "tokens": sum(map(len, data.documents)),
                "tokens_per_file": self.tokens}

    def _bits(self, document: np.ndarray) -> float:
        logits = self.llm.score(document[:-1].tolist()).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        chosen = log_p[np.arange(len(logits)), document[1:]]
        return -float(chosen[SKIP - 1:].sum()) / math.log(2)

    def agreement(self) -> Figures:
        """Logits of Program and module on 2,000 held-out tokens: two texts of 1,000."""
        long = [d[:1000] for d in self.data.documents if len(d) >= 1000] or self.data.documents
        return agreement(self.llm, self.path, long[:2])

    def ablations(self) -> Figures:
        return ablations(self.module, self.data)

    def copying(self) -> Figures:
        return copying(self.module, self.data.documents)

    def _texts(self) -> list[list[int]]:
        """Beginnings of files that neither training nor calibration saw."""
        documents = encode_files(self.tokenizer, held_out(read_corpus(), half=1))
        return prompts(documents[:self.files], self.prompts)

    def _chats(self, count: int) -> list[list[int]]:
        asked = (chats.prompt(chats.KINDS[i % 4], random.Random(f"drafts {i}"))[0]
                 for i in range(count))
        return [self.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in asked]

    def drafts(self) -> Figures:
        """Real speculation on the two kinds of text of the corpus, one chat to two files, whose
        answers are shorter: about as in training. And on each kind alone."""
        files = self._texts()
        asked = self._chats(len(files) // 2)
        alone = {kind: speculate(self.path, texts, self.threads)
                 for kind, texts in (("files", files), ("chats", asked))}
        found = speculate(self.path, files + asked, self.threads)
        return found | {
            "alone": {kind: {k: row[k] for k in ("tokens_per_step", "prompts", "tokens", "ece")}
                      for kind, row in alone.items()},
            "along_the_text": drafts(self.module, self.data.documents)}

    def stages(self) -> Figures:
        """Tokens per step without each stage of the draft, on a part of the same texts."""
        texts = self._texts()[::4]
        found = {"all": speculate(self.path, texts, self.threads)["tokens_per_step"]}
        for stage in range(len(self.module.draft.stages)):
            with tempfile.TemporaryDirectory() as scratch:
                less = drop_stage(self.path, stage, Path(scratch))
                found[f"without_{stage}"] = speculate(less, texts, self.threads)["tokens_per_step"]
        return found

    def chats(self, count: int = 50) -> Figures:
        """Greedy answers to prompts that deepseek-recipe rendered, of the trained kinds."""
        asked = [Asked.make(chats.KINDS[i % 4], random.Random(f"held out {i}"))
                 for i in range(count)]
        outputs = self.llm.generate([a.prompt for a in asked],
                                    SamplingParams(max_tokens=128, temperature=0))
        kinds: dict[str, list[tuple[bool, bool]]] = {}
        for a, output in zip(asked, outputs, strict=True):
            closed = output.text.count("</think>") == a.thinking
            formed = closed and output.finish_reason == "stop"
            right = formed and output.text.split("</think>")[-1] == a.answer
            kinds.setdefault(a.kind, []).append((formed, right))
        rows = [pair for pairs in kinds.values() for pair in pairs]
        return {"prompts": count, "well_formed": float(np.mean([f for f, _ in rows])),
                "right": float(np.mean([r for _, r in rows])),
                "kinds": {kind: {"well_formed": float(np.mean([f for f, _ in pairs])),
                                 "right": float(np.mean([r for _, r in pairs]))}
                          for kind, pairs in kinds.items()}}

    def sample(self) -> Figures:
        """What `deepinfer run --prompt` says."""
        output = self.llm.generate(PROMPT, SamplingParams(max_tokens=64, temperature=0))[0]
        return {"prompt": PROMPT, "text": output.text}


@dataclass
class Asked:
    """A prompt, and the answer that the generator of the chats has for it."""

    kind: str
    prompt: str
    thinking: bool
    answer: str

    @staticmethod
    def make(kind: str, rng: random.Random) -> "Asked":
        state = rng.getstate()
        prompt, thinking = chats.prompt(kind, rng)
        rng.setstate(state)
        messages, options = chats.MAKERS[kind](rng)
        options["thinking_mode"] = True  # so that only answers stand behind </think>
        known = chats.render(messages[:2], options).split("</think>")[-1]
        return Asked(kind, prompt, thinking, known.split(EOS)[0])


PARTS = ("loss", "agreement", "ablations", "copying", "drafts", "stages", "chats", "sample")


def checks(found: Figures) -> list[tuple[str, float, str, bool]]:
    """Each bound that the figures at hand can be held to: what, figure, bound, whether it holds."""
    rows: list[tuple[str, float, str, bool]] = []

    def at(what: str, value: float, bound: str, holds: Callable[[float], bool]) -> None:
        rows.append((what, value, bound, bool(holds(value))))

    if loss := found.get("loss"):
        at("Program's loss over the module's", loss["program"] / loss["module"], "1 ± 0.01",
           lambda x: abs(x - 1) <= 0.01)
        at("Program's loss over the 5-gram model's", loss["program"] / loss["five_gram"],
           "< 0.95", lambda x: x < 0.95)
    if same := found.get("agreement"):
        at("tokens compared", same["tokens"], ">= 2000", lambda x: x >= 2000)
        for name, bound in (("free", 0.97), ("with_the_declared_order", 0.995)):
            at(f"argmax, {name.replace('_', ' ')}", same[name]["argmax"], f">= {bound}",
               lambda x, bound=bound: x >= bound)
        # In an order of its own a module can be no closer to the Program than to itself.
        at("median logit error with the Program's picks over the module's own",
           same["with_the_programs_picks"]["median_error"]
           / same["of_the_module_with_itself"]["median_error"], "< 1.1", lambda x: x < 1.1)
        for name in ("free", "with_the_programs_picks", "with_the_declared_order"):
            at(f"differing that are no near ties, {name.replace('_', ' ')}",
               same[name]["differing"] - same[name]["of_them_near_ties"], "0", lambda x: x == 0)
    for name, row in found.get("ablations", {}).items():
        at(f"without {name}, in standard errors", row["rise"] / row["standard_error"], "> 2",
           lambda x: x > 2)
    if draft := found.get("drafts"):
        at("tokens per step on files", draft["alone"]["files"]["tokens_per_step"], ">= 2.0",
           lambda x: x >= 2)
        at("ECE, the worst position", max(draft["ece"]), "<= 0.05", lambda x: x <= 0.05)
    if stage := found.get("stages"):
        for name in sorted(stage.keys() - {"all"}):
            at(f"tokens per step {name.replace('_', ' stage ')} over all stages'",
               stage[name] / stage["all"], "< 1", lambda x: x < 1)
    if chat := found.get("chats"):
        at("well-formed answers", chat["well_formed"], ">= 0.9", lambda x: x >= 0.9)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--files", type=int, help="held-out files; default: all")
    parser.add_argument("--tokens", type=int, default=1024, help="of each file, at most")
    parser.add_argument("--prompts", type=int, default=320, help="to continue with drafts")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measured = Measured(args.model, args.threads, args.tokens, args.files, args.prompts)
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for part in args.only.split(","):
        found[part] = getattr(measured, part)()
        print(part, json.dumps(found[part], indent=2), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")
    rows = checks(found)
    for what, value, bound, holds in rows:
        print(f"{'holds' if holds else 'MISSES'}  {what}: {value:.4f} ({bound})")
    raise SystemExit(not all(holds for *_, holds in rows))


if __name__ == "__main__":
    main()
