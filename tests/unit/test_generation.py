"""How tokens are chosen: the checkpoint's own way, unless the configuration says otherwise."""

import dataclasses
import json
from collections import Counter

import pytest
import torch

from qwen_ray.config import CaptionConfig
from qwen_ray.engines import build
from qwen_ray.engines.generation import settle
from qwen_ray.engines.models import resolve
from qwen_ray.engines.qwen_vl.sampling import SeededSampling

STATED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def _choice(config):
    return config.temperature, config.top_p, config.top_k, config.repetition_penalty


def test_what_the_checkpoint_states_is_taken_where_the_configuration_is_silent():
    assert _choice(settle(CaptionConfig(), STATED)) == (0.7, 0.8, 20, 1.05)
    assert _choice(settle(CaptionConfig(temperature=0.0, top_k=5), STATED)) == (0.0, 0.8, 5, 1.05)


@pytest.mark.parametrize("stated", [None, {}, {"temperature": 0.7, "top_k": 20}, {"do_sample": False, "top_p": 0.1}])
def test_a_checkpoint_that_does_not_sample_decodes_greedily(stated):
    assert _choice(settle(CaptionConfig(), stated)) == (0.0, 1.0, 0, 1.0)


def test_settling_twice_changes_nothing():
    once = settle(CaptionConfig(), STATED)
    assert settle(once, {}) == once


def test_a_folders_generation_config_is_read(tmp_path):
    source = resolve("builtin:tiny-qwen2.5-vl").location
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(f"{source}/{name}")
    (tmp_path / "generation_config.json").write_text(json.dumps(STATED))
    config = CaptionConfig(model=str(tmp_path))
    assert _choice(build.settle(config, build.resolve(config))) == (0.7, 0.8, 20, 1.05)


def _drawn(config, logits, draws=4000):
    sampling = SeededSampling([f"clip-{k}" for k in range(draws)], config)
    return Counter(sampling(None, logits.expand(draws, -1)).argmax(-1).tolist())


def test_draws_follow_temperature_top_k_and_top_p():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    config = settle(CaptionConfig(temperature=1.0, top_k=3), None)
    counts = _drawn(config, logits)
    wanted = torch.softmax(logits[0, :3], -1).tolist()
    assert set(counts) == {0, 1, 2}
    for token, share in enumerate(wanted):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)  # 4 standard deviations
    nucleus = dataclasses.replace(config, top_k=0, top_p=0.5)
    assert set(_drawn(nucleus, logits)) == {0}
    assert set(_drawn(dataclasses.replace(config, top_k=1), logits)) == {0}
    assert set(_drawn(dataclasses.replace(config, top_k=0), logits)) == {0, 1, 2, 3, 4}


def test_a_draw_depends_on_its_own_key_and_on_the_seed_alone():
    logits, config = torch.zeros(1, 50), settle(CaptionConfig(temperature=1.0), None)

    def draws(keys, config=config):
        return SeededSampling(keys, config)(None, logits.expand(len(keys), -1)).argmax(-1).tolist()

    together = draws(["a", "b", "c"])
    assert [draws([key])[0] for key in "cab"] == [together[k] for k in (2, 0, 1)]
    assert len(set(together)) == 3
    assert draws(["a", "b", "c"], dataclasses.replace(config, seed=1)) != together


def test_draws_over_a_whole_vocabulary_are_finite_and_independent_of_step_and_key():
    """A real vocabulary, many steps: every logit is as likely as any other, and no draw repeats the one before."""
    config, logits = settle(CaptionConfig(temperature=1.0), None), torch.zeros(64, 20_000)
    sampling = SeededSampling([str(k) for k in range(64)], config)
    noisy = [sampling(None, logits) for _ in range(20)]
    assert all(torch.isfinite(scores).all() for scores in noisy)
    drawn = torch.stack([scores.argmax(-1) for scores in noisy]).flatten()
    assert len(drawn.unique()) > 1200  # 1,280 draws of 20,000: some 40 meet by chance
    assert drawn.float().mean() == pytest.approx(10_000, abs=4 * 20_000 / 12**0.5 / 1280**0.5)
