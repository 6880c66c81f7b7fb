"""Every family of checkpoints through one engine: the tokens of transformers' `generate()`, whatever shares a batch."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from qwen_ray.config import CaptionConfig, preset
from qwen_ray.engines import build
from qwen_ray.engines.protocol import CaptionRequest, Medium
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.patches import by_definition
from tests.scenes import filmed

NEW_TOKENS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    config = CaptionConfig(model=str(folder), max_new_tokens=NEW_TOKENS, batch_size=8)
    engine = build.caption_engine(config, build.resolve(config), cuda=False)
    yield request.param, folder, engine
    engine.close()


def _requests(family):
    unit = 28 if family == "qwen2_5_vl" else 32
    draw = np.random.default_rng(0)
    requests = []
    for k in range(9):
        size = (2 * (k % 3 + 1), unit * (1 + k % 2), unit * (2 + k % 3), 3)
        times_s = tuple(round(0.7 * j * (1 + k % 4) + 0.005 * j**2, 3) for j in range(size[0]))
        frames_THWC = draw.integers(0, 256, size, dtype=np.uint8)
        requests.append(CaptionRequest(str(k), (Medium(frames_THWC, times_s),), "Describe the video." + " really" * k))
    return requests


def _at(request, times_s):
    """The clip of a request, its frames at other times."""
    return Medium(request.media[0].frames_THWC, tuple(times_s))


def _inputs(family, tokenizer, request, system="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"):
    """What `generate()` takes, put together as the model cards describe it."""
    is_2_5 = family == "qwen2_5_vl"
    pixels, grid = by_definition(request.media[0].frames_THWC, family)
    pads = "<|video_pad|>" * (grid[1] * grid[2] // 4)
    times = request.media[0].frame_times_s
    if is_2_5:
        video = pads * grid[0]
    else:
        stamps = [(times[k] + times[k + 1]) / 2 for k in range(0, len(times), 2)]
        video = "".join(f"<{t:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for t in stamps)
    user = f"<|im_start|>user\n<|vision_start|>{video}<|vision_end|>{request.prompt}<|im_end|>\n"
    ids = torch.tensor([tokenizer(f"{system}{user}<|im_start|>assistant\n")["input_ids"]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")) * 2,
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([grid]),
    }
    if is_2_5:
        inputs["second_per_grid_ts"] = torch.tensor([2 * (times[-1] - times[0]) / (len(times) - 1)])
    return inputs


def _generated(family, folder, requests, num_tokens=NEW_TOKENS, **more):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for request in requests:
        inputs = _inputs(family, tokenizer, request, **more)
        with torch.inference_mode():
            tokens = model.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True).strip())
    return texts


def test_tokens_equal_transformers_generate_in_any_batch(family):
    name, folder, engine = family
    requests = _requests(name)
    wanted = dict(zip((r.clip_id for r in requests), _generated(name, folder, requests), strict=True))
    assert len(set(wanted.values())) == len(wanted), "every clip should have its own answer"
    for seed in range(3):
        text_only = [CaptionRequest(f"t{seed}", (), "Say something.")]
        mixed = random.Random(seed).sample(requests + text_only, len(requests) + 1)
        answers = [(one.clip_id, engine.submit(one)) for one in mixed]
        got = {clip_id: answer.result().text for clip_id, answer in answers}
        assert {clip_id: got[clip_id] for clip_id in wanted} == wanted


def test_a_text_is_answered_the_same_after_a_video_as_before(family):
    _, _, engine = family
    text = CaptionRequest("t", (), "These are captions of clips. What does the whole video show?")
    before = engine.submit(text).result()
    engine.submit(_requests(family[0])[2]).result()
    assert engine.submit(text).result() == before


def _uneven(name):
    """Six patches, whose frames lie close together at first."""
    unit = 28 if name == "qwen2_5_vl" else 32
    frames_THWC = np.random.default_rng(3).integers(0, 256, (12, unit, 2 * unit, 3), dtype=np.uint8)
    times_s = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 6.0, 9.0, 15.0, 22.0, 30.0)
    return CaptionRequest("uneven", (Medium(frames_THWC, times_s),), "Describe the video.")


def test_uneven_times_are_told_one_by_one(family):
    """By definition: patch k lies `tokens_per_second` positions a second behind the first, and text goes on after the
    largest height or width.
    """
    name, folder, engine = family
    request = _uneven(name)
    answers = [engine.submit(one) for one in (request, *_requests(name)[:3])]
    got = answers[0].result().text
    if name != "qwen2_5_vl":  # its prompt says it in words
        assert got == _generated(name, folder, [request])[0]
        return
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = _inputs(name, tokenizer, request)
    ids, rate = inputs["input_ids"][0], model.config.vision_config.tokens_per_second
    pads = (ids == tokenizer.convert_tokens_to_ids("<|video_pad|>")).nonzero()[:, 0].tolist()
    places = [[k, k, k] for k in range(pads[0])]
    for patch in range(6):
        tick = int(request.media[0].frame_times_s[2 * patch] * rate)
        places += [[pads[0] + tick, pads[0], pads[0] + column] for column in range(2)]
    places += [[pads[0] + 2 + k] * 3 for k in range(len(ids) - pads[-1] - 1)]
    axes = torch.tensor(places).T[:, None]
    inputs["position_ids"] = torch.cat([torch.arange(len(ids))[None, None], axes])
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert got == tokenizer.decode(tokens[0, len(ids) :], skip_special_tokens=True).strip()
    even = CaptionRequest("even", (_at(request, [30 / 11 * k for k in range(12)]),), request.prompt)
    assert engine.submit(even).result().text != got


def test_true_times_reach_the_model(family):
    """The same pictures at other times are another prompt, or at least other positions."""
    name, _, engine = family
    request = _requests(name)[5]
    late = CaptionRequest("late", (_at(request, [9 * t for t in request.media[0].frame_times_s]),), request.prompt)
    assert engine.submit(late).result().text != engine.submit(request).result().text


@pytest.mark.parametrize(
    ("name", "family", "more"), [("tiny", "qwen2_5_vl", {}), ("tiny-qwen3", "qwen3_vl", {"system": ""})]
)
def test_trained_models_say_what_generate_says_and_what_is_true(name, family, more, tmp_path):
    config = preset(name).caption
    model = build.resolve(config)
    scenes = filmed(tmp_path, 30, model=name)
    requests = [request for request, _ in scenes]
    engine = build.caption_engine(config, model, cuda=False)
    answers = [engine.submit(request) for request in requests]
    got = [answer.result().text for answer in answers]
    engine.close()
    assert got == _generated(family, model.location, requests, config.max_new_tokens, **more)
    assert sum(text == truth for text, (_, truth) in zip(got, scenes, strict=True)) >= 28
