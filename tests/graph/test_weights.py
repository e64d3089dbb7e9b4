"""The weight table against the published tensor counts and bytes, and its own rules."""

from __future__ import annotations

import dataclasses
from collections import Counter
from math import prod

import pytest

from deepinfer.graph.config import ModelConfig
from deepinfer.graph.make_model import tiny_config
from deepinfer.graph.weights import (
    NO_IMAGES,
    NO_IMAGES_IN_DRAFTS,
    WeightDecl,
    checkpoint_tensors,
    weight_table,
)

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@pytest.fixture(scope="module")
def release() -> tuple[WeightDecl, ...]:
    return weight_table(ModelConfig.release())


def by_value(table: tuple[WeightDecl, ...], value: str) -> WeightDecl:
    return next(decl for decl in table if decl.value == value)


def test_release_totals_close_exactly() -> None:
    tensors = list(checkpoint_tensors(ModelConfig.release()))
    assert len(tensors) == 96_085
    assert sum(prod(shape) * ITEM_BYTES[tag] for _, tag, shape in tensors) == 510_286_023_000
    tops = Counter(name.split(".")[0] for name, _, _ in tensors)
    assert (tops.pop("layers"), tops.pop("mtp")) == (93_415, 2_401)
    assert (tops.pop("vision"), tops.pop("aligner")) == (259, 4)
    assert sum(tops.values()) == 6


def test_every_name_has_one_declaration(release: tuple[WeightDecl, ...]) -> None:
    claims = Counter(name for decl in release for name in decl.tensors)
    assert set(claims.values()) == {1}
    assert len({decl.value for decl in release}) == len(release)


def test_plain_layer_has_2334_tensors(release: tuple[WeightDecl, ...]) -> None:
    plain = [name for decl in release for name in decl.tensors if name.startswith("layers.3.")]
    assert len(plain) == 2334


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ("layers.0.hc_attn_fn", "f32", (24, 20480)),
        ("layers.0.attn.wq_a.scale", "ue8m0", (40, 160)),
        ("layers.0.attn.wo_a.weight", "e4m3", (8192, 4096)),
        ("layers.2.attn.compressor.wgate.weight", "bf16", (512, 5120)),
        ("layers.24.attn.indexer.wq_b.scale", "ue8m0", (128, 40)),
        ("layers.20.attn.indexer.wk.weight", "bf16", (128, 512)),
        ("layers.14.engram.embed.scale", "ue8m0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "e4m3", (25600, 6144)),
        ("layers.39.ffn.shared_experts.w2.scale", "ue8m0", (160, 72)),
        ("mtp.0.main_proj.weight", "e4m3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "bf16", (1, 5376)),
        ("aligner.w1.weight", "bf16", (5120, 9216)),
    ],
)
def test_shapes_are_those_of_the_ledger(
    release: tuple[WeightDecl, ...], value: str, dtype: str, shape: tuple[int, ...]
) -> None:
    decl = by_value(release, value)
    assert (decl.dtype, decl.shape, decl.tensors) == (dtype, shape, (value,))


def test_experts_are_one_stacked_value(release: tuple[WeightDecl, ...]) -> None:
    decl = by_value(release, "layers.3.ffn.experts.w2.weight")
    assert decl.tensors[:2] == tuple(f"layers.3.ffn.experts.{e}.w2.weight" for e in (0, 1))
    assert (decl.dtype, decl.shape, decl.tensor_shape) == ("e2m1", (384, 5120, 2304), (5120, 1152))
    scale = by_value(release, "mtp.1.ffn.experts.w1.scale")
    assert (scale.shape, scale.tensor_shape) == ((128, 2304, 160), (2304, 160))


def test_sources_alone_hold_compressors_and_indexers(release: tuple[WeightDecl, ...]) -> None:
    def layers_with(part: str) -> set[int]:
        return {int(d.value.split(".")[1]) for d in release if f".{part}" in d.value}

    assert layers_with("compressor.wkv") == layers_with("indexer.wk.") == {2, 8, 14, 20}
    assert layers_with("compressor.wgate") == {2, 8, 14}
    assert layers_with("indexer.wq_b") == {2, 8, 14, 20, 24, 28, 32, 36}
    assert layers_with("engram.") == {1, 14}


def test_unused_tensors_say_why(release: tuple[WeightDecl, ...]) -> None:
    unused = {decl.value: decl.reason for decl in release if not decl.used}
    assert all(unused.values()) and not any(decl.reason for decl in release if decl.used)
    assert unused["vision.norm.weight"] == unused["image_start"] == NO_IMAGES
    assert unused["mtp.2.ffn.gate.bias_vl"] == NO_IMAGES_IN_DRAFTS
    kinds = {value.split(".")[0] for value in unused}
    assert kinds == {"vision", "aligner", "image_start", "image_end", "image_newline", "mtp"}
    drafts = {value for value in unused if value.startswith("mtp.")}
    assert drafts == {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}


def test_without_vision_image_vectors_are_optional() -> None:
    table = weight_table(dataclasses.replace(ModelConfig.release(), vision=None))
    assert not any(decl.value.startswith(("vision.", "aligner.")) for decl in table)
    optional = {decl.value for decl in table if decl.optional}
    assert optional == {"image_start", "image_end", "image_newline"}


def test_tiny_has_every_kind_of_weight(release: tuple[WeightDecl, ...]) -> None:
    def kinds(table: tuple[WeightDecl, ...]) -> set[str]:
        return {
            ".".join("#" if part.isdigit() else part for part in decl.value.split("."))
            for decl in table
            if not decl.value.startswith(("vision.", "aligner."))
        }

    assert kinds(weight_table(tiny_config())) == kinds(release)
