"""Load a checkpoint in the official layout into the PyTorch model, in release precision."""

import json
from pathlib import Path

import numpy as np
import torch
from layers import Config
from model import Model
from quant import Precision
from tokenizer import token_classes
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.checkpoint import CheckpointReader

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def read_config(path: Path) -> Config:
    return Config(**json.loads((path / "config.json").read_text())["text_config"])


def official_name(name: str, cfg: Config) -> str:
    """The checkpoint's name of a parameter of `Model` (experts: of their stack)."""
    last = cfg.num_nextn_predict_layers - 1
    for mine, theirs in (
        ("draft.stages.", "mtp."), ("draft.main_", "mtp.0.main_"),
        ("draft.norm", f"mtp.{last}.norm"),
        ("draft.markov_embed", f"mtp.{last}.markov_head.embed"),
        ("draft.markov_head", f"mtp.{last}.markov_head.head"),
        ("draft.confidence", f"mtp.{last}.confidence_head.proj"),
    ):
        if name.startswith(mine):
            name = theirs + name[len(mine):]
            break
    for sub in ("attn", "ffn"):
        name = name.replace(f"hc_{sub}.", f"hc_{sub}_")
    return name + ".weight" if name.endswith("engram.embed") else name


def read_tensor(reader: CheckpointReader, name: str) -> Tensor:
    """A tensor as fp32: fp8 and fp4 values times their scales, which is exact."""
    raw = np.array(reader.raw(name))
    scale_name = name.removesuffix(".weight") + ".scale"
    if scale_name not in reader.names() or not name.endswith(".weight"):
        return torch.from_numpy(raw.astype(np.float32))
    scale = torch.from_numpy(np.array(reader.raw(scale_name)).astype(np.float32))
    if raw.dtype == np.uint8:  # two e2m1 codes a byte, the even element in the low nibble
        codes = torch.from_numpy(raw).long()
        values = torch.stack((E2M1[codes & 15], E2M1[codes >> 4]), -1).flatten(-2)
        return values * scale.repeat_interleave(32, -1)
    values = torch.from_numpy(raw.astype(np.float32))
    rows, columns = values.shape
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(32, 0)[:rows]
    return values * scale.repeat_interleave(32, 1)[:, :columns]


def load(path: Path, precision: Precision | None = None) -> Model:
    """The model of a checkpoint directory. Every tensor of the checkpoint must be used."""
    cfg = read_config(path)
    precision = precision or Precision(weights_ready=True)
    precision.weights_ready = True
    tokens = token_classes(Tokenizer.from_file(str(path / "tokenizer.json")), cfg.vocab_size,
                           cfg.engram_pad_token_id)
    assert tokens.max() + 1 == cfg.engram_compressed_vocab_size
    model = Model(cfg, tokens, precision)
    with CheckpointReader(path) as reader, torch.no_grad():
        unused = {n for n in reader.names() if not n.startswith("image_")}
        for mine, target in model.named_parameters():
            name = official_name(mine, cfg)
            names = [name]
            if ".experts.w" in name:
                stem, matrix = name.rsplit(".", 1)
                names = [f"{stem}.{e}.{matrix}.weight" for e in range(target.shape[0])]
            values = [read_tensor(reader, n) for n in names]
            target.copy_(torch.stack(values) if ".experts.w" in name else values[0])
            unused -= {*names, *(n.removesuffix(".weight") + ".scale" for n in names)}
    if unused:
        raise ValueError(f"{len(unused)} tensors of {path} are not read: {sorted(unused)[:5]}")
    return model.eval()
