"""Reading and writing config.json in the official layout, refusing by name what is not supported.

Source: spec §1.1; the further keys that the production loader knows are in §0.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer.graph.config import ModelConfig

Json = Mapping[str, Any]

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Bookkeeping of the transformers library: no effect on the arithmetic.
_HARMLESS = frozenset(
    "architectures transformers_version initializer_range use_cache _name_or_path auto_map "
    "output_attentions output_hidden_states output_router_logits return_dict "
    "chunk_size_feed_forward is_encoder_decoder problem_type id2label label2id pretraining_tp "
    "router_aux_loss_coef aux_loss_alpha seq_aux".split()
) | frozenset(TOKEN_IDS)
# Fields with one supported value; absent means that value.
_FIXED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "gate_temp": 1.0,
    "num_hash_layers": 0,
    "hc_shifted": True,
    "dspark_target_attn_input": True,
    "use_fp4_sparse_kv": True,
    "tokenizer_compatibility": "release",
    "expert_dtype": "fp4",
}
_FIXED_ROOT: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
}
_SECTIONS = ("text_config", "quantization_config", "vision_config", "image_token_id")
_QUANT: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "expert_dtype": "fp4",
    "fmt": "e4m3",
}
# Absent, these do not mean the official value.
_QUANT_REQUIRED = ("quant_method", "weight_block_size", "scale_fmt")
_WRITTEN_TEXT = (
    "num_key_value_heads hidden_act tie_word_embeddings n_shared_experts scoring_func topk_method "
    "norm_topk_prob"
).split()
# A field that switches a part on makes the fields of that part required: prefix, "off" value.
_SWITCHES: dict[str, tuple[str, Any]] = {
    "candidate_source_layer_id": ("candidate_", None),
    "engram_layer_ids": ("engram_", []),
    "num_nextn_predict_layers": ("dspark_", 0),
}
_ROOT_FIELDS = ("vision", "image_token_id", "bos_token_id", "eos_token_ids", "pad_token_id")


def load(file: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file.name} cannot be read: {error.strerror}",
            where=str(file),
            next="give the directory of a checkpoint in the official layout",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file.name} is not JSON: {error}", where=str(file), next="copy the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file.name} holds a {type(value).__name__}, expected an object",
            where=str(file),
            next="copy the file again from the published checkpoint",
        )
    return value


def refuse(field: str, actual: object, supported: object, where: str) -> CheckpointError:
    """The error for a field whose value is not supported."""
    return CheckpointError(
        f"{field} is {actual!r}; supported: {supported!r}",
        where=where,
        next="only checkpoints of the DeepSeek-V4.1-Flash architecture can be used",
    )


def section(root: Json, name: str, where: str, optional: bool = False) -> Any:
    """The nested object `name` of config.json, or None if it may be absent and is."""
    value = root.get(name)
    if value is None and optional:
        return None
    if not isinstance(value, Mapping):
        shown = type(value).__name__ if name in root else "missing"
        raise refuse(name, shown, "a nested object", where)
    return value


def check_root(root: Json, where: str) -> None:
    """Refuse another architecture, unknown root fields and another quantisation."""
    if "model_type" not in root:
        raise refuse("model_type", None, _FIXED_ROOT["model_type"], where)
    _check_fields(root, _FIXED_ROOT, _HARMLESS.union(_SECTIONS), where)
    quant = section(root, "quantization_config", where)
    where = f"{where}, quantization_config"
    for field in _QUANT_REQUIRED:
        if field not in quant:
            raise refuse(field, None, _QUANT[field], where)
    _check_fields(quant, _QUANT, frozenset(), where)


def check_text(text: Json, cls: type[ModelConfig], where: str) -> None:
    """Refuse unknown text fields and unsupported values; see that switched parts are complete."""
    where = f"{where}, text_config"
    known = {field.name for field in dataclasses.fields(cls)} - set(_ROOT_FIELDS)
    if text.get("index_k_source_layer_ids") not in (None, text.get("kv_source_layer_ids")):
        raise refuse(
            "index_k_source_layer_ids",
            text["index_k_source_layer_ids"],
            text.get("kv_source_layer_ids"),
            where,
        )
    allowed = known | _HARMLESS | {"index_k_source_layer_ids"}
    _check_fields(text, _FIXED_TEXT, allowed, where)
    for switch, (prefix, off) in _SWITCHES.items():
        if text.get(switch, off) in (None, off):
            continue
        for field in sorted(known):
            if field.startswith(prefix) and field not in text:
                raise _missing(field, where)


def _check_fields(
    values: Json, fixed: Json, allowed: frozenset[str] | set[str], where: str
) -> None:
    for field, actual in values.items():
        if field in fixed:
            # bool is an int in Python: 1 must not pass for true.
            same_kind = isinstance(actual, bool) == isinstance(fixed[field], bool)
            if actual is not None and not (same_kind and actual == fixed[field]):
                raise refuse(field, actual, fixed[field], where)
        elif field not in allowed:
            raise CheckpointError(
                f"{field} is {actual!r}; supported: no such field",
                where=where,
                next="an unknown field may change the arithmetic; check which model this is",
            )


def _missing(field: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{field} is missing", where=where, next=f"add {field} as published with the model"
    )


def read_fields(cls: type[Any], values: Json, where: str) -> dict[str, Any]:
    """The fields of dataclass `cls` that `values` holds, converted to the declared types."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in _ROOT_FIELDS:
            continue
        if field.name in values:
            result[field.name] = _convert(field.name, str(field.type), values[field.name], where)
        elif field.default is dataclasses.MISSING and field.name != "rope_scaling":
            raise _missing(field.name, where)
    return result


def _convert(field: str, kind: str, value: Any, where: str) -> Any:
    if value is None and kind.endswith("| None"):
        return None
    # The comparison is exact for ints, of any size, and false for NaN.
    number = isinstance(value, int | float) and not isinstance(value, bool) and (
        abs(value) <= sys.float_info.max)
    if kind.startswith("tuple"):
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
    elif kind.startswith("float"):
        if number:
            return float(value)
    elif kind.startswith("int"):
        if number and value == int(value):
            return int(value)
    elif isinstance(value, Mapping):
        return value
    wanted = {"tuple": "a list of integers", "float": "a number", "int": "an integer"}
    expected = next((text for key, text in wanted.items() if kind.startswith(key)), "an object")
    raise refuse(field, value, expected, where)


def read_yarn(cls: type[Any], scaling: Json, where: str) -> dict[str, Any]:
    """The fields of `rope_scaling`; its type is spelled `type` or `rope_type`."""
    where = f"{where}, rope_scaling"
    types = [scaling[key] for key in ("type", "rope_type") if key in scaling]
    for kind in types or [None]:
        if kind != "yarn":
            raise refuse("rope_scaling type", kind, "yarn", where)
    known = frozenset(field.name for field in dataclasses.fields(cls))
    _check_fields(scaling, {"type": "yarn", "rope_type": "yarn"}, known, where)
    return read_fields(cls, scaling, where)


def read_token_ids(root: Json, text: Json, where: str) -> dict[str, Any]:
    """bos, eos and pad ids (root first, then text_config) and the image token's id."""
    values: dict[str, Any] = {}
    for field in ("image_token_id", *TOKEN_IDS):
        value = root.get(field)
        value = text.get(field) if value is None else value
        if field == "eos_token_id":
            ids = value if isinstance(value, list) else [] if value is None else [value]
            values["eos_token_ids"] = _convert(field, "tuple", ids, where)
        else:
            values[field] = _convert(field, "int | None", value, where)
    return values


def write(cfg: ModelConfig) -> dict[str, Any]:
    """`cfg` as a config.json object."""
    plain = dataclasses.asdict(cfg)
    root: dict[str, Any] = {"architectures": ["DeepseekV41ForCausalLM"], **_FIXED_ROOT}
    del root["torch_dtype"], root["tie_word_embeddings"], root["expert_dtype"]
    for field in ("image_token_id", "bos_token_id", "pad_token_id"):
        if plain[field] is not None:
            root[field] = plain[field]
    eos = list(plain["eos_token_ids"])
    if eos:
        root["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    root["quantization_config"] = {key: _QUANT[key] for key in _QUANT if key != "fmt"}
    text = {"model_type": _FIXED_TEXT["model_type"]}
    text |= {key: _FIXED_TEXT[key] for key in _WRITTEN_TEXT}
    for field, value in plain.items():
        if field not in _ROOT_FIELDS:
            text[field] = list(value) if isinstance(value, tuple) else value
    if text["rope_scaling"] is not None:
        text["rope_scaling"] = {"type": "yarn", **text["rope_scaling"]}
    root["text_config"] = text
    if plain["vision"] is not None:
        root["vision_config"] = {"model_type": "deepseek_v41_vision", **plain["vision"]}
    return root
