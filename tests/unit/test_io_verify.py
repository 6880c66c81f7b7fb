"""Each broken promise is found, and a sound output has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qwen_ray.config import StorageConfig
from qwen_ray.io.commits import CommitLog, VideoRows
from qwen_ray.io.lease import Lease
from qwen_ray.io.parts import list_parts, part_key, read_part
from qwen_ray.io.storage import Storage, open_storage
from qwen_ray.io.verify import verify
from qwen_ray.schema import TABLES, span_id, table_of, video_id_of

Rows = list[dict[str, Any]]


def _video(name: str) -> VideoRows:
    video_id = video_id_of(name)
    spans = [(0.0, 2.0), (2.0, 4.0), (4.0, 5.0)]
    clips = [
        {"clip_id": span_id("clip", video_id, *span), "video_id": video_id, "start_s": span[0], "end_s": span[1],
         "status": "ok"} for span in spans
    ]  # fmt: skip
    word = {"word": "hi", "start_s": 1.0, "end_s": 1.5, "probability": 0.9, "aligned": True}
    segment = {
        "segment_id": span_id("segment", video_id, 1.0, 3.0), "video_id": video_id, "start_s": 1.0, "end_s": 3.0,
        "status": "ok", "words": [word],
    }  # fmt: skip
    video = {
        "video_id": video_id, "status": "ok", "caption_status": "ok", "speech_status": "ok", "duration_s": 5.0,
        "num_clips": 3, "num_segments": 1,
    }  # fmt: skip
    return VideoRows(video_id=video_id, part=None, clips=clips, segments=[segment], video=video)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "out"), StorageConfig())
    with Lease.acquire(storage, "run", 3600.0) as lease:
        log = CommitLog(storage, lease)
        log.commit_videos([_video("a"), _video("b")])
        log.commit_videos([_video("c")])
    return storage


def test_a_sound_output(storage: Storage, tmp_path: Path) -> None:
    assert verify(storage) == []
    storage.write("_commits/00000001-00000009.arrow", b"")  # a fence
    assert verify(storage) == []
    assert verify(open_storage(str(tmp_path / "none"), StorageConfig())) == []


def _edit(storage: Storage, table: str, change: Callable[[Rows], Rows]) -> None:
    part = list_parts(storage, table)[0]
    rows = change(read_part(storage, table, part).to_pylist())
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(table, rows), sink)
    storage.write(part_key(table, part), sink.getvalue().to_pybytes())


def _set(nth: int, **values: Any) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        rows[nth] |= values
        return rows

    return change


LATE_WORD = {"word": "hi", "start_s": 1.0, "end_s": 9.0, "probability": 0.9, "aligned": True}


@pytest.mark.parametrize(
    ("table", "change", "code", "words"),
    [
        ("videos", lambda rows: [*rows, rows[0]], "duplicate_id", "2 rows with video_id"),
        ("clips", lambda rows: [*rows, rows[0]], "duplicate_id", "2 rows with clip_id"),
        ("segments", lambda rows: [*rows, rows[0]], "duplicate_id", "2 rows with segment_id"),
        ("clips", lambda rows: rows[1:], "wrong_count", "2 clips, its num_clips says 3"),
        ("segments", lambda rows: rows[1:], "wrong_count", "0 segments"),
        ("videos", lambda rows: rows[1:], "stray_rows", "3 clips of video"),
        ("videos", _set(0, num_clips=None), "wrong_count", "says None"),
        ("clips", _set(0, end_s=5.1), "bad_time", "5.1"),
        ("clips", _set(0, start_s=-0.1), "bad_time", "-0.1"),
        ("clips", _set(0, start_s=3.0, end_s=2.0), "bad_time", "backwards"),
        ("clips", _set(0, start_s=None), "bad_time", "None"),
        ("clips", _set(0, end_s=float("nan")), "bad_time", "nan"),
        ("segments", _set(0, end_s=6.0), "bad_time", "segments"),
        ("segments", _set(1, words=[LATE_WORD]), "bad_time", "words of segments"),
        ("videos", _set(0, duration_s=4.0), "bad_time", "of 4.0 s"),
        ("videos", _set(0, status="fine"), "bad_status", "status 'fine'"),
        ("videos", _set(0, caption_status="no_audio"), "bad_status", "caption_status 'no_audio'"),
        ("videos", _set(0, speech_status=None), "bad_status", "speech_status None"),
        ("videos", _set(0, error_type="oops"), "bad_status", "error_type 'oops'"),
        ("clips", _set(0, status="skipped"), "bad_status", "status 'skipped'"),
    ],
)
def test_seeded_faults(storage: Storage, table: str, change: Callable[[Rows], Rows], code: str, words: str) -> None:
    _edit(storage, table, change)
    problems = verify(storage)
    assert code in [problem.code for problem in problems]
    assert any(words in problem.message for problem in problems if problem.code == code), problems


def test_the_same_video_in_two_parts(storage: Storage) -> None:
    first, second = list_parts(storage, "videos")
    for table in TABLES:
        storage.write(part_key(table, second), storage.read(part_key(table, first)).data)
    codes = [problem.code for problem in verify(storage)]
    assert codes.count("duplicate_id") == 2 + 6 + 2


def test_ids_that_share_their_beginning_are_told_apart(storage: Storage) -> None:
    ids = [read_part(storage, "clips", list_parts(storage, "clips")[0])["clip_id"][0].as_py()]
    _edit(storage, "clips", _set(1, clip_id=ids[0][:16] + "0" * 16))
    assert verify(storage) == []
    _edit(storage, "clips", _set(1, clip_id="not hex"))
    assert verify(storage) == []


@pytest.mark.parametrize("table", list(TABLES))
def test_a_part_missing_in_one_table(storage: Storage, table: str) -> None:
    storage.delete(part_key(table, list_parts(storage, table)[0]))
    problems = [problem for problem in verify(storage) if problem.code == "missing_part"]
    assert [f"not in table {table}" in problem.message for problem in problems] == [True]


@pytest.mark.parametrize("key", ["_commits/00000001-00000009.arrow", "_commits/open.arrow"])
def test_left_records(storage: Storage, key: str) -> None:
    storage.write(key, b"something")
    assert [(p.code, key in p.message) for p in verify(storage)] == [("left_record", True)]


def test_unreadable_parts(storage: Storage) -> None:
    key = part_key("clips", list_parts(storage, "clips")[0])
    storage.write(key, storage.read(key).data[:-9])
    assert [problem.code for problem in verify(storage)] == ["unreadable"]


@pytest.mark.parametrize("version", [b"99", b"", b"x"])
def test_a_schema_version_from_elsewhere(storage: Storage, version: bytes) -> None:
    part = list_parts(storage, "videos")[1]
    rows = read_part(storage, "videos", part).replace_schema_metadata({b"qwen_ray.schema_version": version})
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    storage.write(part_key("videos", part), sink.getvalue().to_pybytes())
    problems = verify(storage)
    assert [problem.code for problem in problems] == ["unreadable"]
    assert "schema version" in problems[0].message
