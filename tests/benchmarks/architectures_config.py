"""What a tiny model of some architectures needs beyond `tiny_config`: fields that depend on each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4, "moe_intermediate_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"moe_topk": 2, "zero_expert_num": 2},
    "marian": {"decoder_vocab_size": 320},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 2,
        "ple_embed_dim": 64,
        "hc_lowrank": 16,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 4,
        "hash_seed": 0,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "roc_bert": {"shape_vocab_size": 100, "pronunciation_vocab_size": 100},
    "xlstm": {"embedding_dim": 64, "hidden_size": 64, "num_heads": 4, "chunk_size": 16},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "kv_channels": 16,
        "adapter_rank": 4,
    },
}
