"""Measure an exported model on held-out files: loss, 5-gram baseline, what each mechanism is worth.

    python examples/tiny_model/evaluate.py MODEL [--files 20] [--tokens 1024]
"""

import argparse
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import attention
import numpy as np
import torch
from data import encode_files, held_out, is_held_out, read_corpus
from draft_training import Committed, draft_blocks, some_anchors
from layers import HyperMix
from load import load
from model import Model
from ngram import KneserNey
from quant import Precision
from tokenizers import Tokenizer

# Predictions of the first tokens are left out, so that all models have four tokens of context.
SKIP = 4


@torch.no_grad()
def bits(model: Model, document: np.ndarray) -> float:
    """Bits of the tokens after the first SKIP."""
    ids = torch.from_numpy(document.astype(np.int64)).unsqueeze(0)
    h, _, _ = model(ids[:, :-1])
    log_p = model.logits(h)[0].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return -float(log_p[SKIP - 1 :].sum()) / math.log(2)


def without(model: Model) -> dict[str, Callable[[], AbstractContextManager]]:
    """Each mechanism by name, with a context in which the model lacks it."""
    @contextmanager
    def changed(change: Callable[[torch.Tensor], object], suffix: str):
        chosen = [p for n, p in model.named_parameters() if n.endswith(suffix)]
        saved = [p.clone() for p in chosen]
        with torch.no_grad():
            for p in chosen:
                change(p)
            yield
            for p, old in zip(chosen, saved, strict=True):
                p.copy_(old)

    @contextmanager
    def narrow():
        model.cfg.sliding_window //= 2
        yield
        model.cfg.sliding_window *= 2

    size, mixes = model.cfg.hidden_size, HyperMix.forward

    def constant(self, streams):
        pre, post, matrix = mixes(self, streams)
        mean = [x.mean((0, 1), keepdim=True).expand_as(x) for x in (pre, post)]
        return (*mean, torch.eye(self.hc).expand_as(matrix))

    return {
        "Engram": lambda: changed(lambda p: p[-size:].zero_(), "engram.wkv.weight"),
        "compressed entries": lambda: patch.object(
            attention, "best_mask", lambda s, n: torch.zeros_like(s, dtype=torch.bool)),
        "sinks": lambda: changed(lambda p: p.fill_(-1e30), "attn_sink"),
        "hyper-connection mixing": lambda: patch.object(HyperMix, "forward", constant),
        "shared expert": lambda: changed(lambda p: p.zero_(), "shared_experts.w2.weight"),
        "half of the window": narrow,
    }


def drafts(model: Model, documents: list[np.ndarray]) -> float:
    """Mean tokens per step with greedy drafts: accepted ones and the target's own."""
    accepted = []
    for number, document in enumerate(documents):
        ids = torch.from_numpy(document.astype(np.int64)).unsqueeze(0)
        with torch.no_grad():
            anchors = some_anchors(1, 1, ids.shape[1] - model.cfg.dspark_block_size, 160,
                                   torch.Generator().manual_seed(number))
            logits, judged, _ = draft_blocks(model, Committed.of(model, ids), anchors)
        accepted.append((logits.argmax(-1) == judged.argmax(-1)).float().cumprod(-1).sum(-1).mean())
    return 1 + float(torch.stack(accepted).mean())


@torch.no_grad()
def copying(model: Model, documents: list[np.ndarray], rows: int = 16) -> dict[str, float]:
    """How often the likeliest token is right in the second copy of shuffled held-out tokens, by
    the distance to the first copy. The first quarter of the copy, where it must be found, is left
    out. Nothing but looking back can do this."""
    stream, found = np.concatenate(documents), {}
    for distance in (24, 96, 240):
        rng = np.random.default_rng(distance)
        starts = rng.integers(len(stream) - distance, size=rows)
        snippets = np.stack([rng.permutation(stream[s:s + distance]) for s in starts])
        ids = torch.from_numpy(np.tile(snippets, 2)).long()
        h, _, _ = model(ids[:, :-1])
        right = model.logits(h).argmax(-1) == ids[:, 1:]
        found[str(distance)] = float(right[:, distance + distance // 4:].float().mean())
    return found


class HeldOut:
    """Held-out files as tokens, cut to `tokens`, and the bytes of what is predicted in them."""

    def __init__(self, tokenizer: Tokenizer, files: int | None = None, tokens: int = 1024) -> None:
        self.texts = read_corpus()
        encoded = encode_files(tokenizer, held_out(self.texts)[:files])
        self.documents = [d[:tokens] for d in encoded if len(d) > 2 * SKIP]
        self.sizes = [len(tokenizer.decode(d[SKIP:].tolist()).encode()) for d in self.documents]

    def per_byte(self, bits: list[float]) -> float:
        return sum(bits) / sum(self.sizes)


def five_gram(data: HeldOut, tokenizer: Tokenizer, vocab_size: int) -> float:
    """Bits per byte of a 5-gram model of the training files."""
    train = encode_files(tokenizer, [t for n, t in data.texts.items() if not is_held_out(n)])
    baseline = KneserNey(train, vocab_size)
    return data.per_byte([-float(np.log2(baseline.probabilities(d)).sum())
                          for d in data.documents])


def ablations(model: Model, data: HeldOut) -> dict[str, dict[str, float]]:
    """By how many bits per byte each mechanism's absence raises the loss: the mean over the files,
    each counting the same, and its standard error."""
    whole = [bits(model, d) for d in data.documents]
    table = {}
    for name, context in without(model).items():
        with context():
            rise = np.array([(bits(model, d) - w) / n for d, w, n in
                             zip(data.documents, whole, data.sizes, strict=True)])
        table[name] = {"rise": float(rise.mean()),
                       "standard_error": float(rise.std(ddof=1) / len(rise) ** 0.5)}
    return table


def report(path: Path, files: int | None, tokens: int) -> dict[str, object]:
    model = load(path, Precision())
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    data = HeldOut(tokenizer, files, tokens)
    result: dict[str, object] = {
        "bits_per_byte": data.per_byte([bits(model, d) for d in data.documents]),
        "bits_per_byte_5gram": five_gram(data, tokenizer, model.cfg.vocab_size),
        "files": len(data.documents), "tokens": sum(map(len, data.documents)),
        "without": ablations(model, data), "copying": copying(model, data.documents),
        "tokens_per_step": drafts(model, data.documents)}
    stages = model.draft.stages
    for i in range(len(stages)):
        model.draft.stages = torch.nn.ModuleList(s for j, s in enumerate(stages) if j != i)
        result[f"tokens_per_step_without_stage_{i}"] = drafts(model, data.documents)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--files", type=int, help="default: all that are held out")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(report(args.model, args.files, args.tokens), indent=2))


if __name__ == "__main__":
    main()
