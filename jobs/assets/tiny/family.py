"""What differs between the families of tiny checkpoints: sizes, settings, and how a prompt carries a video.

Axes in names as in train_tiny.py. Cells are what one video token shows: a patch times the spatial merge, squared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qwen_ray.engines.qwen_vl.family import FAMILIES
from qwen_ray.engines.qwen_vl.preprocess import Patching

MERGE = 2
HEAD_DIM = 64
ROPE_THETA = 10000.0
COUNTS_TEMPLATE = "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
CONTENT_TEMPLATE = (
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
)
"""What the chat templates of both families have in common: one part of a message."""


@dataclass(frozen=True)
class Grid:
    """One picture size that smart_resize can give, in cells, and the aspects (width / height) of its videos."""

    rows: int
    columns: int
    aspects: tuple[float, float]
    weight: float

    @property
    def patches(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.rows * MERGE, self.columns * MERGE


@dataclass(frozen=True, slots=True)
class Clip:
    """How the clips of a training step are cut: their grid, frames, and seconds [B] (one value where time is text)."""

    grid: Grid
    num_frames: int
    seconds_B: Tensor


@dataclass(frozen=True, eq=False)
class Family:
    """Everything that a checkpoint's family decides.

    Attributes:
        patch: side in pixels.
        min_pixels, max_pixels: of a frame.
        text, vision, rope: settings beside those that `build_model` makes.
        rope_axes: position axis (time, row, column) of each of the text's frequencies.
        config_class, model_class: of transformers.
        processor, image_processor, video_processor: names in the settings files.
        texts: what the tokenizer learns beside captions and prompts.
        chat_template: in Jinja, with one place for a video.
        one_length: whether all clips of a step must last equally long, since their times are text.
        positions: (ids before the video, of the video, after it; number of answer tokens; clip; spread) -> [3, B, L].
    """

    name: str
    patch: int
    min_pixels: int
    max_pixels: int
    text: dict[str, Any]
    vision: dict[str, Any]
    rope: dict[str, Any]
    rope_axes: Sequence[int]
    config_class: Any
    model_class: Any
    processor: str
    image_processor: str
    video_processor: str
    texts: tuple[str, ...]
    chat_template: str
    one_length: bool
    positions: Callable[[list[int], list[int], list[int], int, Clip, bool], Tensor]

    def size(self, grid: Grid) -> tuple[int, int]:
        """Height and width in pixels."""
        return grid.rows * MERGE * self.patch, grid.columns * MERGE * self.patch

    @property
    def patching(self) -> Patching:
        """How the engine cuts and normalises pictures."""
        engine = FAMILIES[self.config_class.model_type]
        return Patching(self.patch, MERGE, 2, engine.mean, engine.std)

    def video_ids(self, tokenizer: Any, clip: Clip) -> list[int]:
        """Token ids that the engine puts for the template's one `<|video_pad|>`, for evenly spaced frames."""
        times_s = [k * float(clip.seconds_B[0]) / clip.num_frames for k in range(clip.num_frames)]
        size = clip.num_frames, *self.size(clip.grid)
        text = FAMILIES[self.config_class.model_type].placeholders(times_s, size, self.patching)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids
