"""Other decoders than PyAV: the same frames where they can be had, a failed file where they cannot, never another's."""

import importlib.util
import os
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

import qwen_ray
from jobs.conformance.assets import ASSETS
from jobs.conformance.burn import read_level, read_number
from jobs.conformance.edits import rename_codec
from jobs.conformance.recipe import ffmpeg, find_ffmpeg
from qwen_ray.config import DecodeConfig
from qwen_ray.errors import ConfigError, InputError
from qwen_ray.media.decode import decode_events
from qwen_ray.media.decoders import check_installed
from qwen_ray.media.events import ClipFrames, DecodeRequest
from qwen_ray.media.isolate import Decoder
from qwen_ray.media.probe import examine

LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason="not installed"))
    for name in ("torchcodec", "decord")
]


def request(path, decoder, **how):
    """Frames of a file at most 320x240, sound left aside."""
    return DecodeRequest(path=str(path), decode=DecodeConfig(max_pixels=320 * 240, decoder=decoder, **how))


def decode(path, decoder, **how):
    return list(decode_events(request(path, decoder, **how)))


@pytest.mark.parametrize("name", [name for name, asset in ASSETS.items() if asset.good and name != "hours.mp4"])
def test_the_ffmpeg_command_gives_the_same_frames(find, name):
    asset, how = ASSETS[name], {"window_s": max(1.0, ASSETS[name].shown_s()[-1] / 3), "num_frames": 4}
    opened, *clips, done = decode(find(name), "ffmpeg", **how)
    _, *others, _ = decode(find(name), "pyav", **how)
    assert opened.decoder == "ffmpeg"
    assert not done.damaged
    for clip, other in zip(clips, others, strict=True):
        assert clip.frame_times_s == other.frame_times_s
        assert (clip.decoder, other.decoder) == ("ffmpeg", "pyav")
        read = read_level if asset.levels else read_number
        assert [read(p) for p in clip.frames_THWC] == [read(p) for p in other.frames_THWC]
        error = np.square(clip.frames_THWC.astype(float) - other.frames_THWC).mean()
        assert 10 * np.log10(255**2 / max(error, 1e-9)) > 25  # two versions of swscale, on saturated test bars


@pytest.mark.parametrize("name", ["noise_mid.mp4", "flipped.ts", "truncated.mp4"])
def test_what_ffmpeg_complains_of_counts_as_repaired(find, name):
    asset = ASSETS[name]
    _, *clips, done = decode(find(name), "ffmpeg", window_s=0.5, num_frames=15, max_repaired=1.0)
    assert done.damaged
    times_s = asset.shown_s()
    for clip in (clip for clip in clips if isinstance(clip, ClipFrames)):
        pairs = zip(clip.frames_THWC[: clip.num_decoded], clip.frame_times_s, strict=False)
        shown = [(read_number(picture), at_s) for picture, at_s in pairs]
        fits = [number is not None and abs(times_s[number] - at_s) < 0.01 for number, at_s in shown]
        assert fits.count(False) <= clip.num_repaired


@pytest.fixture
def knowing_ffmpeg(tmp_path, monkeypatch):
    """An ffmpeg on the PATH whose build knows the codec that PyAV's does not: it is H.264 by another name."""
    command = tmp_path / "bin" / "ffmpeg"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {find_ffmpeg()} -c:v h264 "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("knowing_ffmpeg")
def test_a_picture_that_pyav_has_no_decoder_for_goes_to_ffmpeg(find):
    opened, *clips, done = decode(find("unknown.mp4"), "auto", window_s=2.0, num_frames=4)
    assert (opened.decoder, opened.info.width, opened.info.height) == ("ffmpeg", 320, 240)
    assert [read_number(p) for clip in clips for p in clip.frames_THWC] == list(range(0, 240, 15))
    assert {clip.decoder for clip in clips} == {"ffmpeg"}
    assert not done.damaged


@pytest.fixture
def mislabelled(find, tmp_path):
    """H.264 that calls itself MPEG-4 part 2: PyAV has a decoder of that name, which makes nothing of it."""
    path = tmp_path / "mislabelled.mp4"
    path.write_bytes(rename_codec(find("silent.mp4").read_bytes(), "avc1", "mp4v"))
    return path


@pytest.mark.usefixtures("knowing_ffmpeg")
@pytest.mark.parametrize("windows", ["fixed", "shots"])
def test_a_picture_that_pyav_makes_nothing_of_goes_to_ffmpeg(mislabelled, windows):
    opened, *clips, done = decode(mislabelled, "auto", windows=windows, window_s=2.0, num_frames=4)
    assert (opened.decoder, opened.info.width, opened.info.height) == ("ffmpeg", 320, 240)
    assert [read_number(p) for clip in clips for p in clip.frames_THWC] == list(range(0, 240, 15))
    assert {clip.decoder for clip in clips} == {"ffmpeg"}
    assert not done.damaged


def test_what_ffmpeg_makes_nothing_of_either_stays_with_pyav(mislabelled):
    opened, *clips, _ = decode(mislabelled, "auto", window_s=2.0, num_frames=4)
    assert opened.decoder == "pyav"
    assert {clip.error_type for clip in clips} == {"no_frames"}


@pytest.mark.usefixtures("knowing_ffmpeg")
def test_a_title_that_is_no_text_does_not_matter(find, tmp_path):
    ffmpeg("-i", find("silent.mp4"), "-metadata", "title=abcdefgh", "-c", "copy", tmp_path / "named.mp4")
    data = (tmp_path / "named.mp4").read_bytes()
    assert b"abcdefgh" in data
    path = tmp_path / "odd.mp4"
    path.write_bytes(data.replace(b"abcdefgh", b"\xb2\xff\xfe\x88abcd").replace(b"avc1", b"zzz1"))
    opened, *clips, _ = decode(path, "auto", window_s=8.0, num_frames=4)
    assert (opened.decoder, [read_number(p) for p in clips[0].frames_THWC]) == ("ffmpeg", [0, 60, 120, 180])


def test_where_neither_has_a_decoder_the_file_fails(find):
    for decoder in ("auto", "ffmpeg"):
        with pytest.raises(InputError) as caught:
            decode(find("unknown.mp4"), decoder)
        assert caught.value.error_type == "unsupported_codec"


def test_an_ffmpeg_that_hangs_ends_with_the_decoding_process(find, tmp_path, monkeypatch):
    command, pids = tmp_path / "ffmpeg", tmp_path / "pid"
    command.write_text(f"#!/bin/sh\necho $$ > {pids}\nexec sleep 600\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Decoder() as decoder, pytest.raises(Exception, match="no sign of life") as caught:
        list(decoder.decode(request(find("h264_base.mp4"), "ffmpeg", deadline_s=2)))
    assert caught.value.error_type == "decode_timeout"
    state = Path(f"/proc/{pids.read_text().strip()}/status")
    assert not state.exists() or "zombie" in state.read_text()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["h264_base.mp4", "vfr.mp4", "rot90.mp4", "longgop.mp4", "sar.mp4"])
def test_libraries_give_the_same_frames(find, library, name):
    opened, clip, done = decode(find(name), library, window_s=60, num_frames=8)
    _, other, _ = decode(find(name), "pyav", window_s=60, num_frames=8)
    assert [read_number(p) for p in clip.frames_THWC] == [read_number(p) for p in other.frames_THWC]
    assert clip.frame_times_s == other.frame_times_s
    assert (opened.decoder, clip.decoder, done.damaged) == (library, library, False)


def test_a_library_that_counts_other_frames_fails_the_file(find):
    library = "decord"
    if importlib.util.find_spec(library) is None:
        pytest.skip("decord is not installed")
    with pytest.raises(InputError, match="decord counts 180 frames where the file shows 135") as caught:
        decode(find("editlist_trim.mp4"), library, window_s=60)
    assert caught.value.error_type == "unreadable"
    assert examine(str(find("editlist_trim.mp4"))).info.num_frames == 135


def test_what_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("ffmpeg") is None
    with pytest.raises(ConfigError, match="no ffmpeg command"):
        check_installed(DecodeConfig(decoder="ffmpeg"))
    for name in ("torchcodec", "decord"):
        if importlib.util.find_spec(name) is None:
            with pytest.raises(ConfigError, match=f"pip install {name}"):
                check_installed(DecodeConfig(decoder=name))
    check_installed(DecodeConfig())


def test_frames_refuses_what_is_not_installed(find, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    job = qwen_ray.JobConfig(decode=DecodeConfig(decoder="ffmpeg"))
    with pytest.raises(ConfigError, match="no ffmpeg command"):
        qwen_ray.frames(str(find("silent.mp4")), 0.0, 1.0, job)


@pytest.mark.parametrize("name", ["torchcodec", "decord"])
def test_a_library_that_cannot_be_loaded_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('no libavutil for it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=f"{name}.*cannot be loaded .no libavutil for it"):
        check_installed(DecodeConfig(decoder=name))
