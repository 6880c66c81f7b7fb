"""The tiny Qwen3-VL: learned positions and deepstack in the vision tower, interleaved M-RoPE, time as text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from jobs.assets.tiny.family import HEAD_DIM, ROPE_THETA, Clip, Family

MROPE_SECTION = (12, 10, 10)
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def patch_times_s(clip: Clip) -> list[float]:
    """The middle of each pair of frames, for frames that are evenly spaced from the start of the clip."""
    step_s = float(clip.seconds_B[0]) / clip.num_frames
    return [(2 * k + 0.5) * step_s for k in range(clip.num_frames // 2)]


def video_ids(tokenizer: Any, clip: Clip) -> list[int]:
    """For each pair of frames its time, then its placeholders between the marks of a picture."""
    start, pad, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|video_pad|>", "<|vision_end|>"])
    ids: list[int] = []
    for time_s in patch_times_s(clip):
        ids += tokenizer(f"<{time_s:.1f} seconds>", add_special_tokens=False).input_ids
        ids += [start, *[pad] * (clip.grid.rows * clip.grid.columns), end]
    return ids


def positions(
    before: list[int], video: list[int], after: list[int], generated: int, clip: Clip, spread: bool
) -> Tensor:
    """M-RoPE positions [3, B, L]: every pair of frames is a picture of its own, and text goes on behind it."""
    del spread  # there is one convention only
    device, batch = clip.seconds_B.device, len(clip.seconds_B)
    rows, columns = clip.grid.rows, clip.grid.columns
    pad = max(set(video), key=video.count)
    parts, here, k = [], 0, 0
    ids = [*before, *video, *after, *[-1] * generated]
    row, column = (
        place.flatten() for place in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    )
    while k < len(ids):
        if ids[k] == pad:
            parts.append(torch.stack([torch.zeros_like(row), row, column]) + here)
            here, k = here + max(rows, columns), k + rows * columns
        else:
            parts.append(torch.full((3, 1), here))
            here, k = here + 1, k + 1
    return torch.cat(parts, 1).to(device)[:, None].expand(3, batch, -1)


def _rope_axes() -> list[int]:
    """Time, row, column in turn, then time alone (`Qwen3VLTextRotaryEmbedding.recomposition_frequencies`)."""
    axes = [0] * (HEAD_DIM // 2)
    for axis in (1, 2):
        for index in range(axis, MROPE_SECTION[axis] * 3, 3):
            axes[index] = axis
    return axes


FAMILY = Family(
    name="qwen3-vl",
    patch=16,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    min_pixels=4096,
    max_pixels=16_980,
    text={
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 256 // HEAD_DIM,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "mrope_section": list(MROPE_SECTION),
            "mrope_interleaved": True,
        },
    },
    vision={
        "depth": 4,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 192 // HEAD_DIM,
        "out_hidden_size": 256,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    },
    rope_axes=_rope_axes(),
    config_class=Qwen3VLConfig,
    model_class=Qwen3VLForConditionalGeneration,
    processor="Qwen3VLProcessor",
    image_processor="Qwen2VLImageProcessorFast",
    video_processor="Qwen3VLVideoProcessor",
    texts=tuple(f"<{tenth / 10:.1f} seconds>" for tenth in range(0, 120, 7)),
    chat_template=CHAT_TEMPLATE,
    one_length=True,
    video_ids=video_ids,
    positions=positions,
)
