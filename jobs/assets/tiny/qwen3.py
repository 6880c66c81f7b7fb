"""The tiny Qwen3-VL: learned positions and deepstack in the vision tower, interleaved M-RoPE, time as text."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from jobs.assets.tiny.family import CONTENT_TEMPLATE, COUNTS_TEMPLATE, HEAD_DIM, Clip, Family

MROPE_SECTION = (12, 10, 10)
CHAT_TEMPLATE = (
    f"{COUNTS_TEMPLATE}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    f"{CONTENT_TEMPLATE}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    min_pixels=4096,
    max_pixels=16_980,
    text={
        "intermediate_size": 704,
        "head_dim": HEAD_DIM,
    },
    vision={
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    },
    rope={"mrope_section": list(MROPE_SECTION), "mrope_interleaved": True},
    rope_axes=_rope_axes(),
    config_class=Qwen3VLConfig,
    model_class=Qwen3VLForConditionalGeneration,
    processor="Qwen3VLProcessor",
    image_processor="Qwen2VLImageProcessorFast",
    video_processor="Qwen3VLVideoProcessor",
    texts=tuple(f"<{tenth / 10:.1f} seconds>" for tenth in range(0, 120, 7)),
    chat_template=CHAT_TEMPLATE,
    one_length=True,
    positions=positions,
)
