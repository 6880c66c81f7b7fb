"""Subtitle files (SubRip) from the tables."""

from __future__ import annotations

import posixpath
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import srt

from qwen_ray.io.storage import Storage, file_name
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
    taken = Counter(name.casefold() for name in names)  # some disks do not tell case apart
    paths = []
    for video, name in zip(spoken, names, strict=True):
        unique = name if taken[name.casefold()] == 1 else f"{name}.{video['video_id'][:8]}"
        path = directory / f"{unique}.srt"
        path.write_text(_subtitles(by_video.get(video["video_id"], [])), encoding="utf-8")
        paths.append(path)
    return sorted(paths)


def _segments(storage: Storage) -> dict[str, list[dict[str, Any]]]:
    columns = ["video_id", "segment_index", "start_s", "end_s", "text", "status"]
    table: pa.Table = read_table(storage, "segments", columns)
    by_video: dict[str, list[dict[str, Any]]] = {}
    for row in table.sort_by([("video_id", "ascending"), ("segment_index", "ascending")]).to_pylist():
        if row["status"] == "ok":
            by_video.setdefault(row["video_id"], []).append(row)
    return by_video


def _subtitles(segments: list[dict[str, Any]]) -> str:
    shown = [
        srt.Subtitle(n, timedelta(seconds=row["start_s"]), timedelta(seconds=row["end_s"]), row["text"])
        for n, row in enumerate(segments, 1)
    ]
    return str(srt.compose(shown, reindex=False))


def _stem(uri: str) -> str:
    """File name without extension. Separators and control characters cannot leave the directory."""
    stem = posixpath.splitext(file_name(uri))[0]
    clean = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in stem)
    return clean.encode()[:200].decode(errors="ignore").strip(". ") or "video"  # a name on disk has 255 bytes
