"""Clips shot by shot: boundaries are the exact frames at which rendered films cut."""

import random
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen_ray
from jobs.bench.shots import render
from jobs.conformance.recipe import ffmpeg
from qwen_ray import api
from qwen_ray.config import DecodeConfig
from qwen_ray.errors import ConfigError
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import ClipFrames, DecodeRequest
from qwen_ray.media.probe import examine
from qwen_ray.media.shots import cut_times_s
from qwen_ray.media.windows import shot_windows


def nothing():
    """No sign of life is needed."""


def cut_ranks(path):
    examined = examine(str(path))
    return [examined.frame_times_s.index(cut_s) for cut_s in cut_times_s(examined, nothing)]


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    return render(tmp_path_factory.mktemp("film"), 1, seed=2, gradual=False)


@pytest.mark.parametrize("number", range(6))
def test_every_hard_cut_is_found_at_its_frame(tmp_path, number):
    film = render(tmp_path, number, seed=1, gradual=False)
    assert cut_ranks(film.path) == [first for first, _ in film.boundaries]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("film.webm", ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", 8, "-crf", 30, "-b:v", 0]),
        ("film.ts", ["-c:v", "mpeg2video", "-q:v", 4, "-bf", 2]),
        ("film.mp4", ["-vf", "scale=1280:720", "-c:v", "libx264", "-preset", "ultrafast"]),
        ("film.avi", ["-c:v", "mpeg4", "-q:v", 4]),
    ],
)
def test_in_every_form(film, tmp_path, form, options):
    ffmpeg("-i", film.path, *options, tmp_path / form)
    assert cut_ranks(tmp_path / form) == [first for first, _ in film.boundaries]


def test_times_of_cuts_are_true_where_the_rate_varies(tmp_path):
    film = render(tmp_path, 2, seed=3, gradual=False)
    uneven = "setpts='(2*N+floor(N/50)*30)/48/TB'"  # 24 fps with a pause every 50 frames
    ffmpeg(
        "-i",
        film.path,
        "-vf",
        uneven,
        "-fps_mode",
        "passthrough",
        "-enc_time_base",
        "1/48",
        "-c:v",
        "libx264",
        tmp_path / "vfr.mp4",
    )
    truth_s = [(2 * n + n // 50 * 30) / 48 for n, _ in film.boundaries]
    found_s = cut_times_s(examine(str(tmp_path / "vfr.mp4")), nothing)
    assert found_s == pytest.approx(truth_s, abs=0.001)


def test_movement_and_slow_changes_within_a_shot_are_no_cuts(tmp_path):
    for name, source in {
        "pan": "smptehdbars=s=1920x540:r=25,crop=480:270:x='n*8':y='n'",
        "zoom": "mandelbrot=s=480x270:r=25",
        "noise": "color=gray:s=480x270:r=25,noise=alls=60:allf=t",
        "light": "testsrc2=s=480x270:r=25,eq=brightness='0.2*sin(t)':eval=frame",
    }.items():
        path = tmp_path / f"{name}.mp4"
        ffmpeg("-f", "lavfi", "-i", source, "-t", 6, "-c:v", "libx264", "-pix_fmt", "yuv420p", path)
        assert cut_ranks(path) == [], name


@pytest.mark.parametrize(("length", "cuts"), [(1, []), (2, []), (4, []), (8, [60, 68])])
def test_a_flash_is_no_cut_unless_it_lasts_as_long_as_a_shot(tmp_path, length, cuts):
    flash = f"drawbox=c=white:t=fill:enable='between(n,60,{59 + length})'"
    source = ["-f", "lavfi", "-i", "testsrc2=s=320x240:r=25", "-t", 5, "-vf", flash]
    ffmpeg(*source, "-c:v", "libx264", "-pix_fmt", "yuv420p", tmp_path / "flash.mp4")
    assert cut_ranks(tmp_path / "flash.mp4") == cuts


def test_where_no_picture_decodes_clips_are_those_of_fixed_windows(tmp_path):
    source = ["-f", "lavfi", "-i", "testsrc2=s=320x240:r=25", "-t", 8]
    ffmpeg(*source, "-c:v", "libx264", "-pix_fmt", "yuv420p", tmp_path / "film.mp4")
    path = tmp_path / "mislabelled.mp4"
    path.write_bytes((tmp_path / "film.mp4").read_bytes().replace(b"avc1", b"mp4v"))
    decode = DecodeConfig(windows="shots", window_s=3.0, decoder="pyav")
    opened, *clips, _ = decode_events(DecodeRequest(path=str(path), decode=decode))
    assert opened.windows == [(0.0, 3.0), (3.0, 6.0), (6.0, 8.0)]
    assert {clip.error_type for clip in clips} == {"no_frames"}


def test_plan_and_run_name_the_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    job = qwen_ray.JobConfig(input=str(tmp_path), output=str(tmp_path / "out"), decode=DecodeConfig(windows="shots"))
    for work in (api.plan, qwen_ray.run):
        with pytest.raises(ConfigError, match=r"decode\.windows.*pip install 'qwen-ray\[shots\]'"):
            work(job)
    assert not (tmp_path / "out").exists()


def test_a_dissolve_is_cut_inside_its_span(tmp_path):
    film = render(tmp_path, 3, seed=0, gradual=True)
    found = cut_ranks(film.path)
    spans = [range(first, last + 1) for first, last in film.boundaries]
    assert all(any(rank in span for span in spans) for rank in found)
    assert sum(any(rank in span for rank in found) for span in spans) >= 4


def test_clips_follow_the_shots(film):
    decode = DecodeConfig(windows="shots", window_s=2.0, min_window_s=1.0, num_frames=4, max_pixels=76800)
    opened, *clips, done = decode_events(DecodeRequest(path=str(film.path), decode=decode))
    times_s = examine(str(film.path)).frame_times_s
    starts_s = [start_s for start_s, _ in opened.windows]
    for first, _ in film.boundaries:
        assert times_s[first] in starts_s
    assert all(end_s - start_s <= 2.0 + 1e-6 for start_s, end_s in opened.windows)
    assert [type(clip) for clip in clips] == [ClipFrames] * len(opened.windows)
    cuts_s = {times_s[first] for first, _ in film.boundaries}
    for clip in clips:
        assert clip.frame_times_s[0] == clip.start_s or clip.start_s not in cuts_s
    assert not done.damaged
    again = decode_events(DecodeRequest(path=str(film.path), decode=decode))
    assert [event.start_s for event in again if isinstance(event, ClipFrames)] == starts_s


@pytest.mark.parametrize("name", ["noise_mid.mp4", "audio_only.mp4", "frames1.mp4", "size_change.ts", "hole.mp4"])
def test_every_file_has_its_clips(find, name):
    decode = DecodeConfig(windows="shots", window_s=2.0, max_pixels=76800)
    opened, *clips, _ = decode_events(DecodeRequest(path=str(find(name)), decode=decode))
    assert len(clips) == len(opened.windows)
    if opened.windows:
        assert opened.windows[-1][1] == opened.info.video_duration_s


@given(
    st.lists(st.floats(0.01, 20), max_size=12),
    st.floats(0.05, 60),
    st.floats(0.5, 20),
    st.floats(0, 2),
)
def test_windows_cover_the_time_and_keep_to_the_bounds(gaps_s, rest_s, longest_s, shortest_s):
    cuts_s = [sum(gaps_s[: k + 1]) for k in range(len(gaps_s))]
    duration_s = sum(gaps_s) + rest_s
    frames_s = [k / 25 for k in range(int(duration_s * 25) + 1)]
    shortest_s = min(shortest_s, longest_s)
    windows = shot_windows(frames_s, cuts_s, duration_s, longest_s=longest_s, shortest_s=shortest_s)
    assert windows[0][0] == 0.0
    assert windows[-1][1] == duration_s
    assert all(end_s == start_s for (_, end_s), (start_s, _) in pairwise(windows))
    assert all(0 < end_s - start_s <= longest_s * (1 + 1e-6) + 1e-6 for start_s, end_s in windows)
    starts_s = {start_s for start_s, _ in windows}
    for at_s, (before_s, after_s) in zip(cuts_s, pairwise([*gaps_s, rest_s]), strict=True):
        if min(before_s, after_s) > shortest_s + 0.001:
            assert at_s in starts_s


def test_a_short_shot_joins_the_one_before():
    def windows(cuts_s, **how):
        return shot_windows([k / 25 for k in range(500)], cuts_s, 20.0, **{"longest_s": 12.0, "shortest_s": 1.0, **how})

    assert windows([]) == [(0.0, 10.0), (10.0, 20.0)]
    assert windows([4.0, 4.5, 12.0]) == [(0.0, 4.5), (4.5, 12.0), (12.0, 20.0)]
    assert windows([0.5, 12.0]) == [(0.0, 12.0), (12.0, 20.0)]
    assert windows([10.0, 19.5]) == [(0.0, 10.0), (10.0, 20.0)]
    assert windows([10.0], longest_s=4.0) == [
        *((k * 10 / 3, (k + 1) * 10 / 3) for k in range(2)), (20 / 3, 10.0),
        *((10 + k * 10 / 3, 10 + (k + 1) * 10 / 3) for k in range(2)), (10 + 20 / 3, 20.0),
    ]  # fmt: skip


def test_a_still_of_a_year_is_not_a_million_clips():
    draw = random.Random(0)
    frames_s = [0.0, 1.0, 3e7]
    windows = shot_windows(frames_s, [1.0], 3e7 + draw.random(), longest_s=12.0, shortest_s=1.0)
    assert len(windows) <= 3
