"""Which frames of a clip a model sees, and at which size. Pure arithmetic: no file, no decoder.

Frames are chosen by time, not by number: index / fps is wrong by up to seconds on variable-rate video.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction

FUZZ_S = 1e-6
"""Frame times reach us through floats; a microsecond never decides which frame is on screen."""


def sample(pts_s: Sequence[float], start_s: float, end_s: float, num_frames: int) -> list[int]:
    """Indices of the frames on screen at `num_frames` evenly spaced times of [start_s, end_s).

    On screen at t is the last frame with pts <= t. Before the first frame of all it is the first one in the window.

    Args:
        pts_s: When each frame appears, in seconds, ascending.
        start_s: First of the times.
        end_s: Where the times end, exclusive.
        num_frames: How many times to look.

    Returns:
        Ascending indices into `pts_s` without repeats: fewer than `num_frames` where the window has fewer different
        frames, none where it has none.
    """
    step = (end_s - start_s) / num_frames
    shown = [bisect_right(pts_s, start_s + i * step + FUZZ_S) - 1 for i in range(num_frames)]
    if shown and shown[0] < 0 and not _begins_inside(pts_s, start_s, end_s):
        return []
    return sorted({max(index, 0) for index in shown})


def _begins_inside(pts_s: Sequence[float], start_s: float, end_s: float) -> bool:
    return bisect_left(pts_s, start_s - FUZZ_S) < bisect_left(pts_s, max(end_s - FUZZ_S, start_s + FUZZ_S))


def frame_size(
    height: int, width: int, sar: Fraction, *, multiple: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The size to which frames are resized: Qwen's `smart_resize`, on the shape that a viewer sees.

    Within `min_pixels`..`max_pixels`, both sides multiples of `multiple`, the aspect as near as that allows. Unlike
    the reference it never raises: a strip that is too long for the budget is shortened to fit.

    Args:
        height: Rows of the upright picture.
        width: Columns of the upright picture.
        sar: Width of one upright pixel divided by its height.
        multiple: Patch size times spatial merge: 28 (Qwen2.5-VL) or 32 (Qwen3-VL).
        min_pixels: Fewest pixels.
        max_pixels: Most pixels; at least multiple**2.

    Returns:
        (height, width) in pixels.
    """
    shown_h, shown_w = height, max(1, round(width * sar))
    out_h, out_w = (max(multiple, round(side / multiple) * multiple) for side in (shown_h, shown_w))
    if out_h * out_w > max_pixels:
        beta = math.sqrt(shown_h * shown_w / max_pixels)
        out_h, out_w = (max(multiple, math.floor(s / beta / multiple) * multiple) for s in (shown_h, shown_w))
    elif out_h * out_w < min_pixels:
        beta = math.sqrt(min_pixels / (shown_h * shown_w))
        out_h, out_w = (math.ceil(side * beta / multiple) * multiple for side in (shown_h, shown_w))
    return _fit(out_h, out_w, multiple, max_pixels)


def _fit(height: int, width: int, multiple: int, max_pixels: int) -> tuple[int, int]:
    """Shorten the longer side of an extreme strip until it is within the budget; others pass unchanged."""
    if height * width <= max_pixels:
        return height, width
    short = min(height, width)
    long = max(multiple, max_pixels // short // multiple * multiple)
    return (long, short) if height > width else (short, long)
