"""The caption engine on CUDA, in bfloat16."""

from __future__ import annotations

import torch

from qwen_ray.config import preset
from qwen_ray.engines import build
from qwen_ray.engines.qwen_vl.engine import QwenVLEngine
from qwen_ray.engines.qwen_vl.preprocess import Patching, patchify
from tests.scenes import filmed

TINY = preset("tiny").caption


def test_patches_on_the_gpu_equal_those_on_the_cpu():
    frames_THWC = torch.randint(0, 256, (16, 364, 644, 3), dtype=torch.uint8)
    assert torch.equal(patchify(frames_THWC, Patching()), patchify(frames_THWC.cuda(), Patching()).cpu())


def test_captions_on_the_gpu_are_exactly_right(tmp_path):
    engine = QwenVLEngine(TINY, build.resolve(TINY), cuda=True)
    assert engine.precision == "bfloat16"
    scenes = filmed(tmp_path, 200)
    answers = [engine.submit(one) for one, _ in scenes]
    right = sum(answer.result().text == truth for answer, (_, truth) in zip(answers, scenes, strict=True))
    engine.close()
    assert right >= 196
