"""Compare this reading of the spec with DeepInfer's evaluator on one checkpoint.

    python examples/tiny_model/compare.py MODEL [--tokens 40] [--text FILE] [--order declared]

Layer-wise: each layer gets the evaluator's own incoming streams and picks, so that one flipped
rounding is not carried on. Free: the whole forward on its own, where flips add up; and with the
evaluator's router and top-k picks. In the declared order of additions every row and logit comes out
with equal bits; in PyTorch's own, or with float64 sums, nearly all rows of a layer do.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from arithmetic import Native, Wide
from declared import Declared
from load import load
from model import Model, draft_block
from quant import Precision
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.compiler import build_graphs, read_config
from deepinfer.graph.limits import Limits
from deepinfer.testing.reference import EvaluatorDevice

Arrays = dict[str, np.ndarray]
ORDERS = {"declared": Declared, "native": Native, "wide": Wide}


class Evaluator:
    """One request from position 0 through the source graphs."""

    def __init__(self, path: Path, tokens: int) -> None:
        self.cfg = read_config(path)
        self.limits = Limits.for_model(self.cfg, max_num_seqs=1, max_num_batched_tokens=tokens)
        self.graphs = build_graphs(self.cfg, self.limits)
        pages = self.limits.pages_per_seq
        self.device = EvaluatorDevice(self.graphs, self.cfg, path, {
            "num_slots": 1, "num_pages": pages, "pages_per_seq": pages})

    def _run(self, phase: str, given: Arrays) -> Arrays:
        """Run a phase with these inputs, zeros (greedy, one request) for the rest; all values."""
        graph = self.graphs[phase]
        names = [v.name for node in graph.nodes for v in node.outputs]
        return self.device.run(phase, {v.name: given[v.name] for v in graph.inputs
                                       if v.name in given}, trace=names)

    def _sampling(self, rows: int) -> Arrays:
        """Greedy, without penalties, biases, masks or forced tokens."""
        zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        none, nothing = np.full(rows, -1, np.int32), np.zeros(0, np.int32)
        block = self.cfg.dspark_block_size
        return {"temperature": zeros, "min_p": zeros, "top_p": ones,
                "top_k": np.zeros(rows, np.int32), "seed": np.zeros(rows, np.uint64),
                "adjust_spans": np.zeros((rows, 2), np.int32), "adjust_ids": nothing,
                "adjust_counts": nothing, "adjust_seen": nothing.astype(np.uint8),
                "adjust_bias": nothing.astype(np.float32), "repetition": ones,
                "frequency": zeros, "presence": zeros,
                "recent": np.full((rows, max(1, self.limits.draft_width)), -1, np.int32),
                "mask_row": none, **{f"mask_row.{k}": none for k in range(block)},
                "masks": np.zeros((0, -(-self.cfg.vocab_size // 32)), np.int32), "forced": none}

    def _rows(self, count: int) -> Arrays:
        return {"positions": np.arange(count, dtype=np.int32),
                "request": np.zeros(count, np.int32),
                "spans": np.array([[0, 0, count, 0]], np.int32),
                "pages": np.arange(self.limits.pages_per_seq, dtype=np.int32)[None]}

    def prefill(self, tokens: np.ndarray) -> Arrays:
        count, reach = len(tokens), self.cfg.engram_max_ngram_size
        closing = np.arange(1, count, 2, dtype=np.int32)
        back = np.arange(count)[:, None] - np.arange(reach)
        rows = self._rows(count)
        kept = {f"kept_{name}": rows[name] for name in ("positions", "request", "spans")}
        return self._run("prefill", rows | kept | self._sampling(count) | {
            "kept_rows": rows["positions"], "kept_is_image": np.zeros(count, np.uint8),
            "entry_positions": rows["positions"], "tokens": tokens.astype(np.int32),
            "lookback": np.where(back >= 0, tokens[back], -1).astype(np.int32),
            "is_image": np.zeros(count, np.uint8), "group_rows": closing,
            "group_positions": closing - 1, "group_request": np.zeros_like(closing),
            "sample_rows": np.arange(count, dtype=np.int32),
            "sample_position": np.arange(1, count + 1, dtype=np.int32)})

    def draft(self, hidden: np.ndarray, anchor: int) -> Arrays:
        count, block = len(hidden), self.cfg.dspark_block_size
        noise = [self.cfg.dspark_noise_token_id] * (block - 1)
        steps = {f"sample_position.{k}": np.array([count + 1 + k], np.int32) for k in range(block)}
        return self._run("draft", self._rows(count) | self._sampling(1) | steps | {
            "hidden": hidden, "anchor": np.array([anchor], np.int32),
            "block_positions": np.arange(count, count + block, dtype=np.int32),
            "block_request": np.zeros(block, np.int32),
            "block_spans": np.array([[0, 0, block, 0]], np.int32),
            "block_tokens": np.array([anchor, *noise], np.int32),
            "calibration": np.ones(block, np.float32), "is_image": np.zeros(block, np.uint8)})


def fp32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(array).astype(np.float32))


def picks(trace: Arrays, model: Model) -> dict[str, dict[int, Tensor]]:
    """The evaluator's router and top-k picks in the form that `Model.forward` takes."""
    experts, chosen = {}, {}
    for layer, block in enumerate(model.layers):
        experts[layer] = torch.from_numpy(
            np.sort(trace[f"layers.{layer}.ffn.route.idx"], -1).astype(np.int64))
        if block.attn.roles.selects:
            index = trace[f"layers.{layer}.attn.indexer.topk"]
            mask = np.zeros((len(index), len(index) // block.attn.roles.ratio), bool)
            rows, ranks = np.nonzero(index >= 0)
            mask[rows, index[rows, ranks]] = True
            chosen[layer] = torch.from_numpy(mask).unsqueeze(0)
    return {"experts": experts, "chosen": chosen}


@torch.no_grad()
def compare(path: Path, tokens: np.ndarray, arithmetic: Native) -> dict[str, float]:
    evaluator = Evaluator(path, len(tokens))
    model = load(path, Precision(arithmetic=arithmetic))
    trace = evaluator.prefill(tokens)
    ids = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0)
    expected, forced = fp32(trace["head.logits"]), picks(trace, model)
    scale = float(expected.std())
    outputs: dict[int, Tensor] = {}

    def teach(layer: int, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        outputs[layer - 1] = streams[0]
        if layer == 0:
            return streams, pre
        ffn = f"layers.{layer - 1}.ffn"
        return (fp32(trace[f"{ffn}.hyper_post"]).unsqueeze(0),
                fp32(trace[f"{ffn}.hyper_mix.pre"]).unsqueeze(0))

    h, taps, _ = model(ids, watch=teach, forced=forced)
    result = {"logit_error": float((model.logits(h)[0] - expected).abs().max()) / scale}
    equal, worst = [], 0.0
    for layer in range(len(model.layers)):
        theirs = fp32(trace[f"layers.{layer}.ffn.hyper_post"])
        error = (outputs[layer] - theirs).norm(dim=(-1, -2)) / theirs.norm(dim=(-1, -2))
        equal.append((error == 0).float().mean())
        worst = max(worst, float(error.max()))
    result |= {"rows_equal": float(torch.stack(equal).mean()), "worst_layer": worst}
    for name, given in (("free", None), ("with_their_picks", forced)):
        logits = model.logits(model(ids, forced=given)[0])[0]
        same = logits.argmax(-1) == expected.argmax(-1)
        error = (logits - expected).abs().amax(-1)
        top = expected[~same].topk(2, -1).values
        result[f"argmax_{name}"] = float(same.float().mean())
        result[f"logits_equal_{name}"] = float((error == 0).float().mean())
        result[f"logit_error_{name}_median"] = float(error.median()) / scale
        result[f"gap_explained_{name}"] = float(
            (top[:, 0] - top[:, 1] < 2 * error[~same]).float().mean()) if (~same).any() else 1.0
    taps_name = max((n for n in trace if n.startswith("taps.")), key=lambda n: trace[n].shape[-1])
    hidden = trace[taps_name]
    result["taps_equal"] = float((taps[0] == fp32(hidden)).float().mean())
    anchor, block = int(expected[-1].argmax()), model.cfg.dspark_block_size
    drafted = evaluator.draft(hidden, anchor)
    mine, sure, _ = draft_block(model, fp32(hidden).unsqueeze(0), anchor)
    theirs = [int(drafted[f"draft.{k}.token"][0]) for k in range(block)]
    result["draft_tokens_equal"] = float(np.mean(np.array(mine) == theirs))
    result["confidence_error"] = max(
        abs(float(drafted[f"draft.{k}.confidence"][0]) - float(arithmetic.sigmoid(sure[k])))
        for k in range(block))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--text", type=Path, help="default: this program's own source")
    parser.add_argument("--order", choices=ORDERS, default="declared", help="of the module's sums")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = (args.text or Path(__file__)).read_text()
    ids = Tokenizer.from_file(str(args.model / "tokenizer.json")).encode(text).ids[:args.tokens]
    print(json.dumps(compare(args.model, np.array(ids), ORDERS[args.order]()), indent=2))


if __name__ == "__main__":
    main()
