"""Speech with a known script, cut as the product cuts it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from qwen_ray.api import SAMPLES
from qwen_ray.config import SpeechConfig
from qwen_ray.engines.protocol import Segment
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import DecodeRequest, SpeechChunk

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
