"""Frames of rendered clips under each way of sampling, read off the numbers burnt into them."""

import numpy as np
import pytest

from jobs.conformance.burn import NUMBER, read_number
from jobs.conformance.recipe import ffmpeg
from qwen_ray.config import DecodeConfig
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import DecodeRequest
from qwen_ray.media.motion import movement

NUM_FRAMES = 360


def number(picture):
    """Read off a small strip in the corner, so that the numbers themselves hardly move."""
    height, width, _ = picture.shape
    return read_number(picture[: 36 * height // 480, : width // 4])


def numbers(path, **how):
    """Numbers of the frames of a file's one clip, and when they are shown."""
    decode = DecodeConfig(window_s=60, max_pixels=640 * 480, **how)
    _, clip, done = decode_events(DecodeRequest(path=str(path), decode=decode))
    assert not done.damaged
    return [number(picture) for picture in clip.frames_THWC], clip.frame_times_s


def draw(k, noise):
    """A ball in fog that crosses the picture from 4 to 8 s."""
    picture = (120 + noise.normal(0, 4, (480, 640))).clip(0, 255).astype(np.uint8)
    picture[:6, :160] = np.repeat(NUMBER.cells(k), 8)
    left = min(max(k - 120, 0), 120) * 4
    picture[250:310, left : left + 60] = 230
    return picture.tobytes()


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """12 s at 30 fps, a key frame every 50."""
    path, noise = tmp_path_factory.mktemp("film") / "film.mp4", np.random.default_rng(0)
    raw = ["-f", "rawvideo", "-pix_fmt", "gray", "-video_size", "640x480", "-framerate", 30, "-i", "-"]
    x264 = [
        "-c:v",
        "libx264",
        "-preset",
        "veryfast",
        "-crf",
        18,
        "-g",
        50,
        "-sc_threshold",
        0,
        "-bf",
        2,
        "-pix_fmt",
        "yuv420p",
    ]
    ffmpeg(*raw, *x264, path, stdin=b"".join(draw(k, noise) for k in range(NUM_FRAMES)))
    return path


def test_motion_doubles_the_density_where_something_moves(film):
    even, _ = numbers(film)
    moving, times_s = numbers(film, sampling="motion")
    assert len(moving) == len(even) == 16
    assert times_s == pytest.approx([number / 30 for number in moving], abs=0.001)
    in_third = [sum(120 <= number < 240 for number in found) for found in (even, moving)]
    assert in_third[1] >= 2 * in_third[0]
    assert moving[0] < 30  # the rest is still looked at
    assert moving[-1] > 270


def test_a_rate_and_key_frames(film):
    assert numbers(film, sampling="fps", fps=1.0)[0] == list(range(0, 360, 30))
    assert numbers(film, sampling="fps", fps=4.0)[0] == numbers(film)[0]  # 48 would be more than num_frames
    assert numbers(film, sampling="keyframes")[0] == list(range(0, 360, 50))
    assert numbers(film, sampling="keyframes", num_frames=4)[0] == [0, 100, 200, 300]


@pytest.mark.parametrize("sampling", ["fps", "keyframes", "motion"])
@pytest.mark.parametrize("form", ["film.ts", "film.avi", "film.webm"])
def test_every_form_of_file_can_be_sampled_in_every_way(film, tmp_path, sampling, form):
    how = ["-c:v", "libvpx-vp9", "-cpu-used", 8, "-b:v", "1M"] if form == "film.webm" else ["-c", "copy"]
    ffmpeg("-i", film, "-t", 2, *how, tmp_path / form)
    shown, times_s = numbers(tmp_path / form, sampling=sampling, num_frames=6)
    assert None not in shown
    assert shown == sorted(shown)
    assert 1 <= len(set(shown)) <= 6
    assert [round(30 * (t - times_s[0])) for t in times_s] == pytest.approx([n - shown[0] for n in shown], abs=3)


def test_movement_is_seen_through_noise():
    draw = np.random.default_rng(0)
    still = [draw.normal(128, 8, (224, 400, 3)).clip(0, 255).astype(np.uint8) for _ in range(6)]
    moving = [picture.copy() for picture in still]
    for k, picture in enumerate(moving):
        picture[100:140, 40 * k : 40 * k + 40] = 255
    assert min(movement(moving)) > 5 * max(movement(still))


def test_small_pictures_have_movement_too():
    a, b = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 10, np.uint8)
    assert movement([a, b, b]) == [100.0, 0.0]
