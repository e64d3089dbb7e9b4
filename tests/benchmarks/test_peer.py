"""The PyTorch peer: its caches change nothing, and it computes what the Program computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peer import Peer, load_peer  # noqa: E402
from quant import Precision  # noqa: E402

from deepinfer.graph.make_model import make_model  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_model("tiny", path, seed=0)
    return path


@pytest.fixture(scope="module")
def exact(tiny: Path):
    """fp32 without quantisers: cached and whole texts differ by the order of sums alone."""
    return load_peer(tiny, precision=Precision(bf16=False, tiled=False, quantize=False))


class Ordered(Peer):
    """Equal scores, which a relu makes common: the lower index first, as the module has it."""

    @staticmethod
    def best(scores, count):
        found = scores.sort(dim=-1, descending=True, stable=True)
        return found.values[..., :count], found.indices[..., :count]


# 24 tokens fill three blocks of the window of 8; 11 do not; 5 fit in one.
@pytest.mark.parametrize("prompt, length", [(24, 41), (11, 16), (5, 12)])
def test_cached_steps_equal_the_module_on_the_whole_text(exact, prompt, length):
    ids = np.random.default_rng(1).integers(3, 500, (2, length))
    peer = Ordered(exact, 48)
    steps = [peer.prefill(ids[:, :prompt])]
    steps += [peer.decode(ids[:, i]) for i in range(prompt, length)]
    with torch.no_grad():
        whole = exact.logits(exact(torch.from_numpy(ids))[0])[:, prompt - 1:]
    got = torch.stack(steps, 1)
    assert got.shape == whole.shape
    assert (got - whole).abs().max() < 1e-3 * whole.abs().max()


def test_a_second_text_starts_afresh(exact):
    ids = np.random.default_rng(2).integers(3, 500, (1, 12))
    peer = Peer(exact, 48)
    first = peer.prefill(ids)
    peer.decode([7])
    assert torch.equal(peer.prefill(ids), first)


def test_plain_precision_is_bf16_throughout_but_for_the_mixes(tiny):
    model = load_peer(tiny)
    kinds = {(".hc_" in name, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    logits = Peer(model, 48).prefill([[5, 6, 7, 8, 9]])
    assert logits.dtype is torch.bfloat16 and logits.isfinite().all()
