"""What is asked of a decode and what it answers, in the order of the answers. Free of av, so that a parent stays light.

Legend: T frames, H rows, W columns, C the three colours red, green, blue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qwen_ray.config import DecodeConfig, SpeechConfig
from qwen_ray.media.info import VideoInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """One file, and what is wanted of it."""

    path: str
    """A local file."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """How it is cut into clips and frames, and how long and with how much memory that may go on."""
    speech: SpeechConfig | None = None
    """How speech is found in its sound; None leaves the sound alone."""
    windows: tuple[tuple[float, float], ...] = ()
    """(start_s, end_s) of the clips, in order, instead of those that `decode` makes."""
    want_frames: bool = True
    """Whether clips are wanted."""
    skip_clips: frozenset[int] = frozenset()
    """Indices of clips that are done already: they are not decoded and give no event."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The first answer: the file is readable."""

    info: VideoInfo
    """Facts of the file."""
    windows: list[tuple[float, float]]
    """(start_s, end_s) of every clip, skipped ones too; empty without video or where no frames are wanted."""
    decoder: str
    """What decodes its picture: a name of `decoders.Name`."""


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """One clip's pictures."""

    index: int
    """Of the clip within its video."""
    start_s: float
    """Where the clip begins."""
    end_s: float
    """Where the clip ends."""
    frames_THWC: npt.NDArray[np.uint8]
    """uint8, contiguous; T is even, so that a model may take frames in pairs."""
    frame_times_s: list[float]
    """When each frame appears, T values; the first may be a little earlier than `start_s`, having stayed on screen."""
    num_requested: int
    """Different frames that were wanted: fewer than asked for where the clip has fewer."""
    num_decoded: int
    """Different frames that were obtained."""
    num_repaired: int
    """Of these, how many the decoder built on damaged data: they may show errors or an older moment."""
    padded: bool
    """Whether the last frame stands twice to make T even."""
    decoder: str
    """What decoded them."""


@dataclass(frozen=True, slots=True)
class ClipFailed:
    """A clip of which no picture could be had."""

    index: int
    """Of the clip within its video."""
    start_s: float
    """Where the clip begins."""
    end_s: float
    """Where the clip ends."""
    error_type: str
    """A key of `errors.RETRYABLE`."""
    message: str
    """For people."""


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """A stretch of sound with speech in it."""

    start_s: float
    """On the video's axis; negative where the sound begins before the picture."""
    end_s: float
    """start_s + len(pcm_int16) / 16000."""
    pcm_int16: npt.NDArray[np.int16]
    """int16 [N], 16 kHz, mono."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last answer."""

    num_errors_video: int
    """Pieces of the picture's data that could not be read or decoded."""
    num_errors_audio: int
    """Likewise of the sound's."""
    audio_error: tuple[str, str] | None
    """(error_type, message) where the sound was wanted and could not be had to its end."""
    damaged: bool
    """Whether anything was wrong with the file: errors, repaired frames, or less data than its header promises."""


Event = Opened | ClipFrames | ClipFailed | SpeechChunk | Done

Beat = Callable[[], None]
"""Called often while work goes on: a sign of life."""
