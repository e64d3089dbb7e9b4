"""Random checkpoints: closed against the weight table, reproducible, with the intended spread."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer.checkpoint import CheckpointReader, check_closed, check_weight_scales
from deepinfer.checkpoint.token_map import token_map_for
from deepinfer.errors import CheckpointError
from deepinfer.graph.byte_tokenizer import BOS, EOS, MIN_VOCAB, PAD, byte_level_tokenizer
from deepinfer.graph.config import ModelConfig
from deepinfer.graph.derived import map_sizes, weight_sources
from deepinfer.graph.make_model import make_model, mini_config, tiny_config, write_random_model
from deepinfer.graph.random_weights import random_tensor
from deepinfer.graph.weights import SAFETENSORS_TAG, checkpoint_tensors, weight_table
from deepinfer.ir.types import E2M1, Kind, TensorType, Value
from deepinfer.runtime.weights import load_weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_model("tiny", path, seed=7)
    return path


def test_tiny_reads_back_complete(tiny: Path) -> None:
    cfg = ModelConfig.from_dir(tiny)
    assert cfg == tiny_config()
    assert token_map_for(tiny, **map_sizes(cfg)).shape == (512,)
    table = weight_table(cfg)
    with CheckpointReader(tiny) as reader:
        check_closed(
            reader,
            [name for decl in table if decl.used for name in decl.tensors],
            [name for decl in table if not decl.used for name in decl.tensors],
        )
        for decl in table:
            for name in decl.tensors:
                reader.require(name, SAFETENSORS_TAG[decl.dtype], decl.tensor_shape)
    size = sum(file.stat().st_size for file in tiny.glob("*.safetensors"))
    assert 4e6 < size < 6e6


def test_every_scale_passes_the_checkpoint_check(tiny: Path) -> None:
    checked = 0
    with CheckpointReader(tiny) as reader:
        for name in reader.names():
            if not name.endswith(".scale"):
                continue
            weight = reader.raw(name.replace(".scale", ".weight"))
            tile = (1, 32) if ".experts." in name or ".engram.embed" in name else (32, 32)
            check_weight_scales(weight, reader.raw(name), tile=tile, where=name)
            checked += 1
    assert checked > 300


def test_same_seed_same_bytes_other_seed_other_bytes(tiny: Path, tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "again", seed=7)
    make_model("tiny", tmp_path / "other", seed=8)
    file = "model.safetensors"
    assert (tiny / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert (tiny / file).read_bytes() != (tmp_path / "other" / file).read_bytes()


def test_tensor_bits_are_pinned() -> None:
    """The bits do not move with numpy's version: they are raw counter output and integer sums."""
    sink = random_tensor("layers.0.attn.attn_sink", "F32", (3,), 7)
    assert sink.view(np.uint32).tolist() == [3205085157, 1073987420, 3179669696]
    packed = random_tensor("layers.0.ffn.experts.0.w1.weight", "I8", (1, 5), 7)
    assert packed.view(np.uint8).tolist() == [[101, 6, 135, 152, 83]]


def test_tensor_depends_on_name_and_seed_only() -> None:
    names = [name for name, tag, _ in checkpoint_tensors(tiny_config()) if tag == "BF16"]
    drawn = {random_tensor(name, "BF16", (64,), 1).tobytes() for name in names}
    assert len(drawn) == len(names)
    long = random_tensor("norm.weight", "BF16", (3 << 20,), 1)
    assert (random_tensor("norm.weight", "BF16", (64,), 1) == long[:64]).all()


@pytest.mark.parametrize(
    ("owner", "tag", "tile", "gain"),
    [
        ("layers.3.attn.wq_a", "F8_E4M3", 32, 1.0),
        ("layers.3.attn.wo_b", "F8_E4M3", 32, 0.1),
        ("layers.3.ffn.shared_experts.w2", "F8_E4M3", 32, 0.05),
        ("layers.3.ffn.experts.5.w1", "I8", 1, 1.0),
        ("layers.3.ffn.experts.5.w2", "I8", 1, 0.05),
    ],
)
def test_matrices_have_their_gain(owner: str, tag: str, tile: int, gain: float) -> None:
    rows, inputs = 512, 1024
    if tag == "I8":
        packed = random_tensor(f"{owner}.weight", tag, (rows, inputs // 2), 3).view(np.uint8)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, inputs)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        values = random_tensor(f"{owner}.weight", tag, (rows, inputs), 3).astype(np.float64)
    scale = random_tensor(f"{owner}.scale", "F8_E8M0", (rows // tile, inputs // 32), 3)
    assert len(np.unique(scale.view(np.uint8))) == 3
    values *= np.repeat(np.repeat(scale.astype(np.float64), tile, axis=0), 32, axis=1)
    # Scales are powers of two, so the gain is met within a factor of sqrt(2).
    assert 2**-0.6 < np.sqrt((values**2).mean() * inputs) / gain < 2**0.6
    assert abs(values.mean()) < 0.02 * values.std()


def test_vectors_have_their_moments() -> None:
    def moments(name: str, tag: str, *shape: int) -> tuple[float, float]:
        values = random_tensor(name, tag, shape, 5).astype(np.float64)
        return float(values.mean()), float(values.std())

    assert moments("layers.0.attn.attn_sink", "F32", 9999) == pytest.approx((0, 1), abs=0.05)
    assert moments("layers.0.attn.kv_norm.weight", "BF16", 9999) == pytest.approx(
        (1, 0.1), abs=0.01
    )
    assert moments("layers.0.ffn.gate.bias", "F32", 9999) == pytest.approx((0, 0.05), abs=0.01)
    assert moments("embed.weight", "BF16", 99, 128) == pytest.approx((0, 1), abs=0.05)
    assert moments("mtp.2.markov_head.embed.weight", "BF16", 99, 128)[1] == pytest.approx(
        1, abs=0.1
    )
    head = moments("head.weight", "BF16", 400, 100)[1]
    assert head * 10 == pytest.approx(2.5, abs=0.1)
    markov = moments("mtp.2.markov_head.head.weight", "BF16", 400, 100)[1]
    assert markov * 10 == pytest.approx(1, abs=0.1)


def test_tokenizer_round_trips_text_and_knows_its_special_tokens(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    text = "The rain in Spain.\n  Größe 数字 🙂 <think>"
    ids = tokenizer.encode(f"{BOS}{text}").ids
    assert ids[0] == 0 and tokenizer.token_to_id("<think>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer.encode("in the rain").ids) < len("in the rain")
    assert "noise" in tokenizer.id_to_token(511)


def test_tokenizer_sizes() -> None:
    for size in (MIN_VOCAB, 1000, 16384):
        assert byte_level_tokenizer(size).get_vocab_size() == size
    with pytest.raises(CheckpointError, match=f"{MIN_VOCAB - 1}.*at least {MIN_VOCAB}"):
        byte_level_tokenizer(MIN_VOCAB - 1)


def test_generation_config_names_the_stop_tokens(tiny: Path) -> None:
    generation = json.loads((tiny / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["eos_token_id"], generation["bos_token_id"]) == (1, 0)


def test_any_config_can_be_written(tmp_path: Path) -> None:
    cfg = tiny_config(
        vocab_size=256,
        engram_compressed_vocab_size=256,
        dspark_noise_token_id=255,
        num_hidden_layers=4,
        compress_ratios=(0, 2, 2, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=None,
        engram_layer_ids=(1,),
        engram_num_embeddings=(660,),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        sliding_window=5,
    )
    write_random_model(cfg, tmp_path, 1)
    assert ModelConfig.from_dir(tmp_path) == cfg
    assert not (tmp_path / "tokenizer.json").exists()
    with CheckpointReader(tmp_path) as reader:
        assert set(reader.names()) == {name for name, _, _ in checkpoint_tensors(cfg)}


def test_mini_has_the_tiny_layer_roles_and_half_a_gigabyte() -> None:
    cfg = mini_config()
    roles = [(s.ratio, s.kv_source, s.index_source, s.candidates, s.engram) for s in cfg.layers]
    tiny = [
        (s.ratio, s.kv_source, s.index_source, s.candidates, s.engram) for s in tiny_config().layers
    ]
    assert roles == tiny
    item = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
    total = sum(int(np.prod(shape)) * item[tag] for _, tag, shape in checkpoint_tensors(cfg))
    assert 350e6 < total < 550e6


def test_one_expert_alone_is_stacked_too(tmp_path: Path) -> None:
    """A layer with a single routed expert: one tensor per matrix, without an axis for experts."""
    cfg = tiny_config(n_routed_experts=1, num_experts_per_tok=1, dspark_n_routed_experts=1,
                      dspark_num_experts_per_tok=1, vocab_size=300, dspark_noise_token_id=299,
                      engram_layer_ids=(), engram_num_embeddings=())
    write_random_model(cfg, tmp_path, 1)
    (decl,) = (d for d in weight_table(cfg) if d.value == "mtp.0.ffn.experts.w1.weight")
    assert (decl.shape, decl.tensor_shape) == ((1, 64, 128), (64, 64))
    with CheckpointReader(tmp_path) as reader:
        assert reader.info("layers.3.ffn.experts.0.w1.weight").shape == (64, 64)
    value = Value(decl.value, TensorType(decl.shape, E2M1), Kind.WEIGHT)
    assert load_weights(weight_sources(cfg, [value]), tmp_path)[decl.value].shape == (1, 64, 64)


def test_a_refused_model_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    """Weights in the way: config.json and tokenizer.json still belong to them."""
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match="already holds weights"):
        make_model("tiny", tmp_path, 0)
    assert {f.read_bytes() for f in tmp_path.iterdir()} == {b"weights", b"mine"}
    assert len(list(tmp_path.iterdir())) == 4


def test_misuse_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'huge'; expected tiny or mini"):
        make_model("huge", tmp_path, 0)
    with pytest.raises(CheckpointError, match="seed is -1"):
        make_model("tiny", tmp_path, -1)
    with pytest.raises(CheckpointError, match="without it engram_compressed_vocab_size"):
        write_random_model(tiny_config(), tmp_path / "no_tokenizer", 0)
    assert not list(tmp_path.rglob("*.safetensors"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        make_model("tiny", tmp_path / "file", 0)
