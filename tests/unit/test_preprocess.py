"""Frames to model input, against the definition written out patch by patch."""

import numpy as np
import pytest
import torch

from qwen_ray.engines.qwen_vl.preprocess import Patching, left_pad, patchify, second_per_grid
from qwen_ray.engines.qwen_vl.sampling import SeededSampling


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


@pytest.mark.parametrize("shape", [(2, 28, 28), (4, 56, 84), (8, 84, 112)])
def test_patches_are_cut_in_the_reference_order(shape):
    frames_THWC = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    how = Patching()
    assert torch.equal(patchify(frames_THWC, how), _by_definition(frames_THWC, how))


def test_token_counts_of_known_clips():
    assert Patching().grid(16, 364, 644) == (8, 26, 46)
    assert Patching().num_tokens(16, 364, 644) == 2392  # 9,568 patches of the reference processor, merged by four


@pytest.mark.parametrize(
    ("times_s", "seconds"),
    [((0, 0.5, 1.0, 1.5), 1.0), ((3.0, 4.5), 3.0), ((0, 1, 2, 10), 2 * 10 / 3), ((2.0, 2.0), 0.0), ((0, 1, 2, 2), 2.0)],
)
def test_the_time_step_comes_from_true_times_and_ignores_padding(times_s, seconds):
    assert second_per_grid(times_s) == pytest.approx(seconds)


def test_prompts_are_padded_on_the_left():
    ids_BL, mask_BL = left_pad([[5, 6, 7], [8]], pad=0)
    assert ids_BL.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask_BL.tolist() == [[1, 1, 1], [0, 0, 1]]


def _draws(keys, logits, temperature=1.0, top_p=1.0):
    processor = SeededSampling(keys, 0, temperature, top_p)
    return processor(None, logits.expand(len(keys), -1)).argmax(-1)


def test_sampling_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = _draws([f"clip-{k}" for k in range(20_000)], probabilities.log()[None])
    observed = torch.bincount(draws, minlength=4) / len(draws)
    assert torch.allclose(observed, probabilities, atol=0.012)  # 3.4 standard deviations of the largest


def test_sampling_stays_inside_the_nucleus():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None]
    draws = _draws([f"clip-{k}" for k in range(2_000)], logits, top_p=0.6)
    assert set(draws.tolist()) == {0, 1}


def test_a_draw_depends_on_its_own_key_alone():
    logits = torch.zeros(1, 50)
    together = _draws(["a", "b", "c"], logits)
    assert [_draws([key], logits).item() for key in "cab"] == together[[2, 0, 1]].tolist()
    assert len(set(together.tolist())) == 3
