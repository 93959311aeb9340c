"""Tiny random models of many transformers types: `model, batch = tiny("causal", "llama")`.

Sizes are small and odd on purpose (see `shrink.py`); nothing is downloaded. `types.tsv` lists the types, with the number of parameters.
"""

from __future__ import annotations

import csv
import inspect
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers reads it

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo.shrink import shrink

TASKS: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "mlm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "s2s": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "img": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


def types() -> list[dict[str, str]]:
    """The rows of the list: task, model_type, parameters, graph_nodes, fused_attention_nodes, note."""
    with Path(__file__).with_name("types.tsv").open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


ROTATED = {"rope_theta": 10000.0, "rope_type": "default"}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "layer_group_size": 2,
        "n_group": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "topk_group": 1,
    },
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": ROTATED, "sliding_attention": ROTATED},
    },
    "dots1": {
        "first_k_dense_replace": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    },
    "efficientnet": {"hidden_dim": 2560},
    "esm": {"mask_token_id": 3, "pad_token_id": 1, "vocab_size": 128},
    "esmc": {"num_key_value_heads": 4},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4},
    "mamba2": {"expand": 2, "head_dim": 16, "n_groups": 1, "num_heads": 8},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "swin": {"embed_dim": 24, "image_size": 224, "num_heads": [2, 2, 4, 4]},
    "swinv2": {"embed_dim": 24, "num_heads": [2, 2, 4, 4]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
    },
}
"""Fields whose small value depends on others."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "bailing_hybrid": ("layer_types", "mlp_layer_types"),
    "cohere_compass_text": ("rope_parameters",),
    "zamba": ("attention_head_dim", "attention_hidden_size", "num_key_value_heads"),
}
"""Fields that keep their default, or follow from others."""

PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")


def tiny(
    task: str,
    model_type: str,
    *,
    batch: int = 2,
    sequence: int = 16,
    labels: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode and its keyword inputs: `input_ids [batch, sequence]`, or images. Without `labels` it returns no loss."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    kind = model_class(task, model_type)
    try:
        config = small_config(kind, task, model_type)
        model = kind._from_config(config, attn_implementation="sdpa")
    except (ValueError, ImportError):
        config = small_config(kind, task, model_type)
        model = kind._from_config(config, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif isinstance(getattr(module, "drop_prob", None), float):  # stochastic depth
            module.drop_prob = dropout
    generator = torch.Generator().manual_seed(seed + 1)
    inputs: dict[str, Any] = dict(make_inputs(model, config, task, model_type, (batch, sequence), generator))
    if labels:
        inputs["labels"] = torch.zeros(batch, dtype=torch.long) if task == "img" else words(batch, sequence, generator)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return model.train(), inputs


def model_class(task: str, model_type: str) -> Any:
    name = TASKS[task][model_type]
    return getattr(transformers, name[0] if isinstance(name, tuple) else name)


def small_config(kind: Any, task: str, model_type: str) -> PreTrainedConfig:
    config_class = kind.config_class
    mapped = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else config_class  # noqa: SIM401 (it has no `get` of its own)
    if config_class is None or issubclass(mapped, config_class):
        config_class = mapped
    fields, drop = FIELDS.get(model_type, {}), DEFAULTS.get(model_type, ())
    try:
        config = shrink(config_class, fields, drop=drop)
    except Exception:  # configurations check themselves, with errors of every kind: the layers' kinds do not fit their number
        config = shrink(config_class, fields, drop=(*drop, *PER_LAYER))
    config.use_cache = False
    if task == "causal" and hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    if task == "mlm" and hasattr(config, "is_decoder"):
        config.is_decoder = False
    return config


def make_inputs(
    model: Any, config: Any, task: str, model_type: str, size: tuple[int, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """What the model's forward takes; rows come first."""
    batch, sequence = size
    if model_type in ("musicgen", "musicgen_melody"):
        return {"input_ids": words(batch * config.num_codebooks, sequence, generator)}
    if model_type == "siglip2":
        return {
            "pixel_values": torch.randn(batch, 16, 768, generator=generator),
            "pixel_attention_mask": torch.ones(batch, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]] * batch),
        }
    if task == "img" or model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, *image_size(config), generator=generator)}
    inputs = {"input_ids": words(batch, sequence, generator)}
    takes_two = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if takes_two and (task == "s2s" or getattr(config, "is_encoder_decoder", False)):
        inputs["decoder_input_ids"] = words(batch, sequence, generator)
    return inputs


def words(rows: int, sequence: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, 100, (rows, sequence), generator=generator)


def image_size(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 64
    channels = getattr(config, "num_channels", None) or getattr(vision, "num_channels", None) or 3
    side = size[0] if isinstance(size, (list, tuple)) else size
    return channels, side, side
