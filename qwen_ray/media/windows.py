"""Cutting a video's time into clips, of equal length or shot by shot. Pure arithmetic: no file, no decoder.

The number of clips follows from the frames there are, never from a duration alone: a damaged header claims years.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

FUZZ_S = 1e-6
"""Times come from ticks of 1/90000 s or coarser through a float; a microsecond is noise."""


def fixed_windows(
    frame_times_s: Sequence[float], duration_s: float, window_s: float, *, sliver_s: float = 1e-3
) -> list[tuple[float, float]]:
    """Windows of `window_s` seconds that cover [0, duration_s], the last one shorter, stills longer.

    A remainder of at most `sliver_s` (give the time of one frame) joins the window before it: as a clip of its own it
    would show no picture that the window before it has not shown. Starts are multiples of `window_s`, so that they do
    not depend on the duration. Windows in a row in which no frame appears are one, of the same still all along. So
    there are at most two for each frame.

    Args:
        frame_times_s: When each frame appears, in seconds, ascending from 0.
        duration_s: Seconds of picture; nan, negative or zero (not known) gives one window.
        window_s: Seconds, more than 0.
        sliver_s: Longest remainder in seconds that gets no window of its own.

    Returns:
        (start_s, end_s) in order, at least one, the last end being `duration_s`.
    """
    if not duration_s > 0:
        return [(0.0, 0.0)]
    count = max(1, math.ceil((duration_s - max(sliver_s, 0.0) - FUZZ_S) / window_s))
    first = {min(int((time_s + FUZZ_S) / window_s), count - 1) for time_s in frame_times_s} | {0}
    starts = [nth * window_s for nth in sorted(first | {nth + 1 for nth in first if nth + 1 < count})]
    return list(zip(starts, [*starts[1:], duration_s], strict=True))


def shot_windows(
    frame_times_s: Sequence[float], cuts_s: Sequence[float], duration_s: float, *, longest_s: float, shortest_s: float
) -> list[tuple[float, float]]:
    """Windows that cover [0, duration_s] shot by shot.

    A shot shorter than `shortest_s` joins the one before it, the first one the next. One longer than `longest_s` is cut
    into equal parts, but into no more than it has frames.

    Args:
        frame_times_s: When each frame appears, in seconds, ascending from 0.
        cuts_s: When each shot but the first begins, ascending.
        duration_s: Seconds of picture; nan, negative or zero (not known) gives one window.
        longest_s: Seconds, more than 0.
        shortest_s: Seconds, 0 or more.

    Returns:
        (start_s, end_s) in order, at least one, the last end being `duration_s`.
    """
    if not duration_s > 0:
        return [(0.0, 0.0)]
    least_s, starts = max(shortest_s, FUZZ_S), [0.0]
    for cut_s, end_s in pairwise([*cuts_s, duration_s]):
        if cut_s - starts[-1] >= least_s and end_s - cut_s >= least_s:
            starts.append(cut_s)
    return [part for shot in pairwise([*starts, duration_s]) for part in _equal_parts(frame_times_s, *shot, longest_s)]


def _equal_parts(
    frame_times_s: Sequence[float], start_s: float, end_s: float, longest_s: float
) -> list[tuple[float, float]]:
    num_frames = bisect_left(frame_times_s, end_s) - bisect_left(frame_times_s, start_s)
    count = max(1, min(math.ceil((end_s - start_s) / longest_s - FUZZ_S), num_frames))
    edges = [start_s + (end_s - start_s) * k / count for k in range(count)]
    return list(pairwise([*edges, end_s]))
