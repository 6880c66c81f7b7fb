"""Where a video's picture cuts to another, by PySceneDetect on every frame, decoded once more and scaled small.

No frame is passed over and nothing is sought, so that a hard cut is the exact frame at which a shot begins. That costs
a whole decode of the file, before the one that takes the frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qwen_ray.media.pictures import thumbnail
from qwen_ray.media.video import every_frame

if TYPE_CHECKING:
    from qwen_ray.media.probe import Examined

HEIGHT, WIDTH = 90, 160
"""Of the small pictures, whatever the shape of the large ones."""

NEIGHBOURS, LEAST_CHANGE = 2, 15.0
"""A boundary changes more than the two steps before and after it do, and by 15 levels at least: the defaults of
PySceneDetect's AdaptiveDetector, as is `CUT_RATIO`."""
CUT_RATIO, LEAST_SHOT_S = 3.0, 0.2
"""How much more, from one frame to the next; and the shortest shot."""
RETURNED = 0.5
"""A flash: before the shortest shot is over, a picture differs from the one before the boundary by less than this share
of what the first one after it does. Nothing has begun; the old shot goes on."""
GRADUAL_RATIO, GRADUAL_STEP_S = 2.5, 0.4
"""Likewise from one to the next of frames so far apart: a dissolve of half a second is a cut to who looks twice a
second. Chosen on the first 10 films of `jobs.bench.shots` with seed 5, a boundary up to two frames outside a transition
allowed: F1 rose from 0.35 to 0.85 (0.86 at a ratio of 2, with three times the false ones), and for hard cuts stayed at
1. ContentDetector at 27 reached 0.49, HistogramDetector 0.49, HashDetector 0.39. On other films, without that slack, it
is 0.76 to 0.80 (the bench)."""


def cut_times_s(examined: Examined, beat: Callable[[], None]) -> list[float]:
    """When each shot but the first begins: the times of their first frames, ascending; of a gradual transition, a
    moment in the middle of it.

    Args:
        examined: A file with a picture that can be decoded.
        beat: Called often while work goes on.
    """
    fps = max(examined.info.avg_fps, 0.001)
    step = max(1, round(GRADUAL_STEP_S * fps))
    cuts = _Scan(CUT_RATIO, max(1, round(LEAST_SHOT_S * fps)))
    gradual = _Scan(GRADUAL_RATIO, 1)
    for nth, (rank, picture_HWC) in enumerate(_small_pictures(examined, beat)):
        cuts.see(rank, picture_HWC)
        if nth % step == 0:
            gradual.see(rank, picture_HWC)
    changes = [rank for _, rank in cuts.found]
    sharp = [rank for rank in changes if rank not in cuts.flashes]
    slow = [(a + b) // 2 for a, b in gradual.found if not any(a - step <= rank <= b + step for rank in changes)]
    return [examined.frame_times_s[rank] for rank in sorted({*sharp, *slow})]


@dataclass(slots=True)
class _Scan:
    """A detector over some of the frames."""

    ratio: float
    least_length: int
    found: list[tuple[int, int]] = field(default_factory=list)
    """(rank of the last picture before, rank of the first one after) each boundary."""
    flashes: set[int] = field(default_factory=set)
    """Those of the ranks after a boundary from which the picture soon returns to what it was before."""
    _recent: deque[npt.NDArray[np.uint8]] = field(init=False)
    _open: list[int] = field(default_factory=list)
    _ranks: list[int] = field(default_factory=list)
    _detector: Any = None

    def __post_init__(self) -> None:
        # the picture before a boundary, the first one after it, and what a flash may return to
        self._recent = deque(maxlen=2 + max(self.least_length - 1, NEIGHBOURS))

    def see(self, rank: int, picture_HWC: npt.NDArray[np.uint8]) -> None:
        """The next picture; boundaries turn up two pictures late."""
        from scenedetect import FrameTimecode
        from scenedetect.detectors import AdaptiveDetector

        if self._detector is None:
            self._detector = AdaptiveDetector(
                self.ratio, self.least_length, window_width=NEIGHBOURS, min_content_val=LEAST_CHANGE
            )
        self._ranks.append(rank)
        self._recent.append(picture_HWC)
        # counted in pictures: the detector measures lengths in nothing else
        for cut in self._detector.process_frame(FrameTimecode(len(self._ranks) - 1, 25.0), picture_HWC):
            if cut.frame_num:
                self.found.append((self._ranks[cut.frame_num - 1], self._ranks[cut.frame_num]))
                self._open.append(cut.frame_num)
        self._judge()

    def _judge(self) -> None:
        """Whether the oldest open boundary is a flash, once `_recent` begins with the picture before it."""
        if not self._open or len(self._ranks) - self._open[0] + 1 < (self._recent.maxlen or 0):
            return
        before, begun, *after = self._recent
        change = RETURNED * _difference(before, begun)
        if any(_difference(before, later) < change for later in after[: self.least_length - 1]):
            self.flashes.add(self._ranks[self._open[0]])
        del self._open[0]


def _difference(a_HWC: npt.NDArray[np.uint8], b_HWC: npt.NDArray[np.uint8]) -> float:
    """Mean over pixels and colours, in levels."""
    return float(np.abs(a_HWC.astype(np.int16) - b_HWC).mean())


def _small_pictures(examined: Examined, beat: Callable[[], None]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """(rank of display, BGR picture) of each frame that decodes."""
    last = -1
    for rank, frame in every_frame(examined, beat):
        if last < rank < len(examined.frame_times_s):
            last = rank
            yield rank, thumbnail(frame, HEIGHT, WIDTH)
