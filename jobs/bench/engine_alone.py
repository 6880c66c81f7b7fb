"""The caption engine of a configuration with nothing around it, on random frames; prints one line of JSON.

python -m jobs.bench.engine_alone '{"job": {...}, "height": 360, "width": 640}'
"""

from __future__ import annotations

import json
import sys
import time
from fractions import Fraction

import torch

from jobs.bench.engine import Load, answer
from qwen_ray.config import JobConfig, from_dict
from qwen_ray.engines import build
from qwen_ray.media.sampling import frame_size


def measure(job: JobConfig, height: int, width: int) -> dict[str, object]:
    """Speed on clips of files of this size, all of which get all their tokens."""
    assert job.caption is not None
    cuda, decode = torch.cuda.is_available(), job.decode
    limits = {"min_pixels": decode.min_pixels, "max_pixels": decode.max_pixels}
    size = frame_size(height, width, Fraction(1), multiple=decode.size_multiple, **limits)
    model = build.resolve(job.caption)
    caption = build.settle(job.caption, model)
    load = Load((decode.num_frames, *size), caption.max_new_tokens, caption.prompts[0].text)
    began = time.monotonic()
    engine = build.caption_engine(caption, model, cuda=cuda)
    load_s = time.monotonic() - began
    answer(engine, load.requests(min(32, caption.batch_size)))  # the first ones load kernels
    seconds, captions = answer(engine, load.requests(caption.batch_size))
    engine.close()
    return {
        "prompt_tokens": captions[0].num_prompt_tokens,
        "new_tokens": captions[0].num_output_tokens,
        "load_s": load_s,
        "clips_per_s": len(captions) / seconds,
        "frames": [decode.num_frames, *size],
        "batch_size": caption.batch_size,
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }


def main() -> None:
    """Measure what the argument describes."""
    facts = json.loads(sys.argv[1])
    print(json.dumps(measure(from_dict(facts["job"]), facts["height"], facts["width"])))


if __name__ == "__main__":
    main()
