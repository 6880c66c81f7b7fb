"""The tiny Qwen2.5-VL: windows in the vision tower, time as positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from jobs.assets.tiny.family import HEAD_DIM, ROPE_THETA, Clip, Family

SYSTEM = "You are a helpful assistant."
TOKENS_PER_SECOND = 2
MROPE_SECTION = (8, 12, 12)
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def video_ids(tokenizer: Any, clip: Clip) -> list[int]:
    """One placeholder per video token."""
    pad = int(tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    return [pad] * (clip.num_frames // 2 * clip.grid.rows * clip.grid.columns)


def positions(
    before: list[int], video: list[int], after: list[int], generated: int, clip: Clip, spread: bool
) -> Tensor:
    """M-RoPE positions [3, B, L] of prompt and generated tokens.

    `spread` False is as Transformers 5 does it (text goes on after the largest height or width position); True as
    earlier versions and other engines do (after the largest position of all). They differ for long clips, so training
    uses both.
    """
    device, batch = clip.seconds_B.device, len(clip.seconds_B)
    t, h, w = clip.num_frames // 2, clip.grid.rows, clip.grid.columns
    assert len(video) == t * h * w
    interval_B = 2 * clip.seconds_B / clip.num_frames
    tick_BT = (torch.arange(t, device=device) * (TOKENS_PER_SECOND * interval_B)[:, None]).long()
    time_BL = tick_BT.repeat_interleave(h * w, 1)
    row_L = torch.arange(h, device=device).repeat_interleave(w).repeat(t)
    column_L = torch.arange(w, device=device).repeat(h * t)
    place = torch.stack([time_BL, row_L.expand(batch, -1), column_L.expand(batch, -1)]) + len(before)
    resume_B = place.amax((0, 2)) + 1 if spread else torch.full((batch,), len(before) + max(h, w), device=device)
    lead = torch.arange(len(before), device=device).expand(3, batch, -1)
    tail = (resume_B[:, None] + torch.arange(len(after), device=device)).expand(3, -1, -1)
    prompt = torch.cat([lead, place, tail], 2)
    answer = prompt.amax((0, 2))[:, None] + 1 + torch.arange(generated, device=device)
    return torch.cat([prompt, answer.expand(3, -1, -1)], 2)


FAMILY = Family(
    name="qwen2.5-vl",
    patch=14,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    min_pixels=3136,
    max_pixels=13_000,
    text={
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 256 // HEAD_DIM,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "mrope_section": list(MROPE_SECTION),
        },
    },
    vision={
        "depth": 4,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 192 // HEAD_DIM,
        "out_hidden_size": 256,
        "patch_size": 14,
        "window_size": 224,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": TOKENS_PER_SECOND,
    },
    rope_axes=[axis for axis, count in enumerate(MROPE_SECTION) for _ in range(count)],
    config_class=Qwen2_5_VLConfig,
    model_class=Qwen2_5_VLForConditionalGeneration,
    processor="Qwen2_5_VLProcessor",
    image_processor="Qwen2VLImageProcessor",
    video_processor="Qwen2VLVideoProcessor",
    texts=(SYSTEM,),
    chat_template=CHAT_TEMPLATE,
    one_length=False,
    video_ids=video_ids,
    positions=positions,
)
