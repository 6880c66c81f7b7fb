"""Whisper on CUDA, in float16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from qwen_ray.config import SpeechConfig
from qwen_ray.engines import build
from qwen_ray.engines.protocol import Segment
from tests.voices import TRUTH, said, sample_chunks, spoken


def _hear(config: SpeechConfig, *, cuda: bool) -> list[Segment]:
    """All samples' segments, from calls that share batches."""
    engine = build.speech_engine(config, build.resolve(config), cuda=cuda)
    assert engine.precision == ("float16" if cuda else "float32")
    chunks = [chunk for name in TRUTH for chunk in sample_chunks(name)]
    with ThreadPoolExecutor(len(chunks)) as threads:
        found = list(threads.map(engine.transcribe, [chunk.pcm_int16 for chunk in chunks]))
    engine.close()
    return [segment for segments in found for segment in segments]


def test_speech_on_the_gpu_is_the_script_and_the_cpus(whisper_folder):
    config = SpeechConfig(engine="whisper", model=str(whisper_folder), language="en", beam_size=1)
    on_gpu, on_cpu = _hear(config, cuda=True), _hear(config, cuda=False)
    heard, script = said(on_gpu), spoken(" ".join(truth["script"] for truth in TRUTH.values()))
    assert len(heard) == len(script)
    assert sum(a != b for a, b in zip(heard, script, strict=True)) <= 2
    starts = [[word.start_s for segment in found for word in segment.words] for found in (on_gpu, on_cpu)]
    assert starts[0] == pytest.approx(starts[1], abs=0.1)
