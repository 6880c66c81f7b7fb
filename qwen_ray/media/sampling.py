"""Which frames of a clip a model sees, and at which size. Pure arithmetic: no file, no decoder.

Frames are chosen by time, not by number: index / fps is wrong by up to seconds on variable-rate video.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

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


def at_rate(pts_s: Sequence[float], start_s: float, end_s: float, fps: float, num_frames: int) -> list[int]:
    """Indices of the frames on screen every 1/fps seconds of [start_s, end_s), from its start on.

    Where that would be more than `num_frames`, these are spread over the window as `sample` does.

    Args:
        pts_s: As for `sample`.
        start_s: As for `sample`.
        end_s: As for `sample`.
        fps: Frames a second.
        num_frames: Most frames.
    """
    count = max(1, math.ceil((end_s - start_s) * fps - FUZZ_S))
    if count > num_frames:
        return sample(pts_s, start_s, end_s, num_frames)
    return sample(pts_s, start_s, start_s + count / fps, count)


def key_frames(pts_s: Sequence[float], keys: Sequence[int], start_s: float, end_s: float, num_frames: int) -> list[int]:
    """Indices of the key frames that appear in [start_s, end_s), at most `num_frames` of them, evenly chosen.

    A window in which none appears gives the one frame on screen at its start.

    Args:
        pts_s: As for `sample`.
        keys: Indices of the key frames, ascending.
        start_s: As for `sample`.
        end_s: As for `sample`.
        num_frames: Most frames.
    """
    inside = [k for k in keys if start_s - FUZZ_S <= pts_s[k] < end_s - FUZZ_S]
    if not inside:
        return sample(pts_s, start_s, end_s, 1)
    count = min(len(inside), num_frames)
    return [inside[i * len(inside) // count] for i in range(count)]


CANDIDATES = 4
"""Frames looked at for each frame taken by `by_motion`, so the most by which it can raise the density."""

STILL_SHARE = 0.25
"""Of the frames, however still the picture: movement too small to measure must not go unseen."""


def by_motion(moves: Sequence[float], num_frames: int) -> list[int]:
    """Which of evenly spaced candidate frames to take, more of them where the picture moves.

    The window is cut into spans with equal shares of movement, one for each pair of frames, since the models take
    frames in pairs: the pair stands at the span's start and middle. With even movement that is every n-th frame, as
    `sample` takes them.

    Args:
        moves: How much the picture changes after each candidate, one less than there are candidates, 0 or more.
        num_frames: Most frames; even.

    Returns:
        Ascending indices of candidates without repeats; all where there are no more than `num_frames`.
    """
    count = len(moves) + 1
    if count <= num_frames:
        return list(range(count))
    each = [*moves, moves[-1]]  # nothing tells how long the last candidate stays as it is
    pairs = num_frames // 2
    each = _capped(each, pairs)
    mean = sum(each) / count or 1.0
    weights = [STILL_SHARE * mean + (1 - STILL_SHARE) * move for move in each]
    ends = list(accumulate(weights, initial=0.0))
    starts = [_position(ends, k * ends[-1] / pairs) for k in range(pairs)]
    spots = [spot for a, b in pairwise([*starts, float(count)]) for spot in (a, (a + b) / 2)]
    return _distinct([math.floor(spot + FUZZ_S) for spot in spots], count)


def _capped(moves: list[float], shares: int) -> list[float]:
    """None above the share of one pair: a cut to another picture is no reason for more than one there."""
    for _ in range(8):  # lowering one lowers the share; this comes near enough
        moves = [min(move, sum(moves) / shares) for move in moves]
    return moves


def _position(ends: Sequence[float], mass: float) -> float:
    """Where, counted in candidates, `mass` of the movement has passed."""
    k = max(bisect_right(ends, mass) - 1, 0)
    width = ends[k + 1] - ends[k] if k + 1 < len(ends) else 0.0
    return k + ((mass - ends[k]) / width if width > 0 else 0.0)


def _distinct(indices: list[int], count: int) -> list[int]:
    """The nearest strictly ascending indices below `count`."""
    last = -1
    for k, index in enumerate(indices):
        last = indices[k] = min(max(index, last + 1), count - len(indices) + k)
    return indices


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
