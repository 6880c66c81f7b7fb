"""Where every token of a prompt stands: M-RoPE's three axes, with true times.

Text counts on along all axes at once. A medium spans a grid from where the text has come to; text goes on behind its
larger side (`get_rope_index` of transformers 5.24). Qwen2.5-VL takes time as positions of that grid, Qwen3-VL in words.
One interval for a whole clip, `second_per_grid_ts`, cannot say that frames lie close together where the picture moves
and far apart where it does not; there each patch's position follows its own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_ray.engines.qwen_vl.preprocess import second_per_grid


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of pad tokens: a grid of `height` x `width` merged cells at each of `ticks` positions in time."""

    ticks: tuple[int, ...]
    height: int
    width: int


def place(media_L: npt.NDArray[np.bool_], blocks: Sequence[Block]) -> npt.NDArray[np.int64]:
    """positions_3L of a prompt.

    Args:
        media_L: where pad tokens stand; as many as the blocks have cells.
        blocks: in the order in which they stand.
    """
    positions_3L = np.empty((3, len(media_L)), np.int64)
    reached, token = 0, 0  # position and index of the next token
    pads = np.flatnonzero(media_L)
    for block in blocks:
        num_text = int(pads[0]) - token
        positions_3L[:, token : token + num_text] = reached + np.arange(num_text)
        reached, token = reached + num_text, int(pads[0])
        axes = np.meshgrid(np.array(block.ticks), np.arange(block.height), np.arange(block.width), indexing="ij")
        cells_3N = np.stack([axis.ravel() for axis in axes])
        num_cells = cells_3N.shape[1]
        positions_3L[:, token : token + num_cells] = reached + cells_3N
        reached, token, pads = reached + max(block.height, block.width), token + num_cells, pads[num_cells:]
    positions_3L[:, token:] = reached + np.arange(len(media_L) - token)
    return positions_3L


def ticks(frame_times_s: Sequence[float], tokens_per_second: float, temporal: int = 2) -> list[int]:
    """Time positions of the groups of `temporal` frames of a clip, the first at 0.

    Evenly spaced clips take `arange(T) * second_per_grid_ts * tokens_per_second` cut to whole numbers, in float32 as
    transformers does; others `tokens_per_second` times each group's own begin.
    """
    starts_s = [time_s - frame_times_s[0] for time_s in frame_times_s[::temporal]]
    interval = np.float32(second_per_grid(frame_times_s, temporal)) * np.float32(tokens_per_second)
    even = np.arange(len(starts_s), dtype=np.float32) * interval
    if all(abs(start_s * tokens_per_second - place) <= 1 for start_s, place in zip(starts_s, even, strict=True)):
        return [int(place) for place in even]
    return [int(start_s * tokens_per_second + 1e-6) for start_s in starts_s]
