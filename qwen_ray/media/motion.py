"""How much a picture changes from frame to frame, cheaply, for `sampling.by_motion`.

Motion vectors would be cheaper still, but only H.264 and a few older codecs give them, and they count an encoder's
choices: a pan over a flat wall has none, noise has many. Means over blocks smooth sensor noise and grain away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

BLOCKS = 16
"""Blocks along the shorter side."""

Picture = npt.NDArray[np.uint8]


def movement(pictures_HWC: Sequence[Picture]) -> list[float]:
    """Mean squared change of the brightness of blocks, in squares of levels of 0..255, between neighbours; one less
    than there are pictures. Squared, so that what a still picture's noise adds up to does not drown a small figure.
    """
    small = [_blocks(picture) for picture in pictures_HWC]
    return [float(np.square(b - a).mean()) for a, b in pairwise(small)]


def _blocks(picture_HWC: Picture) -> npt.NDArray[np.float32]:
    """Mean brightness of square blocks; an edge that fills none is left out."""
    height, width, _ = picture_HWC.shape
    side = max(1, min(height, width) // BLOCKS)
    rows, columns = height // side, width // side
    cut = picture_HWC[: rows * side, : columns * side]
    sums = cut.reshape(rows, side, columns, side * 3).sum((1, 3), dtype=np.uint32)
    return np.asarray(sums / (side * side * 3), np.float32)
