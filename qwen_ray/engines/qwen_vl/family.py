"""What differs between the Qwen-VL families on the way from a clip to the model's inputs.

Qwen2.5-VL is told the time between frames by a number, `second_per_grid_ts`; from Qwen3-VL on, time is text: each pair
of frames follows its own timestamp in the prompt. All else (patches in the same order, one grid per video, 2 in
`mm_token_type_ids`) is the same, and the differences between dense, mixture-of-experts and hybrid checkpoints lie in
transformers' modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch, which a driver need not have
    from qwen_ray.engines.qwen_vl.preprocess import Patching

VIDEO_PAD = "<|video_pad|>"
IMAGE_PAD = "<|image_pad|>"
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Channel statistics of OpenAI's CLIP, which every Qwen2.5-VL checkpoint uses (`preprocessor_config.json`)."""
HALF = (0.5, 0.5, 0.5)
"""Qwen3-VL's mean and standard deviation."""


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one family take a video.

    Attributes:
        mean, std: channel statistics where the checkpoint has no preprocessor file.
        timestamps: time is text in the prompt; otherwise it is `second_per_grid_ts`.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    timestamps: bool

    def placeholders(self, frame_times_s: Sequence[float], size: tuple[int, int, int], how: Patching) -> str:
        """What stands in the prompt for the one `VIDEO_PAD` of the chat template.

        Args:
            frame_times_s: of each frame, from the start of the clip.
            size: frames, height and width of the clip.
            how: the checkpoint's patching.
        """
        tokens = how.num_tokens(*size)
        if not self.timestamps:
            return VIDEO_PAD * tokens
        times = patch_times(frame_times_s, how.temporal)
        pads = VIDEO_PAD * (tokens // len(times))
        return "".join(f"<{time_s:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for time_s in times)


def patch_times(frame_times_s: Sequence[float], temporal: int) -> list[float]:
    """The time that stands for each group of `temporal` frames: the middle between its first and last
    (`Qwen3VLProcessor._calculate_timestamps`); never before the clip's start.
    """
    groups = zip(frame_times_s[::temporal], frame_times_s[temporal - 1 :: temporal], strict=True)
    return [max(0.0, (first + last) / 2) for first, last in groups]


_QWEN2_5 = Family(CLIP_MEAN, CLIP_STD, timestamps=False)
_QWEN3 = Family(HALF, HALF, timestamps=True)
FAMILIES = {
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
}
"""By `model_type` of the checkpoint."""
PAGED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those whose layers all keep keys and values of every token."""
