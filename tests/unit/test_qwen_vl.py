"""The caption engine on the embedded model: right captions, whatever shares a batch, and only from right frames."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil

import numpy as np
import pytest

from qwen_ray.config import preset, set_paths
from qwen_ray.engines import build
from qwen_ray.engines.models import resolve
from qwen_ray.engines.qwen_vl.engine import QwenVLEngine
from qwen_ray.errors import ConfigError, RequestError, ResourceError
from tests.scenes import filmed, request

TINY = preset("tiny").caption


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return filmed(tmp_path_factory.mktemp("scenes"), 50)


@pytest.fixture(scope="module")
def engine():
    engine = QwenVLEngine(TINY, build.resolve(TINY), cuda=False)
    yield engine
    engine.close()


def _ask(engine, requests):
    answers = [engine.submit(one) for one in requests]
    return [answer.result() for answer in answers]


def _right(engine, scenes, change=lambda frames_THWC: frames_THWC):
    clips = [(one.clip_id, one.media[0]) for one, _ in scenes]
    changed = [request(name, change(clip.frames_THWC), list(clip.frame_times_s)) for name, clip in clips]
    return sum(got.text == truth for got, (_, truth) in zip(_ask(engine, changed), scenes, strict=True))


def test_captions_of_unseen_combinations_are_exactly_right(engine, scenes):
    assert _right(engine, scenes) >= 49


def _is_directional(truth):
    return any(word in truth for word in ("left", "right", "up", "down"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("channels swapped", lambda frames_THWC: frames_THWC[..., ::-1]),
        ("mirrored", lambda frames_THWC: frames_THWC[:, :, ::-1]),
        ("upside down", lambda frames_THWC: frames_THWC[:, ::-1]),
        ("reversed", lambda frames_THWC: frames_THWC[::-1]),
        ("one moment all along", lambda frames_THWC: np.repeat(frames_THWC[:1], len(frames_THWC), axis=0)),
    ],
)
def test_wrong_frames_give_wrong_captions(engine, scenes, name, change):
    moving = [(one, truth) for one, truth in scenes if _is_directional(truth)]
    assert _right(engine, moving) >= len(moving) - 1
    assert _right(engine, moving, change) <= 0.6 * len(moving), name


def test_reversed_frames_reverse_the_motion(engine, scenes):
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}
    flipped = [
        (
            one,
            " ".join(
                opposite.get(word.strip("."), word.strip(".")) + "." * word.endswith(".") for word in truth.split()
            ),
        )
        for one, truth in scenes
    ]
    assert _right(engine, flipped, lambda frames_THWC: frames_THWC[::-1]) >= 48


def test_a_caption_does_not_depend_on_its_batch(engine, scenes):
    requests = [one for one, _ in scenes[:24]]
    alone = {one.clip_id: _ask(engine, [one])[0] for one in requests}
    for seed in range(3):
        mixed = random.Random(seed).sample(requests, len(requests))
        assert [alone[one.clip_id] for one in mixed] == _ask(engine, mixed)


def test_a_sampled_caption_does_not_depend_on_its_batch_either(scenes):
    config = dataclasses.replace(TINY, temperature=8.0)  # the model is sure of itself: at 1 every draw is the same
    engine = QwenVLEngine(config, build.resolve(config), cuda=False)
    requests = [one for one, _ in scenes[:12]]
    together = _ask(engine, requests)
    assert [_ask(engine, [one])[0] for one in requests] == together
    other = QwenVLEngine(dataclasses.replace(config, seed=1), build.resolve(config), cuda=False)
    assert _ask(other, requests) != together
    engine.close()
    other.close()


def test_counts_and_reasons_of_ending(engine, scenes):
    (one, truth), *_ = scenes
    caption = _ask(engine, [one])[0]
    assert caption.finish_reason == "stop"
    assert caption.num_output_tokens >= len(truth.split())
    t, h, w, _ = one.media[0].frames_THWC.shape
    assert caption.num_prompt_tokens > t // 2 * (h // 28) * (w // 28)


def test_a_caption_cut_short_says_so(scenes):
    config = dataclasses.replace(TINY, max_new_tokens=3)
    engine = QwenVLEngine(config, build.resolve(config), cuda=False)
    caption = _ask(engine, [scenes[0][0]])[0]
    assert (caption.finish_reason, caption.num_output_tokens) == ("length", 3)
    assert scenes[0][1].startswith(caption.text)
    engine.close()


def test_a_request_that_is_too_long_is_refused_with_the_numbers(engine, scenes):
    (short, _), *_ = scenes  # 8 frames of 84x112
    frames_THWC = np.zeros((256, 560, 560, 3), np.uint8)
    with pytest.raises(ResourceError) as raised:
        engine.submit(request("long", frames_THWC, [0.1 * k for k in range(256)])).result()
    assert raised.value.error_type == "too_long"
    asked = int(re.search(r"(\d+) prompt tokens", str(raised.value))[1])
    assert asked - 128 * 20 * 20 == engine.submit(short).result().num_prompt_tokens - 4 * 3 * 4


def test_one_bad_request_fails_alone(engine, scenes):
    bad = request("bad", np.zeros((8, 30, 30, 3), np.uint8), [float(k) for k in range(8)])  # no multiple of 28
    good = [one for one, _ in scenes[:6]]
    answers = [engine.submit(one) for one in [*good[:3], bad, *good[3:]]]
    with pytest.raises(RequestError, match="8x30x30x3"):
        answers.pop(3).result()
    assert [answer.result().text for answer in answers] == [truth for _, truth in scenes[:6]]


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    for name, words in [
        ("builtin:tiny-qwen2.5", "did you mean 'tiny-qwen2.5-vl'"),
        (str(tmp_path / "none"), "no such folder"),
    ]:
        with pytest.raises(ConfigError, match=words):
            build.resolve(dataclasses.replace(TINY, model=name))
    with pytest.raises(ConfigError, match="no checkpoint"):
        build.resolve(dataclasses.replace(TINY, model=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="'llama'"):
        build.check(resolve(str(tmp_path)), preset("tiny"))
    with pytest.raises(ConfigError, match="need 28"):
        build.check(resolve(TINY.model), set_paths(preset("tiny"), ["decode.size_multiple=32"]))


def test_more_frames_than_the_context_holds_are_refused_before_anything_is_decoded():
    fits = set_paths(preset("tiny"), ["decode.num_frames=17", "decode.max_pixels=78400", "decode.sampling=motion"])
    assert fits.decode.max_video_tokens == 9 * 100
    build.check(resolve(TINY.model), fits)
    with pytest.raises(ConfigError, match=r"may become 10000 tokens.* more than the 8192"):
        build.check(resolve(TINY.model), set_paths(fits, ["decode.num_frames=200"]))


def test_a_rate_that_the_model_cannot_tell_apart_is_refused():
    slow = ["decode.sampling=fps", "decode.fps=4"]
    build.check(resolve(TINY.model), set_paths(preset("tiny"), slow))
    with pytest.raises(ConfigError, match=r"decode.fps = 5.* above 4 frames a second"):
        build.check(resolve(TINY.model), set_paths(preset("tiny"), [*slow, "decode.fps=5"]))
    qwen3 = preset("tiny-qwen3")
    build.check(resolve(qwen3.caption.model), set_paths(qwen3, [*slow, "decode.fps=5"]))


def test_the_revision_of_a_folder_is_its_content(tmp_path):
    original = resolve("builtin:tiny-qwen2.5-vl")
    copy = tmp_path / "copy"
    shutil.copytree(original.location, copy)
    assert resolve(str(copy)).revision == original.revision
    other = tmp_path / "other"
    shutil.copytree(original.location, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert resolve(str(other)).revision != original.revision
