"""What is known of a video without looking at its pictures."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoInfo:
    """Facts of one file, from reading every packet of it once: headers are often wrong about counts and durations.

    All times are on the video's axis, whose zero is the first displayed frame, or the first sample where there is no
    video.
    """

    container: str
    """Names of the container's format, such as `mov,mp4,m4a,3gp,3g2,mj2`."""
    duration_s: float
    """End of the picture or of the sound, whichever is later."""
    video_duration_s: float
    """End of the picture; 0 without video."""
    width: int
    """Columns of the upright picture, as stored: rotation applied, pixel aspect not; 0 without video."""
    height: int
    """Rows of the upright picture; 0 without video."""
    rotation_deg: int
    """Clockwise turn that makes the stored picture upright: 0, 90, 180 or 270."""
    flipped: bool
    """Whether the stored picture is also mirrored, left to right, before it is turned."""
    sar: str
    """Width to height of one pixel of the upright picture, `n:d`."""
    codec: str
    """Of the selected video track; empty without video."""
    avg_fps: float
    """Frames divided by the time they are on screen."""
    num_frames: int
    """Displayed frames, counted."""
    has_video: bool
    """Cover art is no video."""
    has_audio: bool
    """Whether a sound track with any data was selected."""
    audio_offset_s: float | None
    """Time of the first sample; None where there is none."""
    start_offset_s: float
    """The axis's zero on the file's own clock."""
    tracks: list[dict[str, Any]]
    """Every stream: index, kind, codec, language, selected, and what its kind has."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @property
    def pixel_aspect(self) -> Fraction:
        """`sar` as a number."""
        numerator, _, denominator = self.sar.partition(":")
        return Fraction(int(numerator), int(denominator))
