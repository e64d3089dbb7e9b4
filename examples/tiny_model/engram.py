"""Engram: hashed n-gram memory added to the streams. Source: spec §2.10."""

import numpy as np
import torch
from layers import Config, Linear8, parameter
from quant import Precision, fp8
from torch import Tensor, nn


def column_primes(cfg: Config) -> list[list[list[int]]]:
    """Rows of each hash column, [layer][n-gram size - 2][head]; no prime is used twice."""
    seen: set[int] = set()
    layers = []
    for _ in cfg.engram_layer_ids:
        sizes = []
        for _ in range(2, cfg.engram_max_ngram_size + 1):
            heads, current = [], cfg.engram_vocab_size - 1
            for _ in range(cfg.engram_n_heads):
                current += 1
                while current in seen or not is_prime(current):
                    current += 1
                seen.add(current)
                heads.append(current)
            sizes.append(heads)
        layers.append(sizes)
    return layers


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def multipliers(layer: int, classes: int, count: int) -> list[int]:
    bound = max(1, (2**63 - 1) // classes // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=count, dtype=np.int64)
    return [2 * int(draw) + 1 for draw in draws]


class NgramHash:
    """Table rows of every token for one Engram layer."""

    def __init__(self, cfg: Config, which: int, token_map: np.ndarray) -> None:
        self.primes = column_primes(cfg)[which]
        self.multipliers = multipliers(cfg.engram_layer_ids[which],
                                       cfg.engram_compressed_vocab_size, cfg.engram_max_ngram_size)
        self.token_map = token_map.astype(np.int64)
        self.pad = int(self.token_map[cfg.engram_pad_token_id])

    def __call__(self, ids: np.ndarray, image: np.ndarray | None = None) -> np.ndarray:
        """ids [B, T] from the start of a text -> rows int64 [B, T, columns]."""
        classes = self.token_map[ids]
        image = np.zeros(ids.shape, bool) if image is None else image
        blocked = np.zeros(ids.shape, bool)
        mixed, columns, offset = np.zeros(ids.shape, np.int64), [], 0
        for back, multiplier in enumerate(self.multipliers):
            shifted = np.roll(classes, back, axis=1)
            outside = np.roll(image, back, axis=1)
            outside[:, :back] = True
            blocked = blocked | outside
            mixed = mixed ^ (np.where(blocked, self.pad, shifted) * multiplier)
            for prime in self.primes[back - 1] if back else ():
                columns.append(mixed % prime + offset)
                offset += prime
        return np.stack(columns, -1)


class Engram(nn.Module):
    def __init__(self, cfg: Config, which: int, precision: Precision) -> None:
        super().__init__()
        self.cfg, self.precision = cfg, precision
        rows = sum(map(sum, column_primes(cfg)[which]))
        columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
        self.embed = parameter(rows, cfg.engram_head_dim)
        self.wkv = Linear8(columns * cfg.engram_head_dim, (cfg.hc_mult + 1) * cfg.hidden_size,
                           precision)
        self.q_weight = nn.Parameter(torch.ones(cfg.hc_mult, cfg.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(cfg.hc_mult, cfg.hidden_size))

    def forward(self, streams: Tensor, rows: Tensor, image: Tensor | None) -> Tensor:
        """streams [B, T, hc, d], rows [B, T, columns] -> streams with the gated value added."""
        cfg, eps = self.cfg, self.cfg.rms_norm_eps
        found = nn.functional.embedding(rows, self.embed)
        if self.precision.quantize and not self.precision.weights_ready:
            found = fp8(found)  # the table is stored as fp8 with one scale per 32 of a row
        kv = self.wkv(self.precision.round(found).flatten(-2))
        key, value = kv.split((cfg.hc_mult * cfg.hidden_size, cfg.hidden_size), -1)
        key = key.unflatten(-1, (cfg.hc_mult, cfg.hidden_size))
        weight = self.precision.round(self.q_weight) * self.precision.round(self.k_weight)
        by = self.precision.arithmetic
        dot = by.sum(streams * weight * key)
        dot = dot * by.rsqrt(by.mean(streams.square()) + eps)
        dot = dot * by.rsqrt(by.mean(key.square()) + eps) * cfg.hidden_size**-0.5
        gate = by.sigmoid(torch.copysign(by.sqrt(dot.abs().clamp_min(1e-6)), dot))
        if image is not None:
            gate = gate.masked_fill(image.unsqueeze(-1), 0)
        return self.precision.round(streams + gate.unsqueeze(-1) * value.unsqueeze(-2))
