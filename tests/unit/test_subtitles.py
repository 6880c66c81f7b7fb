"""Subtitle files from the tables."""

from __future__ import annotations

import pytest
import srt

from qwen_ray.config import StorageConfig
from qwen_ray.io.commits import CommitLog, VideoRows
from qwen_ray.io.lease import Lease
from qwen_ray.io.storage import open_storage
from qwen_ray.subtitles import write_subtitles


def _video(video_id, uri, segments, speech_status="ok"):
    rows = [
        {"segment_id": f"{video_id}-{k}", "video_id": video_id, "segment_index": k, "status": "ok"}
        | dict(zip(("start_s", "end_s", "text"), segment, strict=True))
        for k, segment in enumerate(segments)
    ]
    video = {"video_id": video_id, "uri": uri, "speech_status": speech_status, "status": "ok"}
    return VideoRows(video_id=video_id, part=None, clips=[], segments=rows, video=video)


@pytest.fixture
def output(tmp_path):
    def write(*videos):
        storage = open_storage(str(tmp_path / "out"), StorageConfig())
        with Lease.acquire(storage, "run", 60) as lease:
            CommitLog(storage, lease).commit_videos(videos)
        return storage

    return write


def test_times_and_text_arrive_in_order(output, tmp_path):
    said = [(0.5, 1.25, "First."), (3661.0, 3662.5, "An hour later — très bien, {not a tag} <i>.")]
    (path,) = write_subtitles(output(_video("a", "file:///x/film%20one.mp4", said)), tmp_path / "srt")
    assert path.name == "film one.srt"
    text = path.read_text(encoding="utf-8")
    shown = [(one.start.total_seconds(), one.end.total_seconds(), one.content) for one in srt.parse(text)]
    assert shown == said
    assert "00:00:00,500 --> 00:00:01,250" in text
    assert "01:01:01,000 --> 01:01:02,500" in text
    assert "An hour later — très bien, {not a tag} <i>." in text


def test_silence_is_a_valid_empty_file_and_no_sound_is_none(output, tmp_path):
    silent = _video("a", "file:///silent.mp4", [], "no_speech")
    mute = _video("b", "file:///mute.mp4", [], "no_audio")
    (path,) = write_subtitles(output(silent, mute), tmp_path / "srt")
    assert path.name == "silent.srt"
    assert list(srt.parse(path.read_text())) == []


def test_videos_of_one_name_do_not_overwrite_each_other(output, tmp_path):
    storage = output(
        _video("aaaaaaaaaa", "s3://b/one/clip.mp4", [(0, 1, "one")]),
        _video("bbbbbbbbbb", "s3://b/two/clip.mov", [(0, 1, "two")]),
    )
    paths = write_subtitles(storage, tmp_path / "srt")
    assert [path.name for path in paths] == ["clip.aaaaaaaa.srt", "clip.bbbbbbbb.srt"]
    assert "one" in paths[0].read_text()


@pytest.mark.parametrize("uri", ["s3://b/..%2f..%2fetc", "s3://b/..", "file:///%2e%2e%2fa%00b.mp4", "s3://b/.mp4"])
def test_a_hostile_name_stays_in_the_folder(output, tmp_path, uri):
    (path,) = write_subtitles(output(_video("a", uri, [(0, 1, "x")])), tmp_path / "srt")
    assert path.parent == tmp_path / "srt"
    assert path.is_file()
