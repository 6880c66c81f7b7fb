"""Engines without a model: instant and deterministic, for tests and dry runs of everything around an engine.

The caption names what was received (frame count, size, a digest of the pixels), so a test can tell that clip k's frames
led to clip k's row.
"""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_ray.engines.protocol import Caption, CaptionRequest, Segment


class FakeCaptionEngine:
    """Describes the frames instead of what they show, and repeats a text that comes without frames.

    With `model` = `deadly:CLIP_ID` its process dies of that clip; with `card:FOLDER` it notes there which GPU it got;
    with `slow:SECONDS` each answer takes so long, however many are waiting.
    """

    precision = "none"

    def __init__(self, model: str = "") -> None:
        self._deadly = model.removeprefix("deadly:") if model.startswith("deadly:") else None
        self._seconds = float(model.removeprefix("slow:")) if model.startswith("slow:") else 0.0
        note_card("caption", model)

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """Answer at once."""
        if request.clip_id == self._deadly:
            os._exit(1)
        text = " and ".join(_seen(medium.frames_THWC) for medium in request.media) or request.prompt
        answer: Future[Caption] = Future()
        caption = Caption(text, "stop", len(request.prompt.split()), len(text.split()))
        if self._seconds:
            threading.Timer(self._seconds, answer.set_result, [caption]).start()
        else:
            answer.set_result(caption)
        return answer

    def close(self) -> None:
        """Nothing to free."""


def _seen(frames_THWC: npt.NDArray[np.uint8]) -> str:
    num_frames, height, width, _ = frames_THWC.shape
    digest = hashlib.blake2b(np.ascontiguousarray(frames_THWC).tobytes(), digest_size=4).hexdigest()
    return f"{num_frames} frames of {width}x{height}, digest {digest}"


def note_card(engine: str, model: str) -> None:
    """With `model` = `card:FOLDER`, write a file there that tells which GPUs Ray gave this process."""
    if model.startswith("card:"):
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        Path(model.removeprefix("card:"), f"{engine}-{os.getpid()}").write_text(cards)


class FakeSpeechEngine:
    """Says how long the chunk is; `model` = `card:FOLDER` as for captions."""

    precision = "none"

    def __init__(self, model: str = "") -> None:
        note_card("speech", model)

    def transcribe(self, pcm: npt.NDArray[np.int16]) -> list[Segment]:
        """One segment over the whole chunk."""
        duration_s = len(pcm) / 16_000
        return [Segment(f"{duration_s:.2f} seconds of speech", 0.0, duration_s, "en", 0.0, 0.0)]

    def close(self) -> None:
        """Nothing to free."""
