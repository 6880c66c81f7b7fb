"""Whisper on CUDA, in float16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from qwen_ray.config import SpeechConfig
from qwen_ray.engines import build
from tests.voices import TRUTH, said, sample_chunks, spoken


def test_speech_on_the_gpu_is_the_script_and_the_cpus(whisper_folder):
    config = SpeechConfig(engine="whisper", model=str(whisper_folder), language="en", beam_size=1)
    engines = [build.speech_engine(config, build.resolve(config), cuda=cuda) for cuda in (True, False)]
    assert [engine.precision for engine in engines] == ["float16", "float32"]
    chunks = [chunk for name in TRUTH for chunk in sample_chunks(name)]
    with ThreadPoolExecutor(16) as threads:
        on_gpu, on_cpu = (list(threads.map(lambda one: e.transcribe(one.pcm_int16), chunks)) for e in engines)
    script = spoken(" ".join(truth["script"] for truth in TRUTH.values()))
    heard = [word for segments in on_gpu for word in said(segments)]
    assert len(heard) == len(script)
    assert sum(a != b for a, b in zip(heard, script, strict=True)) <= 2
    starts = [[w.start_s for found in one for segment in found for w in segment.words] for one in (on_gpu, on_cpu)]
    assert starts[0] == pytest.approx(starts[1], abs=0.1)
    for engine in engines:
        engine.close()
