"""ModelConfig: the release's values and layer roles, the official layout, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.compiler import read_config
from deepinfer.errors import CheckpointError
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.make_model import tiny_config


def official(**text: Any) -> dict[str, Any]:
    """The tiny model's config.json with some text fields replaced; None removes one."""
    root = copy.deepcopy(tiny_config().to_json())
    for field, value in text.items():
        if value is None:
            del root["text_config"][field]
        else:
            root["text_config"][field] = value
    return root


def edited(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    root = official()
    edit(root)
    return root


def test_release_values() -> None:
    cfg = ModelConfig.release()
    assert (cfg.hidden_size, cfg.num_hidden_layers, cfg.rms_norm_eps) == (5120, 40, 1e-20)
    assert (cfg.replay_cut, cfg.replay_keep, cfg.n_stages) == (20, 140, 3)
    assert (cfg.hc_mixes, cfg.engram_columns) == (24, 24)
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.pad_token_id) == (0, (1,), 2)
    assert cfg.vision is not None and cfg.vision.num_hidden_layers == 32


def test_release_layer_roles() -> None:
    """The table of spec §1.2, row by row."""
    layers = ModelConfig.release().layers
    assert [s.kv_source for s in layers] == ([None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20)
    assert [s.index_source for s in layers] == (
        [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4
        + [32] * 4 + [36] * 4
    )  # fmt: skip
    assert [s.index for s in layers if s.is_kv_source] == [2, 8, 14, 20]
    assert [s.index for s in layers if s.is_index_source] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [s.index for s in layers if s.candidates == "source"] == [20]
    assert [s.index for s in layers if s.candidates == "within"] == [24, 28, 32, 36]
    assert {s.index: s.engram for s in layers if s.engram is not None} == {1: 0, 14: 1}
    assert {s.index: s.tap for s in layers if s.is_tap} == {37: 0, 38: 1, 39: 2}
    assert [s.ratio for s in layers] == [0, 0] + [2] * 18 + [1] * 20


def test_rope_depends_on_the_ratio() -> None:
    cfg = ModelConfig.release()
    assert (cfg.layer(1).rope_base, cfg.layer(1).yarn) == (10000.0, None)
    assert (cfg.layer(2).rope_base, cfg.layer(2).yarn) == (160000.0, cfg.rope_scaling)
    assert [(s.index, s.ratio, s.rope_base, s.yarn) for s in cfg.stages] == [
        (40 + i, 0, 10000.0, None) for i in range(3)
    ]


def test_tiny_cut_is_the_middle() -> None:
    cfg = tiny_config()
    assert (cfg.replay_cut, cfg.num_hidden_layers, cfg.replay_keep) == (6, 12, 20)


@pytest.mark.parametrize("cfg", [ModelConfig.release(), tiny_config()], ids=["release", "tiny"])
def test_official_layout_round_trips(cfg: ModelConfig) -> None:
    text = json.dumps(cfg.to_json())
    assert ModelConfig.from_json(json.loads(text)) == cfg
    assert json.dumps(ModelConfig.from_json(json.loads(text)).to_json()) == text


@pytest.mark.parametrize(
    "text",
    [
        {"sliding_window": 5},
        {"sliding_window": 1},
        {"index_topk": 17},  # more than the candidates hold: spec §11.3 accepts it
        {"index_topk": 1, "num_experts_per_tok": 1},
        {"candidate_source_layer_id": None},
        {"candidate_source_layer_id": 8},
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {"rope_scaling": {"rope_type": "yarn", **{
            "factor": 2, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 8}}},
        {"num_hidden_layers": 11, "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
         "dspark_target_layer_ids": [6, 10]},
        {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]},
        {"compress_ratios": [0, 0, 2, 0, 1, 1, 2, 2, 0, 2, 2, 2, 0, 0, 0],
         "index_source_layer_ids": [2, 4, 6, 10]},
        {"num_hash_layers": 0, "attention_bias": False, "attention_dropout": 0.0, "gate_temp": 1.0},
        {"initializer_range": 0.02, "use_cache": True, "bos_token_id": 0, "dtype": "bfloat16"},
        {"index_k_source_layer_ids": [2, 4, 6], "hc_shifted": True},
    ],
    ids=str,
)  # fmt: skip
def test_legal_variants_are_accepted(text: dict[str, Any]) -> None:
    cfg = ModelConfig.from_json(official(**text))
    assert ModelConfig.from_json(cfg.to_json()) == cfg


def test_no_rope_scaling_means_no_yarn() -> None:
    root = edited(lambda root: root["text_config"].update(rope_scaling=None))
    assert ModelConfig.from_json(root).layer(2).yarn is None


def test_parts_that_are_off_leave_no_roles() -> None:
    off = tiny_config(candidate_source_layer_id=None, engram_layer_ids=(), engram_num_embeddings=())
    assert {s.candidates for s in off.layers} == {"none"}
    assert {s.engram for s in off.layers} == {None}
    drafts = tiny_config(num_nextn_predict_layers=0, compress_ratios=off.compress_ratios[:12])
    assert not any(s.is_tap for s in drafts.layers) and drafts.stages == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"num_hash_layers": 3}, "num_hash_layers is 3; supported: 0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; supported: False"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; supported: False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported: 'sqrtsoftplus'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; supported: 'noaux_tc'"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"hc_shifted": False}, "hc_shifted is False; supported: True"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; supported: True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; supported: 1"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; supported: 1"),
        ({"gate_temp": 2.0}, "gate_temp is 2.0; supported: 1.0"),
        ({"dtype": "float16"}, "dtype is 'float16'; supported: 'bfloat16'"),
        ({"n_group": 8}, "n_group is 8; supported: no such field"),
        ({"index_k_source_layer_ids": [2]}, r"index_k_source_layer_ids is \[2\]; supported"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling type is 'linear'"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling type is None; supported: 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "beta_fast is missing"),
        ({"rope_scaling": {"type": "yarn", "mscale": 1}}, "mscale is 1; supported: no such"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"dspark_block_size": None}, "dspark_block_size is missing"),
        ({"engram_n_heads": None}, "engram_n_heads is missing"),
        ({"hidden_size": "128"}, "hidden_size is '128'; supported: 'an integer'"),
        ({"hidden_size": 128.5}, "hidden_size is 128.5; supported: 'an integer'"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; supported: 'a number'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; supported: 'a number'"),
        ({"compress_ratios": 2}, "compress_ratios is 2; supported: 'a list of integers'"),
        ({"compress_ratios": [0, 0, 4]}, r"compress_ratios is \[0, 0, 4\]; expected 15 entries"),
        ({"hidden_size": 100}, "hidden_size is 100; expected a multiple of 32"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size is 48; expected a multiple of 32"),
        ({"sliding_window": 0}, "sliding_window is 0; expected more than 0"),
        ({"o_groups": 3}, "o_groups is 3; expected a divisor of num_attention_heads 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most .* 8"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; expected an even number up to 32"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64; expected an even number up to 32"),
        ({"kv_source_layer_ids": [4, 2, 6]}, r"kv_source_layer_ids is \[4, 2, 6\]; .*ascending"),
        ({"kv_source_layer_ids": []}, r"kv_source_layer_ids is \[\]; expected at least one"),
        ({"kv_source_layer_ids": [1, 2, 4, 6]}, "only layers whose ratio is 1 or 2"),
        ({"kv_source_layer_ids": [4, 6]}, "a source of ratio 2 at or before layer 2"),
        ({"kv_source_layer_ids": [2, 4]}, "a source of ratio 1 at or before layer 6"),
        ({"index_source_layer_ids": [2, 6, 8]}, r"index_source_layer_ids .*\[2, 4, 6\]"),
        ({"index_source_layer_ids": [2, 4, 6, 12]}, "layer numbers from 0 to 11"),
        ({"candidate_source_layer_id": 4}, r"candidate_source_layer_id is 4; .*\[6, 8, 10\]"),
        ({"candidate_source_layer_id": 7}, r"candidate_source_layer_id is 7; .*\[6, 8, 10\]"),
        ({"engram_layer_ids": [1, 12]}, "engram_layer_ids .*from 0 to 11"),
        ({"engram_layer_ids": [1]}, r"engram_num_embeddings is \[660, 864\]; expected \[660\]"),
        ({"engram_num_embeddings": [660, 865]}, r"engram_num_embeddings .*expected \[660, 864\]"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size is 1; expected 2 or more"),
        ({"engram_pad_token_id": 512}, "engram_pad_token_id is 512; .*below vocab_size 512"),
        ({"dspark_target_layer_ids": [5, 12]}, "dspark_target_layer_ids .*from 0 to 11"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids .*at least one"),
        ({"dspark_noise_token_id": 512}, "dspark_noise_token_id is 512"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok is 5"),
    ],
    ids=str,
)
def test_refusals_name_field_actual_and_supported(text: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_json(official(**text), where="some/config.json")
    assert "some/config.json" in caught.value.where and caught.value.next


@pytest.mark.parametrize(
    ("layer", "ratio", "expected"), [(3, 4, "0, 1 or 2"), (5, 128, "0, 1 or 2"), (13, 1, "stage")]
)
def test_ratio_that_is_not_supported(layer: int, ratio: int, expected: str) -> None:
    ratios = list(tiny_config().compress_ratios)
    ratios[layer] = ratio
    with pytest.raises(
        CheckpointError, match=rf"compress_ratios\[{layer}\] is {ratio}; .*{expected}"
    ):
        ModelConfig.from_json(official(compress_ratios=ratios))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.update(model_type="deepseek_v4"), "model_type is 'deepseek_v4'; supported"),
        (lambda r: r.pop("model_type"), "model_type is None; supported: 'deepseek_v41'"),
        (lambda r: r.pop("text_config"), "text_config is 'missing'"),
        (lambda r: r.pop("quantization_config"), "quantization_config is 'missing'"),
        (lambda r: r.update(sliding_window=4), "sliding_window is 4; supported: no such field"),
        (lambda r: r["quantization_config"].update(weight_block_size=[128, 128]),
         r"weight_block_size is \[128, 128\]; supported: \[32, 32\]"),
        (lambda r: r["quantization_config"].pop("scale_fmt"), "scale_fmt is None"),
        (lambda r: r["quantization_config"].update(expert_dtype="fp8"), "expert_dtype is 'fp8'"),
        (lambda r: r["quantization_config"].update(quant_method="awq"), "quant_method is 'awq'"),
        (lambda r: r.update(eos_token_id=600), "eos_token_id is 600; .*below vocab_size 512"),
        (lambda r: r.update(eos_token_id="x"), "eos_token_id"),
    ],
)  # fmt: skip
def test_root_refusals(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_json(edited(edit))


@pytest.mark.parametrize(("field", "value", "expected"), [
    *((field, 10**400, "a number" if field in ("rms_norm_eps", "rope_theta") else "an integer")
      for field in ("vocab_size", "rms_norm_eps", "rope_theta", "index_topk")),
    ("vocab_size", 2**31, "at most 2147483647"),
    ("max_position_embeddings", 10**12, "at most 2147483647"),
    # Constants of the kernels: in float32 these would be 0, denormal or infinite.
    ("rms_norm_eps", 1e-46, "a normal float32 number"),
    ("hc_eps", 1e-40, "a normal float32 number"),
    ("swiglu_limit", 1e39, "a normal float32 number"),
    ("routed_scaling_factor", 1e39, "a normal float32 number"),
    ("rope_theta", 1.0, "more than 1"), ("compress_rope_theta", 0.5, "more than 1"),
], ids=lambda value: str(value)[:20])
def test_numbers_that_no_kernel_could_hold(field: str, value: float, expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{field} is [0-9].*{expected}"):
        ModelConfig.from_json(official(**{field: value}))


def test_the_release_is_within_those_bounds() -> None:
    assert 1e-20 == ModelConfig.release().rms_norm_eps == tiny_config().rms_norm_eps


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(CheckpointError, match="sliding_window is -1"):
        dataclasses.replace(tiny_config(), sliding_window=-1)


def test_from_dir_prefers_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(official()), encoding="utf-8")
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (1,)
    generation = {"eos_token_id": [1, 5], "temperature": 0.6, "pad_token_id": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    cfg = ModelConfig.from_dir(tmp_path)
    assert (cfg.eos_token_ids, cfg.pad_token_id) == ((1, 5), 2)
    assert ModelConfig.from_json(cfg.to_json()) == cfg


def test_from_dir_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="config.json is not JSON"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds a list, expected an object"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, "{}".encode("utf-16"),
    b'{"model_type": ' + b"9" * 5000 + b"}",
], ids=range(8))
def test_a_file_that_holds_no_object(content: bytes, tmp_path: Path) -> None:
    """Named by its directory or by itself, and generation_config.json alike."""
    (tmp_path / "config.json").write_bytes(content)
    for model in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CheckpointError, match="config.json (is not JSON|holds a)"):
            read_config(model)
    (tmp_path / "config.json").write_text(json.dumps(official()), encoding="utf-8")
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="generation_config.json (is not JSON|holds a)"):
        read_config(tmp_path)
