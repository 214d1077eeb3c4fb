"""A config of transformers in small: the same class and switches, sizes of a toy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, HEAD_DIM, LAYERS, EXPERTS, VOCABULARY = 64, 4, 16, 2, 4, 320


def _all(size: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


SIZES: Mapping[str, int] = {
    **_all(
        HIDDEN,
        "hidden_size d_model n_embd dim emb_dim word_embed_proj_dim embedding_size lru_width attention_hidden_size "
        "model_dim d_hidden attn_hidden_size hidden_dim hc_dim lm_hidden_size mamba_hidden_size intermediate_size "
        "ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
        "shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp block_ff_dim d_inner "
        "dense_intermediate_size expert_ffn_hidden_size mlp_hidden_size feed_forward_size dense_ffn_dim "
        "moe_shared_expert_intermediate_size prefix_dense_intermediate_size intermediate_dim feed_forward_proj_size",
    ),
    **_all(
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads index_n_heads "
        "linear_num_key_heads linear_num_value_heads",
    ),
    **_all(
        HEAD_DIM,
        "head_dim kv_channels attention_head_dim qk_nope_head_dim v_head_dim attention_key_size attention_value_size "
        "qk_rope_head_dim dim_head global_head_dim swa_head_dim swa_v_head_dim d_head linear_key_head_dim "
        "linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim hidden_size_per_layer_input",
    ),
    **_all(
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_blocks attn_layer_period expert_layer_period",
    ),
    **_all(EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"),
    **_all(VOCABULARY, "vocab_size vocab_size_per_layer_input text_vocab_size unpadded_vocab_size"),
    **_all(32, "q_lora_rank kv_lora_rank o_lora_rank index_head_dim qk_head_dim"),
    **_all(
        1,
        "n_group topk_group num_expert_group n_shared_experts num_expert_groups first_k_dense_replace "
        "num_memory_blocks num_mem_blocks attn_layer_offset expert_layer_offset",
    ),
    **_all(8, "mamba_d_state state_size ssm_state_size mamba_state_dim chunk_size mamba_chunk_size"),
    **_all(2 * HIDDEN // HEAD_DIM, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    "mamba_d_ssm": 2 * HIDDEN,
    "num_kv_shared_layers": 0,
    "index_topk": 1024,
}
MOST: Mapping[str, int] = {
    **_all(2, "num_experts_per_tok moe_top_k moe_k top_k experts_per_token num_experts_per_token altup_num_inputs"),
    **_all(
        256,
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions "
        "max_source_positions",
    ),
    **_all(1, "mamba_n_groups n_groups max_window_layers"),
    "rotary_dim": HEAD_DIM,
    "laurel_rank": 8,
}
"""Fields that are lowered to this at most."""
PER_LAYER = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attention_types")
"""Lists that name the kind of each layer."""


def tiny_config(config: Any, **changes: Any) -> Any:
    """Return a copy in small. What a class needs beyond known fields may be missing: then its model cannot be built.

    Args:
        config: transformers' config.
        changes: Fields with other values.
    """
    small = _small(config.to_dict()) | changes
    return type(config)(**small)


def _small(fields: Mapping[str, Any]) -> dict[str, Any]:
    small = copy.deepcopy(dict(fields))
    heads = _first(fields, "num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = _first(fields, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    for name, value in fields.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            small[name] = {} if name == "per_layer_config" else _small(value)
        elif isinstance(value, bool) or value is None:
            continue
        elif name in SIZES and isinstance(value, int):
            small[name] = SIZES[name]
        elif name in MOST and isinstance(value, int):
            small[name] = min(value, MOST[name])
        elif ("key_value_heads" in name or name in ("num_kv_heads", "n_head_kv")) and isinstance(value, int):
            small[name] = HEADS if value == heads else HEADS // 2 if value > 1 else 1
        elif name.endswith(("token_id", "_token")) and isinstance(value, int) and value >= VOCABULARY:
            small[name] = 0
        elif isinstance(value, list | tuple) and (len(value) == layers or name in PER_LAYER):
            small[name] = [
                SIZES[name] if name in SIZES and isinstance(one, int) else one for one in _both_kinds(list(value))
            ]
    if {"expand", "num_heads", "head_dim"} <= fields.keys():  # heads of a state space, not of attention
        small["num_heads"] = fields["expand"] * HIDDEN // HEAD_DIM
    return small


def _first(fields: Mapping[str, Any], *names: str) -> int:
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), 0)


def _both_kinds(values: list[Any]) -> list[Any]:
    """Two entries, different ones if there are."""
    other = [value for value in values if value != values[0]]
    return [values[0], (other or values)[0]] if all(isinstance(value, str) for value in values) else values[:LAYERS]
