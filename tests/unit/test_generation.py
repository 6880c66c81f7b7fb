"""How tokens are chosen: the checkpoint's own way, unless the configuration says otherwise."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from qwen_ray.config import CaptionConfig
from qwen_ray.engines import build
from qwen_ray.engines.generation import settle
from qwen_ray.engines.models import resolve
from qwen_ray.engines.protocol import Sampling
from qwen_ray.engines.qwen_vl.sampling import choose, penalised, streams

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


def _draw(logits, keys, sampling, step=0):
    return choose(logits.expand(len(keys), -1), streams(sampling.seed, keys) + step, sampling).tolist()


def _drawn(sampling, logits, draws=4000):
    return Counter(_draw(logits, [f"clip-{k}" for k in range(draws)], sampling))


def test_draws_follow_temperature_top_k_and_top_p():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    sampling = Sampling(8, temperature=1.0, top_k=3)
    counts = _drawn(sampling, logits)
    wanted = torch.softmax(logits[0, :3], -1).tolist()
    assert set(counts) == {0, 1, 2}
    for token, share in enumerate(wanted):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)  # 4 standard deviations
    nucleus = dataclasses.replace(sampling, top_k=0, top_p=0.5)
    assert set(_drawn(nucleus, logits)) == {0}
    assert set(_drawn(dataclasses.replace(sampling, top_k=1), logits)) == {0}
    assert set(_drawn(dataclasses.replace(sampling, top_k=0), logits)) == {0, 1, 2, 3, 4}


def test_a_draw_depends_on_its_own_key_and_on_the_seed_alone():
    logits, sampling = torch.zeros(1, 50), Sampling(8, temperature=1.0)
    together = _draw(logits, ["a", "b", "c"], sampling)
    assert [_draw(logits, [key], sampling)[0] for key in "cab"] == [together[k] for k in (2, 0, 1)]
    assert len(set(together)) == 3
    assert _draw(logits, ["a", "b", "c"], dataclasses.replace(sampling, seed=1)) != together


def test_draws_over_a_whole_vocabulary_are_finite_and_independent_of_step_and_key():
    """A real vocabulary, many steps: every logit is as likely as any other, and no draw repeats the one before."""
    sampling, logits = Sampling(20, temperature=1.0), torch.zeros(1, 20_000)
    keys = [str(k) for k in range(64)]
    drawn = torch.tensor([_draw(logits, keys, sampling, step) for step in range(20)]).flatten()
    assert len(drawn.unique()) > 1200  # 1,280 draws of 20,000: some 40 meet by chance
    assert drawn.float().mean() == pytest.approx(10_000, abs=4 * 20_000 / 12**0.5 / 1280**0.5)


def test_what_was_said_is_penalised_as_transformers_does():
    logits_BV, seen_BV = torch.randn(3, 40), torch.rand(3, 40) < 0.4
    ids_BL = [row.nonzero()[:, 0] for row in seen_BV]
    penalties = [1.0, 1.05, 2.0]
    got = penalised(logits_BV, seen_BV, torch.tensor(penalties)[:, None])
    for row, (ids_L, penalty) in enumerate(zip(ids_BL, penalties, strict=True)):
        wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids_L[None], logits_BV[row : row + 1].clone())
        torch.testing.assert_close(got[row], wanted[0])
