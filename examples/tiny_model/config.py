"""Sizes of the trained model. Ten layers hold every kind of layer of the release (spec §1.2).

0 window, 1 window + Engram, 2 full ratio 2, 3 reuse, 4 full ratio 2 + Engram | 5 full ratio 1 and
candidate source, 6 reuse, 7 reindex, 8 reuse, 9 reindex; three DSpark stages.
"""

from typing import Any

from engram import column_primes
from layers import Config
from tokenizer import NOISE, SPECIAL

TRAINED: dict[str, Any] = dict(
    model_type="deepseek_v41_text", num_key_value_heads=1, hidden_act="silu",
    tie_word_embeddings=False, n_shared_experts=1, scoring_func="sqrtsoftplus",
    topk_method="noaux_tc", norm_topk_prob=True,
    vocab_size=4096, hidden_size=160, num_hidden_layers=10, num_attention_heads=4, head_dim=64,
    qk_rope_head_dim=32, q_lora_rank=96, o_lora_rank=64, o_groups=2, swiglu_limit=10.0,
    rms_norm_eps=1e-20, max_position_embeddings=4096, rope_theta=10000.0,
    compress_rope_theta=40000.0,
    rope_scaling=dict(type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0,
                      original_max_position_embeddings=1024),
    sliding_window=128, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
    kv_source_layer_ids=[2, 4, 5], index_source_layer_ids=[2, 4, 5, 7, 9], index_n_heads=4,
    index_head_dim=32, index_topk=64, candidate_source_layer_id=5, candidate_topk_blocks=16,
    candidate_block_size=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=96,
    routed_scaling_factor=1.5, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    engram_layer_ids=[1, 4], engram_max_ngram_size=4, engram_n_heads=2, engram_head_dim=32,
    engram_vocab_size=5000, engram_pad_token_id=2, num_nextn_predict_layers=3, dspark_block_size=5,
    dspark_target_layer_ids=[7, 8, 9], dspark_markov_rank=32, dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2)

SMOKE: dict[str, Any] = TRAINED | dict(
    vocab_size=512, hidden_size=64, q_lora_rank=32, o_lora_rank=32, moe_intermediate_size=32,
    n_routed_experts=4, sliding_window=32, index_topk=8, candidate_topk_blocks=4,
    candidate_block_size=4, engram_vocab_size=101, max_position_embeddings=512)


def make_config(sizes: dict[str, Any], classes: int) -> Config:
    """The config for a tokenizer with so many Engram classes."""
    cfg = Config(**sizes, engram_compressed_vocab_size=classes,
                 dspark_noise_token_id=SPECIAL.index(NOISE))
    cfg.engram_num_embeddings = [sum(map(sum, sizes)) for sizes in column_primes(cfg)]
    return cfg


def config_json(cfg: Config) -> dict[str, Any]:
    """config.json in the official layout."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41",
        "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32],
                                "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
                                "expert_dtype": "fp4"},
        "text_config": vars(cfg)}
