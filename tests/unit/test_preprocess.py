"""Frames to model input, against the definition written out patch by patch."""

import numpy as np
import pytest
import torch

from qwen_ray.engines.qwen_vl.family import CLIP_MEAN, CLIP_STD, FAMILIES, HALF, patch_times
from qwen_ray.engines.qwen_vl.preprocess import Patching, patchify, second_per_grid

QWEN2_5 = Patching(14, 2, 2, CLIP_MEAN, CLIP_STD)
QWEN3 = Patching(16, 2, 2, HALF, HALF)


def _by_definition(frames_THWC, how):
    """Patch by patch: time, then cells by row, then the patches of a cell by row; inside: channel, time, y, x."""
    num_frames, height, width, _ = frames_THWC.shape
    mean, std = torch.tensor(how.mean) * 255, torch.tensor(how.std) * 255
    cell = how.patch * how.merge
    patches = []
    for t in range(0, num_frames, how.temporal):
        for cell_y in range(0, height, cell):
            for cell_x in range(0, width, cell):
                for y in range(cell_y, cell_y + cell, how.patch):
                    for x in range(cell_x, cell_x + cell, how.patch):
                        block = frames_THWC[t : t + how.temporal, y : y + how.patch, x : x + how.patch]
                        patches.append(((block.float() - mean) / std).permute(3, 0, 1, 2).reshape(-1))
    return torch.stack(patches)


@pytest.mark.parametrize("how", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 2, 3), (8, 3, 4)])
def test_patches_are_cut_in_the_reference_order(how, shape):
    frames, rows, columns = shape
    size = (frames, rows * how.patch * how.merge, columns * how.patch * how.merge, 3)
    frames_THWC = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    assert torch.equal(patchify(frames_THWC, how), _by_definition(frames_THWC, how))


def test_token_counts_of_known_clips():
    assert QWEN2_5.grid(16, 364, 644) == (8, 26, 46)
    assert QWEN2_5.num_tokens(16, 364, 644) == 2392  # 9,568 patches of the reference processor, merged by four


@pytest.mark.parametrize(
    ("times_s", "seconds"),
    [((0, 0.5, 1.0, 1.5), 1.0), ((3.0, 4.5), 3.0), ((0, 1, 2, 10), 2 * 10 / 3), ((2.0, 2.0), 0.0), ((0, 1, 2, 2), 2.0)],
)
def test_the_time_step_comes_from_true_times_and_ignores_padding(times_s, seconds):
    assert second_per_grid(times_s) == pytest.approx(seconds)


def test_qwen3_reads_the_time_of_every_pair_of_frames_and_qwen2_5_none():
    times_s, size = (-0.02, 0.0, 1.5, 2.25, 5.0, 11.3), (6, 64, 96)
    text = FAMILIES["qwen3_vl"].placeholders(times_s, size, QWEN3)
    pads = "<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
    assert text == f"<0.0 seconds>{pads}<1.9 seconds>{pads}<8.2 seconds>{pads}"  # 1.875, and 8.15 in binary is above
    assert FAMILIES["qwen2_5_vl"].placeholders(times_s, (6, 56, 84), QWEN2_5) == "<|video_pad|>" * 18


def test_the_time_of_a_pair_is_its_middle_whatever_the_spacing():
    assert patch_times((0.0, 1.0, 1.0, 5.0), 2) == [0.5, 3.0]
