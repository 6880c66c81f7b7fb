"""The caption engine with nothing around it, on random frames of a given shape; prints one line of JSON.

python -m jobs.bench.engine_alone '{"job": {...}, "height": 360, "width": 640}'
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from fractions import Fraction

import numpy as np
import torch

from qwen_ray.config import JobConfig, from_dict
from qwen_ray.engines import build
from qwen_ray.engines.protocol import Caption, CaptionEngine, CaptionRequest, Medium
from qwen_ray.media.sampling import frame_size

FRAME_EVERY_S = 0.75


class Load:
    """Distinct requests for one configuration."""

    def __init__(self, job: JobConfig, height: int, width: int) -> None:
        assert job.caption is not None
        decode = job.decode
        limits = {"min_pixels": decode.min_pixels, "max_pixels": decode.max_pixels}
        size = frame_size(height, width, Fraction(1), multiple=decode.size_multiple, **limits)
        self.shape = (decode.num_frames, *size, 3)
        self._prompt = job.caption.prompts[0].text
        self._draw = np.random.default_rng(0)

    def answer(self, engine: CaptionEngine, count: int) -> tuple[float, list[Caption]]:
        """Seconds that `count` requests take, and the answers."""
        frames = [self._draw.integers(0, 256, self.shape, dtype=np.uint8) for _ in range(count)]
        times = tuple(FRAME_EVERY_S * k for k in range(self.shape[0]))
        started = time.monotonic()
        asked = [
            engine.submit(CaptionRequest(str(k), (Medium(one, times),), self._prompt)) for k, one in enumerate(frames)
        ]
        answers = [answer.result() for answer in asked]
        return time.monotonic() - started, answers


def measure(job: JobConfig, height: int, width: int) -> dict[str, object]:
    """Speed with all tokens, and the share of the time that prompts take."""
    assert job.caption is not None
    load, cuda = Load(job, height, width), torch.cuda.is_available()
    model = build.resolve(job.caption)
    caption = build.settle(job.caption, model)
    count = caption.batch_size
    seconds = {}
    for name, config in (("full", caption), ("prefill", dataclasses.replace(caption, max_new_tokens=1))):
        started = time.monotonic()
        engine = build.caption_engine(config, model, cuda=cuda)
        seconds[f"load_{name}"] = time.monotonic() - started
        load.answer(engine, caption.batch_size)  # warms kernels and the memory pool up
        seconds[name], answers = load.answer(engine, count)
        engine.close()
        del engine
        if name == "full":
            tokens = {"prompt_tokens": answers[0].num_prompt_tokens, "new_tokens": answers[0].num_output_tokens}
        if cuda:
            torch.cuda.empty_cache()
    return tokens | {
        "load_s": seconds["load_full"],
        "clips_per_s": count / seconds["full"],
        "prefill_share": seconds["prefill"] / seconds["full"],
        "frames": load.shape[:3],
        "batch_size": caption.batch_size,
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }


def main() -> None:
    """Measure what the argument describes."""
    facts = json.loads(sys.argv[1])
    print(json.dumps(measure(from_dict(facts["job"]), facts["height"], facts["width"])))


if __name__ == "__main__":
    main()
