"""Write a trained model in the official checkpoint layout: fp8 tiles, MXFP4 experts, fp32 mixes."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from config import config_json
from layers import Linear8
from load import official_name
from model import Model
from quant import fp4_parts, fp8_parts, fp8_tile_parts
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.checkpoint import write_checkpoint

MAX_BYTES = 12_000_000
Arrays = dict[str, np.ndarray]


def quantised_names(model: Model) -> set[str]:
    """Parameters that are stored as fp8 tiles."""
    return {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Linear8)}


def e4m3(values: Tensor) -> np.ndarray:
    return values.numpy().astype(ml_dtypes.float8_e4m3fn)


def ue8m0(scale: Tensor) -> np.ndarray:
    return scale.numpy().astype(ml_dtypes.float8_e8m0fnu)


def pack_e2m1(values: Tensor) -> np.ndarray:
    """Values on the e2m1 grid -> two codes a byte, the even element in the low nibble, as I8."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.searchsorted(grid, values.abs()) | (values.signbit().long() << 3)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.numpy().astype(np.uint8).view(np.int8)


@torch.no_grad()
def tensors(model: Model) -> Arrays:
    """Every tensor of the checkpoint by its official name."""
    result: Arrays = {}
    tiles = quantised_names(model)
    for mine, p in model.named_parameters():
        name, value = official_name(mine, model.cfg), p.detach()
        if ".experts.w" in name:
            stem, matrix = name.rsplit(".", 1)
            for e, expert in enumerate(value):
                codes, scale = fp4_parts(expert)
                result[f"{stem}.{e}.{matrix}.weight"] = pack_e2m1(codes.view(expert.shape))
                result[f"{stem}.{e}.{matrix}.scale"] = ue8m0(scale.squeeze(-1))
        elif mine in tiles:
            codes, scale = fp8_tile_parts(value)
            result[name] = e4m3(codes)
            result[name.removesuffix(".weight") + ".scale"] = ue8m0(scale)
        elif mine.endswith("engram.embed"):
            codes, scale = fp8_parts(value)
            result[name] = e4m3(codes.view(value.shape))
            result[name.removesuffix(".weight") + ".scale"] = ue8m0(scale.squeeze(-1))
        elif any(part in mine for part in ("hc_attn", "hc_ffn", "attn_sink", "gate.bias")):
            result[name] = value.numpy().astype(np.float32)
        else:
            result[name] = value.numpy().astype(ml_dtypes.bfloat16)
    for name in ("image_start", "image_end", "image_newline"):  # of the layout; no image is read
        result[name] = np.zeros(model.cfg.hidden_size, ml_dtypes.bfloat16)
    return result


def export(model: Model, tokenizer: Tokenizer, out: Path, temperatures: list[float]) -> int:
    """Write the checkpoint directory; its bytes.

    Args:
        temperatures: of the draft's confidences, one per draft position (spec §5.5, STS).

    Raises:
        ValueError: the directory came out larger than ships as package data.
    """
    write_checkpoint(out, tensors(model))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": True,
                  "temperature": 1.0, "top_p": 1.0,
                  "dspark_confidence_temperatures": [round(t, 4) for t in temperatures]}
    for name, value in (("config.json", config_json(model.cfg)),
                        ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    size = sum(f.stat().st_size for f in out.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{out} has {size} bytes, more than the {MAX_BYTES} that may ship")
    return size
