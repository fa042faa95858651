"""A tiny configuration of any transformers model, made from the names of its fields.

The class's own default configuration is taken and every size in it shrunk: fields that mean the
same are given the same number, so that what must agree agrees. ``OVERRIDES`` says only what no name
tells.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PretrainedConfig

VOCAB, HIDDEN, HEADS, HEAD_DIM, FFN, EXPERTS, TOP_K = 128, 32, 4, 8, 48, 4, 2
KV_HEADS = 2
POSITIONS, WINDOW = 64, 8
_SHALLOW, _DEEP = 2, 4
"""Layers of a model whose layers are all of one kind, and of one that mixes kinds."""

_RULES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_|decoder_|audio_)?vocab_size(_per_layer_input)?|codebook_size", VOCAB),
    (r"ngram_vocab_size_base|encoder_hash_byte_group_vocab", VOCAB),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size)(_mlp)?", FFN),
    (r"d_ff|dff|dim_ff|d_inner|feed_forward_size|mlp_dim", FFN),
    (r"mamba_(n|num)_heads", 2 * HIDDEN // HEAD_DIM),
    (r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads", KV_HEADS),
    (
        r"(num|n|encoder|decoder|swa|linear|index|mamba|key|value|attention|query|_)*(heads?|groups)",
        HEADS,
    ),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (
        r".*head_dim|d_kv|d_head|dim_head|kv_channels|mamba_d_head|mamba_headdim|attention_head_size",
        HEAD_DIM,
    ),
    (r"rotary_dim|hidden_size_per_layer_input", HEAD_DIM),
    (r".*hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|embedding_size", HIDDEN),
    (
        r"word_embed_proj_dim|(input|output)_embedding_size|lru_width|ple_embed_dim|dim_model_base",
        HIDDEN,
    ),
    (
        r".*(kv|q|o)_lora_rank|laurel_rank|d_rel|gated_norm_rank|hc_lowrank|adapter_rank|.*dt_rank",
        HEAD_DIM,
    ),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_(topk|top_k|k)", TOP_K),
    (r"n_group|num_expert_group", 2),
    (r"topk_group|(n|num|moe_num)_shared_experts", 1),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length",
        POSITIONS,
    ),
    (r"max_(source|target)_positions|original_max_position_embeddings", POSITIONS),
    (r"(keep_|attention_)?(sliding_)?window(_size)?|local_attention(_window_len)?", WINDOW),
    (r"attention_chunk_size|.*chunk_(size|length)|block_size|index_block_size", WINDOW),
    (r"index_topk(_blocks)?|rel_extent", WINDOW),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"(mamba_d_|ssm_)?state(_size)?", HEAD_DIM),
    (r"time_step_rank", TOP_K),
    (r"(attn|expert)_layer_period|.*layer_interval|layer_group_size|.*sliding_window_pattern", 2),
    (r"global_attn_every_n_layers|n_layers_per_attn_res_block|decoder_sparse_step", 2),
    (r"(attn|expert)_layer_offset|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_kv_shared_layers|num_nextn_predict_layers|moe_layer_end_index", 0),
)
_LAYERS = re.compile(
    r"(num_(hidden|encoder|decoder)_?layers|(n|num|encoder|decoder)_layers?|depth|num_blocks)"
)
_SPECIAL = re.compile(r".*_token_(id|index)|mask_index|unk_index")
_PERIODIC = re.compile(
    r".*(layer_period|layer_interval|layer_group_size|window_pattern|every_n_layers|res_block)"
)
_SWITCHES = {"is_decoder": True, "use_cache": False}
_NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
)
"""Fields that some classes leave open and yet build nothing without."""
_LARGE = 64
"""A size above this whose name no rule knows becomes ``HIDDEN``."""
_SIZE = re.compile(r".*(size|dim|dims|width|rank|channels?|features|length)")

_DOTS3_SLIDING = {
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "swa_q_lora_rank": HEAD_DIM,
    "swa_kv_lora_rank": HEAD_DIM,
    "swa_head_dim": 2 * HEAD_DIM,
    "swa_qk_nope_head_dim": HEAD_DIM,
    "swa_v_head_dim": HEAD_DIM,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "dots3_note_text": _DOTS3_SLIDING,
    "gemma4_text": {"global_head_dim": 2 * HEAD_DIM},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD_DIM},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xlstm": {"chunk_size": 12},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS},
    "zamba2": {
        "n_mamba_heads": 2 * HIDDEN // HEAD_DIM,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
    },
}
"""By model type: fields whose name does not say what they must be."""


def tiny_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a configuration of class ``kind`` with a few small layers.
    Raises what the class raises.
    """
    return kind(**_shrunk(kind()))


def part_for(config: PretrainedConfig, kind: Any) -> PretrainedConfig:
    """Return the part of a composite configuration that a model class is built from:
    its text part, say.
    """
    if isinstance(config, kind):
        return config
    parts = [v for v in vars(config).values() if isinstance(v, PretrainedConfig)]
    return next((part for part in parts if isinstance(part, kind)), config)


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a default configuration, made small;
    those of nested configurations as dicts.
    """
    present = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    depths = {v for k, v in present.items() if _LAYERS.fullmatch(k) and isinstance(v, int)}
    mixed = any(_is_layer_list(v, depths) and len(set(map(str, v))) > 1 for v in present.values())
    depth = _DEEP if mixed or any(map(_PERIODIC.fullmatch, present)) else _SHALLOW
    small: dict[str, Any] = {}
    for name, value in present.items():
        if isinstance(value, PretrainedConfig):
            small[name] = type(value)(**_shrunk(value))
        elif _is_layer_list(value, depths):
            small[name] = [
                _small(name, item, depth) if type(item) is int else item
                for item in _some_of_each(value, depth)
            ]
        elif value is None and name in _NEEDED:
            small[name] = _small(name, _LARGE, depth)
        elif name.endswith("key_value_heads") and value == present.get("num_attention_heads"):
            small[name] = HEADS
        elif isinstance(value, int) and not isinstance(value, bool):
            number = _small(name, value, depth)
            if number != value:
                small[name] = number
        elif name in _SWITCHES:
            small[name] = _SWITCHES[name]
    return {**small, **OVERRIDES.get(config.model_type, {})}


def _is_layer_list(value: Any, depths: set[int]) -> bool:
    return isinstance(value, list | tuple) and len(value) in depths and len(value) > 1


def _some_of_each(values: Any, depth: int) -> list[Any]:
    """Return ``depth`` entries that hold every kind of entry, in the order in which they first
    stand.
    """
    kinds = list({str(value): value for value in values}.values())
    return [kinds[place % len(kinds)] for place in range(max(depth, len(kinds)))]


def _small(name: str, value: int, depth: int) -> int:
    if _LAYERS.fullmatch(name):
        return min(value, depth)
    if _SPECIAL.fullmatch(name):
        return value if value < 3 else VOCAB - 1 - value % 8
    for pattern, number in _RULES:
        if re.fullmatch(pattern, name):
            # Fewer than one is "off", and one "shared by all".
            return number if value > 1 else value
    return HIDDEN if value > _LARGE and _SIZE.fullmatch(name) else value
