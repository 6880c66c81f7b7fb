"""The engine's one promise: an answer is what the model says to its request alone, whatever else goes on."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText, AutoTokenizer

from qwen_ray.config import CaptionConfig, preset
from qwen_ray.engines import build
from qwen_ray.engines.protocol import CaptionRequest, Medium, Sampling
from qwen_ray.engines.qwen_vl.cache import PAGE
from qwen_ray.engines.qwen_vl.engine import MEMORY_FLAG, QwenVLEngine
from qwen_ray.engines.qwen_vl.memory import MemoryPlan
from qwen_ray.errors import RequestError, ResourceError
from tests.checkpoints import write_checkpoint
from tests.patches import by_definition
from tests.scenes import filmed

LONG = Sampling(100, stop_token_ids=())
"""More than a page of answer, so that sequences have to take pages while they answer."""
LEAST_PAGES = 7
"""What the longest of the requests needs with its answer."""


def _engine(config, *, num_pages=400, budget=8192, max_patches=32_768, **changes):
    config = dataclasses.replace(config, **changes)
    plan = MemoryPlan(0, 0, 0, 1 << 28, 0, budget, max_patches, num_pages)
    return QwenVLEngine(config, build.resolve(config), cuda=False, plan=plan)


class Family(tuple):
    """Configuration, requests, and what is said to each alone; shown briefly where a test fails."""

    __slots__ = ()

    def __repr__(self):
        return f"Family({self[0].model})"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def family(request, tmp_path_factory):
    """A checkpoint with random weights, requests of many shapes, and what it says to each of them alone."""
    folder = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    config = CaptionConfig(model=str(folder), batch_size=1, reuse=False)
    requests = _requests(28 if request.param == "qwen2_5_vl" else 32)
    engine = _engine(config)
    alone = {one.clip_id: engine.submit(one).result().text for one in requests}
    engine.close()
    assert len(set(alone.values())) == len(alone)
    return Family((config, requests, alone))


def _medium(draw, frames, height, width):
    frames_THWC = draw.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return Medium(frames_THWC, tuple(0.5 * k for k in range(frames)) if frames > 1 else ())


def _requests(unit):
    draw = np.random.default_rng(1)
    clips = [_medium(draw, 2 * (1 + k % 3), unit * (1 + k % 2), unit * (2 + k % 3)) for k in range(6)]
    image = _medium(draw, 1, 2 * unit, 3 * unit)
    asked = [(str(k), (clip,), "Describe the video." + " really" * 9 * k) for k, clip in enumerate(clips)]
    asked += [("again", (clips[2],), "What is it?"), ("text", (), "Say something."), ("image", (image,), "And this?")]
    asked += [("both", (image, clips[1]), "Compare."), ("two", (clips[3], clips[0]), "Which?")]
    return [CaptionRequest(*one, sampling=LONG) for one in asked]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**16),
    batch_size=st.integers(1, 6),
    budget=st.sampled_from([7, 40, 100, 8192]),
    max_patches=st.sampled_from([1, 40, 32_768]),
    spare_pages=st.sampled_from([0, 2, 7, 400]),
    reuse=st.booleans(),
    cancelled=st.sets(st.integers(0, 10), max_size=3),
)
def test_an_answer_depends_on_its_request_alone(
    family, seed, batch_size, budget, max_patches, spare_pages, reuse, cancelled
):
    """Any order and number at once, prompts in parts, pages taken away, pictures and beginnings reused, others
    cancelled.
    """
    config, requests, alone = family
    sizes = {"num_pages": LEAST_PAGES + spare_pages, "budget": budget, "max_patches": max_patches}
    engine = _engine(config, **sizes, batch_size=batch_size, reuse=reuse)
    mixed = random.Random(seed).sample(requests, len(requests))
    answers = [engine.submit(one) for one in mixed]
    gone = [k for k in cancelled if answers[k].cancel()]
    got = {one.clip_id: answers[k].result().text for k, one in enumerate(mixed) if k not in gone}
    engine.close()
    assert got == {clip_id: text for clip_id, text in alone.items() if clip_id in got}
    assert len(got) == len(requests) - len(gone)
    assert engine.statistics().num_pages_held == 0


def test_where_pages_run_out_the_youngest_starts_again_and_all_answers_stay(family):
    config, requests, alone = family
    engine = _engine(config, num_pages=LEAST_PAGES + 1, batch_size=6)
    got = {one.clip_id: answer for one, answer in [(one, engine.submit(one)) for one in requests]}
    assert {clip_id: answer.result().text for clip_id, answer in got.items()} == alone
    engine.close()
    assert engine.statistics().num_disturbed > 0


def test_a_clip_under_several_prompts_is_read_once(family):
    config, _, _ = family
    clip = _medium(np.random.default_rng(7), 8, 128 if config.model.find("qwen3") >= 0 else 112, 224)
    questions = [CaptionRequest(str(k), (clip,), f"Question {k}?", sampling=Sampling(5)) for k in range(4)]
    texts = []
    for reuse in (True, False):
        engine = _engine(config, batch_size=4, reuse=reuse)
        texts.append([answer.result().text for answer in [engine.submit(one) for one in questions]])
        engine.close()
        found = engine.statistics()
        shared = (found.num_reused_tokens, found.num_media_reused)
        if reuse:
            prompt = found.num_prompt_tokens / 4
            assert shared[0] >= 3 * (prompt - 2 * PAGE)
        else:
            assert shared == (0, 0)
    assert texts[0] == texts[1]


def test_features_of_a_picture_serve_prompts_that_begin_otherwise(family):
    config, requests, _ = family
    (clip,) = requests[0].media
    engine = _engine(config, batch_size=4, reuse=True)
    for k in range(3):
        engine.submit(CaptionRequest(str(k), (clip,), "What?", f"You are number {k}.", Sampling(2))).result()
    engine.close()
    assert engine.statistics().num_media_reused == 2


def test_clips_that_differ_in_their_pixels_alone_are_told_apart(family):
    config, requests, _ = family
    height, width = requests[5].media[0].frames_THWC.shape[1:3]
    draw = np.random.default_rng(8)
    clips = [_medium(draw, 8, 2 * height, width) for _ in range(4)]
    asked = [CaptionRequest(str(k), (clip,), "What is it?", sampling=Sampling(8)) for k, clip in enumerate(clips)]
    texts = []
    for reuse in (False, True):
        engine = _engine(config, batch_size=2, reuse=reuse)
        texts.append([answer.result().text for answer in [engine.submit(one) for one in asked]])
        engine.close()
        assert engine.statistics().num_reused_tokens == 0
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(clips)


def test_other_times_are_another_clip(family):
    config, requests, _ = family
    clip = requests[5].media[0]
    late = Medium(clip.frames_THWC, tuple(9 * time_s for time_s in clip.frame_times_s))
    engine = _engine(config, batch_size=1, reuse=True)
    first, second = (
        engine.submit(CaptionRequest("k", (one,), "Describe the video." + " really" * 60, sampling=Sampling(30)))
        .result()
        .text
        for one in (clip, late)
    )
    engine.close()
    assert first != second


def test_images_and_several_media_are_what_generate_takes(family):
    """Against inputs put together by hand: an image shown twice as a pair of frames, its own pad, one grid each."""
    config, requests, _ = family
    both = next(one for one in requests if one.clip_id == "both")
    sampling = Sampling(12)
    engine = _engine(config)
    got = engine.submit(dataclasses.replace(both, sampling=sampling)).result().text
    engine.close()
    model = AutoModelForImageTextToText.from_pretrained(config.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    image, clip = both.media
    kind = model.config.model_type
    pixels, grids = zip(*(by_definition(one.frames_THWC, kind) for one in (image, clip)), strict=True)
    cells = [h * w // 4 for _, h, w in grids]
    if kind == "qwen2_5_vl":
        video = "<|video_pad|>" * (cells[1] * grids[1][0])
    else:
        times = clip.frame_times_s
        stamps = [(times[k] + times[k + 1]) / 2 for k in range(0, len(times), 2)]
        pads = "<|video_pad|>" * cells[1]
        video = "".join(f"<{stamp:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for stamp in stamps)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{'<|image_pad|>' * cells[0]}<|vision_end|><|vision_start|>{video}<|vision_end|>"
        f"{both.prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    types = (ids == model.config.image_token_id) * 1 + (ids == model.config.video_token_id) * 2
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
    inputs |= {"pixel_values": pixels[0], "image_grid_thw": torch.tensor(grids[:1])}
    inputs |= {"pixel_values_videos": pixels[1], "video_grid_thw": torch.tensor(grids[1:])}
    if kind == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.0])
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert got == tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_each_request_is_sampled_in_its_own_way(family):
    config, requests, _ = family
    ways = [
        Sampling(20),
        Sampling(20, repetition_penalty=1.3),
        Sampling(20, temperature=3.0),
        Sampling(20, temperature=3.0, top_k=2),
        Sampling(20, temperature=3.0, seed=1),
        Sampling(7, stop_token_ids=()),
    ]
    asked = [dataclasses.replace(requests[4], clip_id="one", sampling=how) for how in ways]
    together, alone = _engine(config, batch_size=6), _engine(config, batch_size=1)
    got = [answer.result() for answer in [together.submit(one) for one in asked]]
    assert [alone.submit(one).result() for one in asked] == got
    together.close()
    alone.close()
    assert len({caption.text for caption in got}) == len(ways)
    assert got[-1].num_output_tokens == 7


def test_300_clips_shuffled_cancelled_and_asked_again_get_each_its_own_caption(tmp_path):
    scenes = filmed(tmp_path, 300)
    truth = {one.clip_id: text for one, text in scenes}
    engine = _engine(preset("tiny").caption, batch_size=16, budget=512)
    draw = random.Random(0)
    mixed = draw.sample([one for one, _ in scenes], len(scenes))
    answers = {one.clip_id: (one, engine.submit(one)) for one in mixed}
    again = [one for one, answer in answers.values() if draw.random() < 0.2 and answer.cancel()]
    answers.update({one.clip_id: (one, engine.submit(one)) for one in again})
    right = sum(answer.result().text == truth[clip_id] for clip_id, (_, answer) in answers.items())
    engine.close()
    assert len(again) > 20
    assert right >= 0.98 * len(scenes)


class ShortOfMemory:
    """A device on which a prompt step of more than `most` tokens does not fit."""

    def __init__(self, runner, most):
        self._runner, self._most = runner, most

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def __setattr__(self, name, value):
        if name == "max_patches":
            self._runner.max_patches = value
        else:
            object.__setattr__(self, name, value)

    def read(self, stretches):
        if sum(stretch.stop - stretch.start for stretch in stretches) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._runner.read(stretches)


def test_where_memory_is_short_steps_shrink_and_rows_say_so(family):
    config, requests, alone = family
    engine = _engine(config, batch_size=6, budget=4096)
    engine.runner = ShortOfMemory(engine.runner, 1024)
    asked = CaptionRequest("long", requests[5].media, "Describe." + " really" * 600, sampling=Sampling(3))
    *answers, long = [engine.submit(one) for one in [*requests, asked]]
    assert 1024 < long.result().num_prompt_tokens < 2048
    assert [answer.result().text for answer in answers] == [alone[one.clip_id] for one in requests]
    engine.close()
    assert long.result().flags == (MEMORY_FLAG,)
    assert engine.statistics().num_shrunk == 2  # 4096 to 1024
    roomy = _engine(config)
    assert roomy.submit(asked).result() == dataclasses.replace(long.result(), flags=())
    roomy.close()


class ShortWhileAnswering(ShortOfMemory):
    """A device on which more than `most` sequences do not fit into a decode step."""

    def read(self, stretches):
        return self._runner.read(stretches)

    def decode(self, sequences):
        if len(sequences) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._runner.decode(sequences)


def test_where_memory_is_short_fewer_answers_go_on_at_a_time(family):
    config, requests, alone = family
    engine = _engine(config, batch_size=6)
    engine.runner = ShortWhileAnswering(engine.runner, 2)
    answers = [engine.submit(one) for one in requests]
    assert [answer.result().text for answer in answers] == [alone[one.clip_id] for one in requests]
    engine.close()
    assert engine.statistics().num_shrunk > 0


def test_an_answer_that_does_not_fit_even_alone_is_refused(family):
    config, requests, _ = family
    engine = _engine(config, batch_size=3)
    engine.runner = ShortWhileAnswering(engine.runner, 0)
    for answer in [engine.submit(one) for one in requests[:4]]:
        with pytest.raises(ResourceError):
            answer.result()
    engine.close()


def test_what_never_fits_is_refused_and_the_rest_goes_on(family):
    config, requests, alone = family
    engine = _engine(config, batch_size=2)
    engine.runner = ShortOfMemory(engine.runner, 300)
    long = CaptionRequest("long", requests[5].media, "Describe." + " really" * 500, sampling=Sampling(3))
    answers = [engine.submit(one) for one in (requests[0], long, requests[1])]
    with pytest.raises(ResourceError) as raised:
        answers[1].result()
    assert raised.value.error_type == "out_of_memory"
    assert [answers[k].result().text for k in (0, 2)] == [alone[one.clip_id] for one in requests[:2]]
    engine.close()


class Poisoned(ShortOfMemory):
    """A device on which the model fails on one clip."""

    def read(self, stretches):
        if any(stretch.sequence.request.clip_id == "poison" for stretch in stretches):
            raise RuntimeError("index out of range")
        return self._runner.read(stretches)


class PoisonedLater(ShortOfMemory):
    """A device on which the model fails on one clip while it is answered."""

    def read(self, stretches):
        return self._runner.read(stretches)

    def decode(self, sequences):
        if any(sequence.request.clip_id == "poison" and len(sequence.output) > 20 for sequence in sequences):
            raise RuntimeError("index out of range")
        return self._runner.decode(sequences)


@pytest.mark.parametrize("device", [Poisoned, PoisonedLater])
def test_a_request_on_which_the_model_fails_fails_alone(family, device):
    config, requests, alone = family
    engine = _engine(config, batch_size=6)
    engine.runner = device(engine.runner, 0)
    poison = dataclasses.replace(requests[3], clip_id="poison")
    answers = [engine.submit(one) for one in [*requests[:4], poison, *requests[4:]]]
    with pytest.raises(RequestError, match="index out of range"):
        answers.pop(4).result()
    assert [answer.result().text for answer in answers] == [alone[one.clip_id] for one in requests]
    engine.close()


def test_a_request_that_no_cache_could_hold_is_refused_with_the_numbers(family):
    config, requests, _ = family
    engine = _engine(config, num_pages=3)
    with pytest.raises(ResourceError, match=f"100 new ones exceed the {3 * PAGE} that fit") as raised:
        engine.submit(requests[5]).result()
    assert raised.value.error_type == "too_long"
    engine.close()


def test_frames_that_the_model_does_not_take_are_refused_by_name(family):
    config, requests, _ = family
    engine = _engine(config)
    good = requests[0].media[0]
    for frames_THWC, times_s, words in [
        (good.frames_THWC[:, :20], good.frame_times_s, "2x20x"),
        (np.repeat(good.frames_THWC, 2, axis=0)[:3], (0.0, 1.0, 2.0), "multiple of 2 frames"),
        (good.frames_THWC, (0.0,), "2 frames with 1 times"),
        (good.frames_THWC, (), "one frame"),
    ]:
        with pytest.raises(RequestError, match=words):
            engine.submit(CaptionRequest("k", (Medium(frames_THWC, times_s),), "?")).result()
    with pytest.raises(RequestError, match="pad tokens"):
        engine.submit(CaptionRequest("k", (), "<|video_pad|>")).result()
    engine.close()
