"""Configurations of transformers models, made tiny: 4 heads over 2 key/value heads, hidden size 64, 2 layers or one of each kind."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

SIZES: Mapping[int, str] = {
    64: """
        cross_attention_hidden_size d_embed d_model decoder_d_model decoder_hidden_size dim dim_model emb_dim embed_dim embedding_size
        encoder_hidden_dim encoder_hidden_size hidden_dim hidden_size lru_width n_embd projection_dim text_hidden_size
        word_embed_proj_dim
    """,
    2: """
        decoder_layers decoder_num_hidden_layers decoder_num_layers encoder_layers encoder_num_hidden_layers kv_heads
        linear_num_key_heads moe_k moe_top_k moe_topk multi_query_group_num n_head_kv n_layer n_layers num_block_layers
        num_decoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token num_global_key_value_heads num_hidden_layers
        num_key_value_heads num_kv_heads num_layers num_query_groups router_top_k swa_num_key_value_heads top_k_experts
    """,
    4: """
        attention_heads decoder_attention_heads decoder_num_attention_heads encoder_attention_heads index_n_heads
        linear_num_heads linear_num_value_heads moe_num_experts n_experts n_experts_total n_head n_heads n_routed_experts num_attention_head
        num_attention_heads num_experts num_heads num_local_experts swa_num_attention_heads
    """,
    128: """
        d_ff d_inner decoder_ffn_dim decoder_intermediate_size dense_intermediate_size dim_ff encoder_ffn_dim
        encoder_intermediate_size expert_ffn_hidden_size ffn_dim ffn_hidden_size hidden_intermediate_size intermediate_size
        intermediate_size_mlp mlp_hidden_size moe_ffn_hidden_size moe_intermediate_size moe_shared_expert_intermediate_size n_inner
        prefix_dense_intermediate_size shared_expert_intermediate_size shared_intermediate_size
    """,
    16: """
        attention_head_dim attention_head_size d_kv global_head_dim head_dim head_size index_head_dim kv_channels linear_head_dim
        linear_key_head_dim
        linear_value_head_dim mamba_d_state qk_nope_head_dim ssm_state_size state_size swa_head_dim swa_v_head_dim v_head_dim
    """,
    32: "kv_lora_rank q_lora_rank",
    8: "attention_chunk_size attention_window_size index_block_size index_topk local_attention qk_rope_head_dim sliding_window",
    1: "n_group topk_group",
}
"""The largest value that a field may have, by name."""
LARGEST = {name: size for size, names in SIZES.items() for name in names.split()}

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
"""Fields that count layers."""

VOCABULARY, IMAGE = 128, 64

TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_token_id": 120,
    "image_token_index": 120,
    "audio_token_id": 121,
    "video_token_id": 122,
}
"""Special tokens that a small vocabulary would not have; others become 3."""

KEPT = object()
"""A field that keeps its default."""


def shrink(
    kind: type[PreTrainedConfig],
    extra: Mapping[str, Any] | None = None,
    default: PreTrainedConfig | None = None,
    drop: Collection[str] = (),
) -> PreTrainedConfig:
    """A small configuration of this kind; `extra` fields are set last, `drop` names fields that keep their defaults."""
    fields = {name: value for name, value in vars(default if default is not None else kind()).items() if not name.startswith("_")}
    layers = chosen_layers(fields)
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name in drop:
            continue
        if isinstance(value, PreTrainedConfig):
            small: Any = shrink(type(value), default=value, drop=drop)
        else:
            small = small_value(name, value, layers)
        if small is not KEPT:
            made[name] = small
    if layers:
        made |= {name: len(layers[1]) for name in COUNTS if name in made}
    if isinstance(rotated := fields.get("qk_rope_head_dim"), int) and rotated:  # one of its kind: all heads share the rotated part
        made |= {"head_dim": made["qk_rope_head_dim"]} if "head_dim" in fields else {}
        made |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
    return kind(**made | dict(extra or {}))


def chosen_layers(fields: Mapping[str, Any]) -> tuple[frozenset[str], Sequence[int]] | None:
    """For models whose layers differ: the fields with one entry a layer, and the first layer of each kind, two to four in all."""
    count = next((fields[name] for name in COUNTS if isinstance(fields.get(name), int)), 0)
    listed = {name: value for name, value in sorted(fields.items()) if isinstance(value, (list, tuple)) and len(value) == count > 4}
    if not listed:
        return None
    first: dict[tuple[str, ...], int] = {}
    for layer in range(count):
        first.setdefault(tuple(str(value[layer]) for value in listed.values()), layer)
    kept = sorted(first.values())[:4]
    kept += [layer for layer in range(count) if layer not in kept][: max(2 - len(kept), 0)]
    return frozenset(listed), sorted(kept)


def small_value(name: str, value: Any, layers: tuple[frozenset[str], Sequence[int]] | None) -> Any:
    """A field's small value, or KEPT."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, float) and "drop" in name and 0 <= value <= 1:
        return 0.0
    if number and name in LARGEST and value > 0:
        return min(value, LARGEST[name])
    if number and "vocab_size" in name:
        return VOCABULARY
    if name.endswith(("token_id", "token_index")):
        return small_token(name, value)
    if name == "depths" and isinstance(value, (list, tuple)):
        return [min(2, depth) for depth in value]
    if layers and name in layers[0]:
        return [value[layer] for layer in layers[1]]
    if number and name == "image_size":
        return IMAGE
    if name == "rope_parameters" and isinstance(value, dict):
        return small_rotation(value)
    return KEPT


def small_token(name: str, value: Any) -> Any:
    if isinstance(value, int) and value >= VOCABULARY:
        return TOKENS.get(name, 3)
    if isinstance(value, list) and value and max(value) >= VOCABULARY:
        return [2]
    return KEPT


def small_rotation(value: Any) -> Any:
    """Rotary parameters, with lists that fit a head of 16."""
    if not isinstance(value, dict):
        return copy.deepcopy(value)
    made = {}
    for name, item in value.items():
        if name == "mrope_section":
            made[name] = [2, 3, 3]
        elif name in ("long_factor", "short_factor") and item:
            made[name] = item[:8]
        else:
            made[name] = small_rotation(item)
    return made
