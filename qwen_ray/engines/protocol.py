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
class Medium:
    """A clip, or a still image.

    Attributes:
        frames_THWC: uint8 RGB, H and W multiples of the model's patch size times its merge size; T even, or 1 for an
            image.
        frame_times_s: T times in seconds from the start of the clip, not decreasing; empty for an image. The first
            frame of a clip may have come on screen a moment before its start.
    """

    frames_THWC: npt.NDArray[np.uint8]
    frame_times_s: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["image", "video"]:
        """What the model is told that it sees."""
        return "video" if self.frame_times_s else "image"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one answer are chosen.

    Attributes:
        max_new_tokens: most tokens of the answer.
        temperature: 0 takes the likeliest token; above, draws.
        top_p: nucleus bound of a draw; 1 is none.
        top_k: likeliest tokens to draw from; 0 is all.
        repetition_penalty: 1 is none (`RepetitionPenaltyLogitsProcessor` of transformers: over prompt and answer).
        seed: of a draw, with the request's `clip_id`.
        stop_token_ids: which tokens end the answer; None takes the checkpoint's, empty lets it run to its full length.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CaptionRequest:
    """One question about clips and images, or about none.

    Attributes:
        clip_id: id of the clip; also the key of its random draw when sampling.
        media: what is shown, in order, before the question.
        prompt: what the model is asked.
        system_prompt: system message; empty leaves the checkpoint's own.
        sampling: how this answer is chosen; None is the engine's configuration.
    """

    clip_id: str
    media: tuple[Medium, ...]
    prompt: str
    system_prompt: str = ""
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Caption:
    """An engine's answer.

    Attributes:
        finish_reason: `stop` (the model ended it) or `length` (cut at `max_new_tokens`).
        flags: what happened on the way that a reader of the row should know.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_output_tokens: int
    flags: tuple[str, ...] = ()


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
