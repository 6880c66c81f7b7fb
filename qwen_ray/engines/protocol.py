"""What a caption engine and a speech engine are to the rest of the product: a few values and two methods each.

A stage only knows these protocols, so an engine can be replaced by configuration. Engines are thread-safe: a stage
calls from many threads, and the engine makes its own batches of what is waiting.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

# T frames, H height, W width, C = 3 colours (RGB)


@dataclass(frozen=True, slots=True)
class CaptionRequest:
    """One question, about one clip or about none.

    Attributes:
        clip_id: id of the clip; also the key of its random draw when sampling.
        frames_THWC: uint8 RGB, T even, H and W multiples of the model's patch size times its merge size; None for a
            question that is only text.
        frame_times_s: T times in seconds from the start of the clip, not decreasing. The first frame of a clip may have
            come on screen a moment before its start.
        prompt: what the model is asked.
        system_prompt: system message; empty leaves the checkpoint's own.
    """

    clip_id: str
    frames_THWC: npt.NDArray[np.uint8] | None
    frame_times_s: tuple[float, ...]
    prompt: str
    system_prompt: str = ""


@dataclass(frozen=True, slots=True)
class Caption:
    """An engine's answer. `finish_reason` is `stop` (the model ended it) or `length` (cut at `max_new_tokens`)."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_output_tokens: int


class CaptionEngine(Protocol):
    """Answers caption requests. `precision` is the arithmetic in use, such as `bfloat16`."""

    precision: str

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """Queue one request.

        The future raises ResourceError (it does not fit), RequestError (the model failed on it), or EngineError (the
        process is broken, and so is every other request).
        """

    def close(self) -> None:
        """Answer what is waiting, then stop the engine's threads. Nothing may be submitted afterwards."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word and its times in seconds from the start of the chunk; `aligned` says that they come from an alignment."""

    word: str
    start_s: float
    end_s: float
    probability: float
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of transcript; times in seconds from the start of the chunk."""

    text: str
    start_s: float
    end_s: float
    language: str
    avg_logprob: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()
    flags: tuple[str, ...] = ()


class SpeechEngine(Protocol):
    """Transcribes chunks of speech."""

    precision: str

    def transcribe(self, pcm: npt.NDArray[np.int16]) -> list[Segment]:
        """Segments of 16 kHz mono int16 samples, in order. Raises ResourceError, RequestError or EngineError."""

    def close(self) -> None:
        """Free the model."""
