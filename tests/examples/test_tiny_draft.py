"""The draft's training sees what decoding will show it, and the heads set at the start are kept."""

from __future__ import annotations

import pytest

from tests.examples.test_agreement import run

pytest.importorskip("torch")

MODEL = """
import json
import numpy as np, torch
from circuits import in_circuit, set_circuits
from config import SMOKE, make_config
from draft_training import Committed, draft_blocks, some_anchors
from model import Model, draft_block
from optim import CIRCUIT_RATE, Optimizer, initialise
from quant import Precision
from team import Team

torch.set_num_threads(1)
cfg = make_config(SMOKE, 100)
model = Model(cfg, np.arange(cfg.vocab_size) % 100,
              Precision(bf16=False, tiled=False, quantize=False))
initialise(model, 0)
set_circuits(model)
"""

BLOCKS = MODEL + """
generator = torch.Generator().manual_seed(0)
rows = torch.randint(3, 500, (2, 70), generator=generator)
anchors = torch.tensor([[1, 30, 33, 60], [40, 5, 41, 9]])  # near the start, side by side, any order
worst = judge = 0.0
changed = {"seen": [], "unseen": []}
with torch.no_grad():
    for row in range(2):
        for at in range(4):
            tokens, anchor = rows[row:row + 1].clone(), int(anchors[row, at])
            _, taps, _ = model(tokens[:, :anchor])
            drafts, confidence, logits = draft_block(model, taps, int(tokens[0, anchor]))
            tokens[0, anchor + 1:anchor + 6] = torch.tensor(drafts)  # as if all were right
            where = anchors[row:row + 1].clone()
            found, judged, sure = draft_blocks(model, Committed.of(model, tokens), where)
            worst = max(worst, float((found[0, at] - logits).abs().max()),
                        float((sure[0, at] - confidence).abs().max()))
            h, _, _ = model(tokens[:, :-1])
            judge = max(judge, float((judged[0, at] - model.logits(
                h[0, anchor:anchor + 5].bfloat16().float())).abs().max()))
            begin = max(0, anchor - cfg.sliding_window)
            for part in (slice(begin), slice(anchor, None), slice(begin, begin + 1)):
                text = Committed.of(model, tokens)
                text.taps[0, part] = 9
                other = draft_blocks(model, text, where)[0][0, at]
                changed["seen" if part.stop == begin + 1 else "unseen"].append(
                    float((other - found[0, at]).abs().max()))
print(json.dumps({"worst": worst, "judged": judge, "scale": float(logits.std())} | changed))
"""

ANCHORS = MODEL + """
generator = torch.Generator().manual_seed(0)
found = some_anchors(300, 5, 12, 4, generator)
print(json.dumps({"seen": sorted(set(found.flatten().tolist())), "shape": list(found.shape),
                  "distinct": all(len(set(r)) == 4 for r in found.tolist()),
                  "all": sorted(some_anchors(1, 5, 12, 99, generator)[0].tolist())}))
"""

RATES = MODEL + """
named = [(n, p) for n, p in model.named_parameters() if not n.startswith("draft.")]
team = Team(model, 1)
team.join(0)
optimizer = Optimizer(named, team)
moved = {True: [], False: []}
before = {n: p.detach().clone() for n, p in named}
for p in (p for p in team.parameters if p.grad is not None):
    p.grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
optimizer.step(1.0)
muon = set(map(id, (p for group in optimizer.groups for p in group)))
for name, p in named:
    if id(p) in muon and p.dim() == 2:
        step = float((p - before[name]).norm()) / max(1, p.shape[0] / p.shape[1]) ** 0.5
        moved[in_circuit(name)].append(step / min(p.shape) ** 0.5)
print(json.dumps({"slow": moved[True], "others": moved[False], "rate": CIRCUIT_RATE}))
"""

COPIES = """
import json
import numpy as np
from data import Batches, WINDOW

batches = Batches.__new__(Batches)
batches.stream = np.arange(100_000, dtype=np.int32)
rng, first = np.random.default_rng(0), []
for _ in range(400):
    row = batches._copies(rng, 1025)
    again = np.flatnonzero(row[1:] == row[0])
    first.append(int(again[0]) + 1 if len(again) else 0)
print(json.dumps({"first": first, "window": WINDOW, "length": len(row)}))
"""


def test_a_teacher_forced_block_is_the_block_that_decoding_drafts() -> None:
    found = run("-c", BLOCKS)
    # What the target computed is kept in bf16.
    assert found["worst"] < 0.03 * found["scale"] and found["judged"] < 1e-4
    # Nothing before the window or from the anchor on is seen; the window's first token is.
    assert len(found["unseen"]) == 16 and max(found["unseen"]) == 0 < min(found["seen"])


def test_anchors_are_distinct_positions_of_their_span() -> None:
    found = run("-c", ANCHORS)
    assert found["shape"] == [300, 4] and found["distinct"]
    assert found["seen"] == found["all"] == list(range(5, 12))


def test_layers_with_heads_set_at_the_start_move_slower() -> None:
    found = run("-c", RATES)
    assert len(found["slow"]) > 10 and len(found["others"]) > 10
    assert max(found["slow"]) < 2 * found["rate"] * min(found["others"])


def test_half_of_the_snippets_to_copy_are_longer_than_the_window() -> None:
    found = run("-c", COPIES)
    assert found["length"] == 1025
    longer = sum(n > found["window"] for n in found["first"]) / len(found["first"])
    assert 0.4 < longer < 0.75 and min(found["first"]) >= 1
