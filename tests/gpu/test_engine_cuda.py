"""The caption engine on CUDA: in bfloat16 through fast kernels, in float32 through SDPA."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qwen_ray.config import preset
from qwen_ray.engines import build
from qwen_ray.engines.qwen_vl.attention import Flash, segments
from qwen_ray.engines.qwen_vl.engine import QwenVLEngine
from qwen_ray.engines.qwen_vl.family import CLIP_MEAN, CLIP_STD
from qwen_ray.engines.qwen_vl.preprocess import Patching, patchify
from tests.scenes import filmed
from tests.unit.test_attention import LENGTHS, defined, pages_of

CUDA = torch.device("cuda")


def test_patches_on_the_gpu_equal_those_on_the_cpu():
    how = Patching(14, 2, 2, CLIP_MEAN, CLIP_STD)
    frames_THWC = torch.randint(0, 256, (16, 364, 644, 3), dtype=torch.uint8)
    assert torch.equal(patchify(frames_THWC, how), patchify(frames_THWC.cuda(), how).cpu())


@pytest.mark.parametrize(("heads", "groups", "dim"), [(28, 4, 128), (32, 8, 128), (4, 2, 64)])
@pytest.mark.parametrize("splits", [0, 1, 2, 16])
def test_our_kernel_attends_over_pages(heads, groups, dim, splits):
    from qwen_ray.engines.qwen_vl.kernels import attend_pages

    q, cache, rows, wanted = pages_of([*LENGTHS, 2500], heads, groups, dim, torch.bfloat16, CUDA)
    got = attend_pages(q, *cache.layer(0), rows.table, rows.slots_B, rows.lengths_B, splits).cpu().double()
    assert (got - wanted).norm() / wanted.norm() < 4e-3  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_looks_at_segments_and_at_the_end_of_their_keys(causal):
    queries, keys = [70, 1, 3, 200], [70, 90, 7, 300]
    q = torch.randn(sum(queries), 8, 128, dtype=torch.bfloat16)
    k, v = (torch.randn(sum(keys), 2, 128, dtype=torch.bfloat16) for _ in range(2))
    got = Flash().packed(q.cuda(), k.cuda(), v.cuda(), segments(queries, keys, CUDA), causal=causal).cpu().double()
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    wanted = torch.cat([defined(*part, causal) for part in parts])
    assert (got - wanted).norm() / wanted.norm() < 4e-3


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3"])
def test_captions_on_the_gpu_are_exactly_right(name, tmp_path):
    config = dataclasses.replace(preset(name).caption, batch_size=64)
    engine = QwenVLEngine(config, build.resolve(config), cuda=True)
    assert engine.precision == "bfloat16"
    scenes = filmed(tmp_path, 200, model=name)
    answers = [engine.submit(one) for one, _ in scenes]
    right = sum(answer.result().text == truth for answer, (_, truth) in zip(answers, scenes, strict=True))
    engine.close()
    assert right >= 196


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3"])
def test_float32_gives_the_tokens_of_the_cpu(name, tmp_path):
    config = dataclasses.replace(preset(name).caption, dtype="float32")
    requests = [one for one, _ in filmed(tmp_path, 50, model=name)]
    texts = []
    for cuda in (False, True):
        engine = QwenVLEngine(config, build.resolve(config), cuda=cuda)
        texts.append([answer.result().text for answer in [engine.submit(one) for one in requests]])
        engine.close()
    assert texts[0] == texts[1]
