"""Speech with a known script, cut as the product cuts it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qwen_ray.api import SAMPLES
from qwen_ray.config import SpeechConfig
from qwen_ray.engines.protocol import Segment
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import DecodeRequest, SpeechChunk

SPEECH = Path(__file__).parent / "assets" / "speech.ogg"
"""10.4 s of espeak-ng (-s 140), Opus 24 kbit/s: half a second of silence, a sentence, a pause, a sentence, silence."""
SPEECH_TRUTH = [
    (0.51, 4.91, "The weather today is sunny and warm, with a light wind from the west."),
    (6.59, 9.44, "Please open the window before you leave the room."),
]
"""(start_s, end_s, text), from the level of the sound before it was encoded."""

TRUTH = json.loads((SAMPLES / "truth.json").read_text())


def sample_chunks(name: str) -> list[SpeechChunk]:
    """Chunks of a sample video."""
    request = DecodeRequest(path=str(SAMPLES / name), want_frames=False, speech=SpeechConfig())
    return [event for event in decode_events(request) if isinstance(event, SpeechChunk)]


def spoken(text: str) -> list[str]:
    """Its words, as they are compared."""
    return re.findall(r"[a-z']+", text.lower())


def said(segments: Sequence[Segment]) -> list[str]:
    """The words of some segments."""
    return spoken(" ".join(segment.text for segment in segments))


def end_to_end(chunks: Sequence[SpeechChunk], pause_s: float = 0.5) -> np.ndarray:
    """One chunk out of several."""
    pause = np.zeros(round(16_000 * pause_s), np.int16)
    return np.concatenate([part for chunk in chunks for part in (chunk.pcm_int16, pause)])
