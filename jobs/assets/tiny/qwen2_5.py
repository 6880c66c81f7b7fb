"""The tiny Qwen2.5-VL: windows in the vision tower, time as positions."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from jobs.assets.tiny.family import CONTENT_TEMPLATE, COUNTS_TEMPLATE, Clip, Family

SYSTEM = "You are a helpful assistant."
TOKENS_PER_SECOND = 2
MROPE_SECTION = (8, 12, 12)
CHAT_TEMPLATE = (
    f"{COUNTS_TEMPLATE}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    f"{CONTENT_TEMPLATE}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    min_pixels=3136,
    max_pixels=13_000,
    text={
        "intermediate_size": 768,
    },
    vision={
        "window_size": 224,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": TOKENS_PER_SECOND,
    },
    rope={"mrope_section": list(MROPE_SECTION)},
    rope_axes=[axis for axis, count in enumerate(MROPE_SECTION) for _ in range(count)],
    config_class=Qwen2_5_VLConfig,
    model_class=Qwen2_5_VLForConditionalGeneration,
    processor="Qwen2_5_VLProcessor",
    image_processor="Qwen2VLImageProcessor",
    video_processor="Qwen2VLVideoProcessor",
    texts=(SYSTEM,),
    chat_template=CHAT_TEMPLATE,
    one_length=False,
    positions=positions,
)
