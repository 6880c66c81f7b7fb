"""Cutting a video's time into clips of equal length. Pure arithmetic: no file, no decoder."""

from __future__ import annotations

import math

FUZZ_S = 1e-6
"""Times come from ticks of 1/90000 s or coarser through a float; a microsecond is noise."""


def fixed_windows(duration_s: float, window_s: float, *, sliver_s: float = 1e-3) -> list[tuple[float, float]]:
    """Windows of `window_s` seconds that cover [0, duration_s], the last one shorter.

    A remainder of at most `sliver_s` (give the time of one frame) joins the window before it: as a clip of its own it
    would show no picture that the window before it has not shown. Starts are multiples of `window_s`, so that they do
    not depend on the duration.

    Args:
        duration_s: Seconds of picture; nan, negative or zero (not known) gives one window.
        window_s: Seconds, more than 0.
        sliver_s: Longest remainder in seconds that gets no window of its own.

    Returns:
        (start_s, end_s) in order, at least one, the last end being `duration_s`.
    """
    if not duration_s > 0:
        return [(0.0, 0.0)]
    count = max(1, math.ceil((duration_s - max(sliver_s, 0.0) - FUZZ_S) / window_s))
    starts = [i * window_s for i in range(count)]
    return list(zip(starts, [*starts[1:], duration_s], strict=True))
