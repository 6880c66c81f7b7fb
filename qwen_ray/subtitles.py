"""Subtitle files (SubRip) from the tables."""

from __future__ import annotations

import posixpath
import urllib.parse
from pathlib import Path

import pyarrow as pa
import pysubs2

from qwen_ray.io.storage import Storage
from qwen_ray.tables import read_table


def write_subtitles(storage: Storage, directory: Path) -> list[Path]:
    """One `.srt` per video with sound, named like the video; a video without speech gets a valid, empty file.

    Two videos of one name in different folders are told apart by the start of their id. Returns the paths, sorted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    videos = read_table(storage, "videos", ["video_id", "uri", "speech_status"]).to_pylist()
    by_video = _segments(storage)
    spoken = [video for video in videos if video["speech_status"] in ("ok", "partial", "no_speech")]
    names = [_stem(video["uri"]) for video in spoken]
    paths = []
    for video, name in zip(spoken, names, strict=True):
        unique = name if names.count(name) == 1 else f"{name}.{video['video_id'][:8]}"
        path = directory / f"{unique}.srt"
        _subtitles(by_video.get(video["video_id"], [])).save(str(path), format_="srt")
        paths.append(path)
    return sorted(paths)


def _segments(storage: Storage) -> dict[str, list[dict[str, object]]]:
    columns = ["video_id", "segment_index", "start_s", "end_s", "text", "status"]
    table: pa.Table = read_table(storage, "segments", columns)
    by_video: dict[str, list[dict[str, object]]] = {}
    for row in table.sort_by([("video_id", "ascending"), ("segment_index", "ascending")]).to_pylist():
        if row["status"] == "ok":
            by_video.setdefault(row["video_id"], []).append(row)
    return by_video


def _subtitles(segments: list[dict[str, object]]) -> pysubs2.SSAFile:
    subtitles = pysubs2.SSAFile()
    for row in segments:
        event = pysubs2.SSAEvent(start=pysubs2.make_time(s=row["start_s"]), end=pysubs2.make_time(s=row["end_s"]))
        event.plaintext = row["text"]
        subtitles.append(event)
    return subtitles


def _stem(uri: str) -> str:
    """File name without extension. Separators and control characters cannot leave the directory."""
    name = urllib.parse.unquote(posixpath.basename(uri.split("#", 1)[0]))
    stem = posixpath.splitext(name)[0]
    clean = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in stem)
    return clean.strip(". ") or "video"
