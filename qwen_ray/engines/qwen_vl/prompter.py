"""From a request to the tokens and positions that the language model reads.

Positions are computed here and not by transformers' `get_rope_index`, whose rule for time has changed between releases
(5.17 cuts the seconds between patches to a whole number, 5.24 does not); here they follow the frames' true times.

Axes: L tokens of a prompt; 3 position axes: time, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_ray.engines.protocol import CaptionRequest, Medium
from qwen_ray.engines.qwen_vl.family import IMAGE_PAD, VIDEO_PAD, Family
from qwen_ray.engines.qwen_vl.positions import Block, place, ticks
from qwen_ray.engines.qwen_vl.preprocess import Patching
from qwen_ray.errors import RequestError
from qwen_ray.prompts import messages

PADS = {"video": VIDEO_PAD, "image": IMAGE_PAD}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the model reads it.

    Attributes:
        token_ids_L: int64; one pad token for each cell of a medium's merged grid.
        positions_3L: int64.
        next_position: of the first token of the answer, on all three axes.
        grids: of each medium, its patches along time, height and width.
        media_L: bool, where media stand.
    """

    token_ids_L: npt.NDArray[np.int64]
    positions_3L: npt.NDArray[np.int64]
    next_position: int
    grids: tuple[tuple[int, int, int], ...]
    media_L: npt.NDArray[np.bool_]

    def describe(self, request: CaptionRequest) -> str:
        """What was asked, for messages."""
        shown = [f"{medium.kind} of {'x'.join(map(str, medium.frames_THWC.shape))}" for medium in request.media]
        return f"{' and '.join(shown) or 'a text'} ({len(self.token_ids_L)} prompt tokens)"


class Prompter:
    """Reads requests for one checkpoint.

    Args:
        tokenizer: the checkpoint's, with its chat template.
        family: how it takes a video.
        patching: how it cuts frames.
        tokens_per_second: positions a second, where time is positions.
    """

    def __init__(self, tokenizer: Any, family: Family, patching: Patching, tokens_per_second: float) -> None:
        self._tokenizer, self._family, self._patching = tokenizer, family, patching
        self._rate = tokens_per_second
        self._pad_ids = [int(tokenizer.convert_tokens_to_ids(pad)) for pad in PADS.values()]

    def read(self, request: CaptionRequest) -> Prompt:
        """Tokens and positions. Raises RequestError where the frames' shape is none that the model takes."""
        grids = tuple(self._grid(medium) for medium in request.media)
        ids_L = np.array(self._tokenizer(self._text(request))["input_ids"], np.int64)
        media_L = np.isin(ids_L, self._pad_ids)
        shown = zip(request.media, grids, strict=True)
        blocks = [block for medium, grid in shown for block in self._blocks(medium, grid)]
        cells = sum(len(block.ticks) * block.height * block.width for block in blocks)
        if cells != media_L.sum():
            raise RequestError("engine_crashed", f"{media_L.sum()} pad tokens for {cells} cells: prompts hold none")
        positions_3L = place(media_L, blocks)
        return Prompt(ids_L, positions_3L, int(positions_3L[0, -1]) + 1, grids, media_L)  # a prompt ends with text

    def _text(self, request: CaptionRequest) -> str:
        text = self._tokenizer.apply_chat_template(
            messages(request.prompt, request.system_prompt, [medium.kind for medium in request.media]),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # Qwen3.5's template would have it think aloud; others do not know the word
        )
        return _fill(str(text), [(PADS[medium.kind], self._placeholders(medium)) for medium in request.media])

    def _placeholders(self, medium: Medium) -> str:
        num_frames, height, width, _ = medium.frames_THWC.shape
        if medium.kind == "image":
            return IMAGE_PAD * self._patching.num_tokens(self._patching.temporal, height, width)
        return self._family.placeholders(medium.frame_times_s, (num_frames, height, width), self._patching)

    def _grid(self, medium: Medium) -> tuple[int, int, int]:
        how, shape = self._patching, medium.frames_THWC.shape
        unit, frames = how.patch * how.merge, 1 if medium.kind == "image" else how.temporal
        fits = len(shape) == 4 and shape[0] and shape[1] % unit == shape[2] % unit == 0 and shape[3] == 3
        if not fits or shape[0] % frames or (medium.kind == "image" and shape[0] != 1):
            found = "x".join(map(str, shape))
            count = "one frame" if medium.kind == "image" else f"a multiple of {frames} frames"
            allowed = f"allowed are {count}, height and width in multiples of {unit}, and 3 colours"
            raise RequestError("engine_crashed", f"{medium.kind} of {found}: {allowed}")
        if medium.kind == "video" and len(medium.frame_times_s) != shape[0]:
            raise RequestError("engine_crashed", f"{shape[0]} frames with {len(medium.frame_times_s)} times: one each")
        return how.grid(max(shape[0], how.temporal), shape[1], shape[2])

    def _blocks(self, medium: Medium, grid: tuple[int, int, int]) -> list[Block]:
        t, h, w = grid
        height, width = h // self._patching.merge, w // self._patching.merge
        if medium.kind == "video" and self._family.timestamps:
            return [Block((0,), height, width)] * t
        times = ticks(medium.frame_times_s, self._rate, self._patching.temporal) if medium.kind == "video" else (0,)
        return [Block(tuple(times), height, width)]


def _fill(text: str, fillings: Sequence[tuple[str, str]]) -> str:
    """`text` with each medium's pad replaced in order; what a filling holds is not looked at again."""
    done = ""
    for pad, filling in fillings:
        before, _, text = text.partition(pad)
        done += before + filling
    return done + text
