"""Small checkpoints with random weights, one of every family that the caption engine runs, with the tiny tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from qwen_ray.engines.models import resolve

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Qwen3.5 alternates attention with a recurrent layer."""
VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT,
        "vision_config": VISION | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
    },
    "qwen3_vl": {"text_config": TEXT, "vision_config": VISION | {"deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"text_config": TEXT | EXPERTS, "vision_config": VISION | {"deepstack_visual_indexes": [0, 1]}},
    "qwen3_5": {"text_config": TEXT | HYBRID, "vision_config": VISION},
    "qwen3_5_moe": {
        "text_config": TEXT | HYBRID | EXPERTS | {"shared_expert_intermediate_size": 32},
        "vision_config": VISION,
    },
}


def write_checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint of `family` whose random weights are large enough that its answers depend on the video."""
    tokenizer = resolve("builtin:tiny-qwen2.5-vl").location
    special = AutoConfig.from_pretrained(tokenizer)
    ids = {name: getattr(special, name) for name in ("image_token_id", "video_token_id", "vision_start_token_id")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family], **ids)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(Path(tokenizer) / name, folder / name)
    return folder
