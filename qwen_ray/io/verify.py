"""Whether an output keeps its promises. Reads part by part; nothing is changed and no lease is needed.

Ids are compared as 64-bit keys, so that 100 million clips fit into 1 GiB; what seems to collide is compared in full in
a second pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_ray.errors import RETRYABLE, ConfigError
from qwen_ray.io.commits import COMMITS
from qwen_ray.io.ids import id_keys
from qwen_ray.io.objects import NotFound, Storage
from qwen_ray.io.parts import list_parts, read_part
from qwen_ray.schema import CAPTION_STATUSES, SPEECH_STATUSES, STATUSES, TABLES

_IDS = {"videos": "video_id", "clips": "clip_id", "segments": "segment_id"}
_PIECES = {"clips": "num_clips", "segments": "num_segments"}
_SETS = {"status": STATUSES, "caption_status": CAPTION_STATUSES, "speech_status": SPEECH_STATUSES}
_NEEDED = {
    "videos": ["video_id", *_SETS, "error_type", "duration_s", *_PIECES.values()],
    "clips": ["clip_id", "video_id", "status", "error_type", "start_s", "end_s"],
    "segments": ["segment_id", "video_id", "status", "error_type", "start_s", "end_s", "words"],
}
_SLACK_S = 1e-6


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken promise."""

    code: str
    """duplicate_id, wrong_count, stray_rows, bad_time, missing_part, bad_status, left_record or unreadable."""
    message: str
    """One sentence for people, with the part and an example."""


def verify(storage: Storage) -> list[Problem]:
    """All broken promises of an output; none while everything is as it should be and no run is writing.

    Raises:
        TransientError: the store failed. ConfigError: it refused us.
    """
    parts = {table: list_parts(storage, table) for table in TABLES}
    problems = [*_left_records(storage), *_missing_parts(parts)]
    keys: dict[str, list[Any]] = {table: [] for table in TABLES}
    for part in sorted(set().union(*parts.values())):
        try:
            tables = {table: _read(storage, table, part, _NEEDED[table]) for table in TABLES}
        except ConfigError as error:
            problems.append(Problem("unreadable", str(error)))
            continue
        problems += _check_part(part, tables)
        for table, rows in tables.items():
            keys[table].append(id_keys(rows[_IDS[table]]))
    for table in TABLES:
        problems += _duplicates(storage, table, parts[table], keys[table])
    return problems


def _left_records(storage: Storage) -> Iterator[Problem]:
    for entry in storage.list(COMMITS):
        if entry.size_bytes:  # empty ones are fences against late writers, and stay
            yield Problem("left_record", f"{entry.key} waits for a run to recover it")


def _missing_parts(parts: dict[str, list[str]]) -> Iterator[Problem]:
    every = set().union(*parts.values())
    for table, names in parts.items():
        for part in sorted(every.difference(names)):
            yield Problem("missing_part", f"{part} is not in table {table}, but in another")


def _read(storage: Storage, table: str, part: str, columns: list[str]) -> pa.Table:
    try:
        return read_part(storage, table, part, columns)
    except NotFound:
        return pa.schema([TABLES[table].field(name) for name in columns]).empty_table()


def _check_part(part: str, tables: dict[str, pa.Table]) -> Iterator[Problem]:
    videos = tables["videos"]
    for table, column in _PIECES.items():
        yield from _check_counts(part, table, tables[table], videos, column)
        yield from _check_times(part, table, tables[table], videos)
    for table, rows in tables.items():
        yield from _check_sets(part, table, rows)


def _check_counts(part: str, table: str, rows: pa.Table, videos: pa.Table, column: str) -> Iterator[Problem]:
    found = Counter(rows["video_id"].to_pylist())
    for video_id, told in zip(videos["video_id"].to_pylist(), videos[column].to_pylist(), strict=True):
        if (num_rows := found.pop(video_id, 0)) != (told or 0):
            yield Problem("wrong_count", f"{part}: video {video_id} has {num_rows} {table}, its {column} says {told}")
    for video_id, num_rows in found.items():
        yield Problem("stray_rows", f"{part}: {num_rows} {table} of video {video_id}, which is not in this part")


def _check_times(part: str, table: str, rows: pa.Table, videos: pa.Table) -> Iterator[Problem]:
    """Spans lie within their video; where its length is not known, they only must not run backwards."""
    nth = pc.index_in(rows["video_id"], value_set=videos["video_id"].combine_chunks())
    ends = pc.fill_null(videos["duration_s"].combine_chunks().take(nth), float("inf"))
    yield from _check_spans(part, table, rows["start_s"], rows["end_s"], ends, rows[_IDS[table]])
    if "words" in rows.column_names:
        words, parents = rows["words"].combine_chunks(), pc.list_parent_indices(rows["words"].combine_chunks())
        spans = words.flatten()
        ids = rows[_IDS[table]].take(parents)
        start_s, end_s = pc.struct_field(spans, "start_s"), pc.struct_field(spans, "end_s")
        yield from _check_spans(part, "words of segments", start_s, end_s, ends.take(parents), ids)


def _check_spans(part: str, what: str, start_s: Any, end_s: Any, limit_s: Any, ids: Any) -> Iterator[Problem]:
    good = pc.and_(pc.greater_equal(start_s, 0.0), pc.less_equal(start_s, end_s))
    good = pc.and_(good, pc.less_equal(end_s, pc.add(limit_s, _SLACK_S)))
    bad = pc.indices_nonzero(pc.invert(pc.fill_null(good, False)))  # NaN and null compare as not good
    if len(bad):
        at = bad[0].as_py()
        span = f"{start_s[at]} to {end_s[at]} s of {limit_s[at]} s"
        yield Problem(
            "bad_time", f"{part}: {len(bad)} {what} outside their video or backwards, such as {ids[at]}: {span}"
        )


def _check_sets(part: str, table: str, rows: pa.Table) -> Iterator[Problem]:
    for column, allowed in _SETS.items():
        if column in rows.column_names:
            yield from _check_set(part, table, rows, column, allowed)
    yield from _check_set(part, table, rows, "error_type", (*RETRYABLE, None))


def _check_set(part: str, table: str, rows: pa.Table, column: str, allowed: Iterable[str | None]) -> Iterator[Problem]:
    for value in sorted(set(rows[column].unique().to_pylist()).difference(allowed), key=str):
        yield Problem("bad_status", f"{part}: table {table} has {column} {value!r}, which is none of its values")


def _duplicates(storage: Storage, table: str, parts: list[str], keys: list[Any]) -> Iterator[Problem]:
    every = np.sort(np.concatenate(keys)) if keys else np.zeros(0, np.uint64)
    suspects = np.unique(every[1:][every[1:] == every[:-1]])
    if not len(suspects):
        return
    found: Counter[str] = Counter()
    for part in parts:
        ids = _read(storage, table, part, [_IDS[table]])[_IDS[table]]
        found.update(ids.filter(pa.array(np.isin(id_keys(ids), suspects))).to_pylist())
    for name, times in found.items():
        if times > 1:
            yield Problem("duplicate_id", f"table {table} has {times} rows with {_IDS[table]} {name}")
