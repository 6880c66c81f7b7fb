"""What differs between the families of tiny checkpoints: sizes, settings, and how a prompt carries a video.

Axes in names as in train_tiny.py. Cells are what one video token shows: a patch times the spatial merge, squared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MERGE = 2
HEAD_DIM = 64
ROPE_THETA = 10000.0


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
        patch, mean, std: how pictures are cut and normalised.
        min_pixels, max_pixels: of a frame.
        text, vision: settings beside those that `build_model` makes.
        rope_axes: position axis (time, row, column) of each of the text's frequencies.
        config_class, model_class: of transformers.
        processor, image_processor, video_processor: names in the settings files.
        texts: what the tokenizer learns beside captions and prompts.
        chat_template: in Jinja, with one place for a video.
        one_length: whether all clips of a step must last equally long, since their times are text.
        video_ids: (tokenizer, clip) -> token ids that stand for the template's one `<|video_pad|>`.
        positions: (ids before the video, of the video, after it; number of answer tokens; clip; spread) -> [3, B, L].
    """

    name: str
    patch: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int
    text: dict[str, Any]
    vision: dict[str, Any]
    rope_axes: Sequence[int]
    config_class: Any
    model_class: Any
    processor: str
    image_processor: str
    video_processor: str
    texts: tuple[str, ...]
    chat_template: str
    one_length: bool
    video_ids: Callable[[Any, Clip], list[int]]
    positions: Callable[[list[int], list[int], list[int], int, Clip, bool], Tensor]

    def size(self, grid: Grid) -> tuple[int, int]:
        """Height and width in pixels."""
        return grid.rows * MERGE * self.patch, grid.columns * MERGE * self.patch
