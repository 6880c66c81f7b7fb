"""The output contract: three Arrow schemas, the closed sets of statuses, and how ids are made.

Every column is typed from the first row, so that a file in which all captions are null reads like any other. The schema
version travels in the Parquet footer under `qwen_ray.schema_version`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = "2"

STATUSES = ("ok", "partial", "failed")
CAPTION_STATUSES = ("ok", "partial", "no_video", "failed", "skipped")
SPEECH_STATUSES = ("ok", "partial", "no_audio", "no_speech", "failed", "skipped")

_META = {"qwen_ray.schema_version": SCHEMA_VERSION}
_TEXT, _F64, _I32, _I64 = pa.string(), pa.float64(), pa.int32(), pa.int64()
_TIME = pa.timestamp("us", tz="UTC")


def _schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns], metadata=_META)


VIDEOS = _schema(
    ("video_id", _TEXT),
    ("uri", _TEXT),
    ("version", _TEXT),
    ("size_bytes", _I64),
    ("status", _TEXT),
    ("caption_status", _TEXT),
    ("speech_status", _TEXT),
    ("error_type", _TEXT),
    ("error_message", _TEXT),
    ("attempts", _I32),
    ("duration_s", _F64),
    ("width", _I32),
    ("height", _I32),
    ("rotation_deg", _I32),
    ("sar", _TEXT),
    ("codec", _TEXT),
    ("avg_fps", _F64),
    ("num_frames", _I64),
    ("tracks", _TEXT),
    ("has_audio", pa.bool_()),
    ("audio_offset_s", _F64),
    ("start_offset_s", _F64),
    ("num_clips", _I32),
    ("num_segments", _I32),
    ("language", _TEXT),
    ("transcript", _TEXT),
    ("summary", _TEXT),
    ("summary_flags", pa.list_(_TEXT)),
    ("metadata", _TEXT),
    ("decode_fingerprint", _TEXT),
    ("caption_fingerprint", _TEXT),
    ("speech_fingerprint", _TEXT),
    ("run_id", _TEXT),
    ("finished_at", _TIME),
    ("vanished_at", _TIME),
)

ANSWER = pa.struct(
    [
        ("prompt_name", _TEXT),
        ("prompt_hash", _TEXT),
        ("caption", _TEXT),
        ("flags", pa.list_(_TEXT)),
        ("finish_reason", _TEXT),
        ("num_prompt_tokens", _I32),
        ("num_output_tokens", _I32),
        ("error_type", _TEXT),
        ("error_message", _TEXT),
    ]
)
"""One prompt's answer about a clip."""

CLIPS = _schema(
    ("clip_id", _TEXT),
    ("video_id", _TEXT),
    ("clip_index", _I32),
    ("start_s", _F64),
    ("end_s", _F64),
    ("status", _TEXT),
    ("error_type", _TEXT),
    ("error_message", _TEXT),
    ("attempts", _I32),
    ("flags", pa.list_(_TEXT)),
    ("caption", _TEXT),
    ("parsed", _TEXT),
    ("finish_reason", _TEXT),
    ("num_prompt_tokens", _I32),
    ("num_output_tokens", _I32),
    ("frame_times_s", pa.list_(_F64)),
    ("num_frames_requested", _I32),
    ("num_frames_decoded", _I32),
    ("num_repaired_frames", _I32),
    ("height", _I32),
    ("width", _I32),
    ("effective_fps", _F64),
    ("precision", _TEXT),
    ("decoder", _TEXT),
    ("model", _TEXT),
    ("model_revision", _TEXT),
    ("prompt_name", _TEXT),
    ("prompt_hash", _TEXT),
    ("answers", pa.list_(ANSWER)),
    ("decode_fingerprint", _TEXT),
    ("caption_fingerprint", _TEXT),
    ("run_id", _TEXT),
)

WORD = pa.struct([("word", _TEXT), ("start_s", _F64), ("end_s", _F64), ("probability", _F64), ("aligned", pa.bool_())])

SEGMENTS = _schema(
    ("segment_id", _TEXT),
    ("video_id", _TEXT),
    ("segment_index", _I32),
    ("start_s", _F64),
    ("end_s", _F64),
    ("status", _TEXT),
    ("error_type", _TEXT),
    ("error_message", _TEXT),
    ("flags", pa.list_(_TEXT)),
    ("text", _TEXT),
    ("raw_text", _TEXT),
    ("language", _TEXT),
    ("avg_logprob", _F64),
    ("no_speech_prob", _F64),
    ("words", pa.list_(WORD)),
    ("model", _TEXT),
    ("model_revision", _TEXT),
    ("decode_fingerprint", _TEXT),
    ("speech_fingerprint", _TEXT),
    ("run_id", _TEXT),
)

TABLES: dict[str, pa.Schema] = {"clips": CLIPS, "segments": SEGMENTS, "videos": VIDEOS}
"""In the order in which parts are written: `videos` last, so that a listed video always has its rows."""


def table_of(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows of table `name` as Arrow; a missing key is null, an unknown key is an error (KeyError)."""
    schema = TABLES[name]
    for row in rows:
        unknown = row.keys() - set(schema.names)
        if unknown:
            raise KeyError(f"{name} has no column {', '.join(sorted(unknown))}")
    return pa.Table.from_pylist(rows, schema=schema)


def video_id_of(canonical_uri: str) -> str:
    """blake2b-128 of the canonical URI, 32 hex digits: the same for the same input on every machine and in every
    run.
    """
    return hashlib.blake2b(canonical_uri.encode(), digest_size=16).hexdigest()


def span_id(kind: str, video_id: str, start_s: float, end_s: float, nth: int = 0) -> str:
    """Id of a clip or segment: hash of its video, kind and times in whole microseconds.

    `nth` tells apart spans of one kind with equal times (a recogniser may return two segments clamped to one instant).
    """
    text = f"{kind}:{video_id}:{round(start_s * 1e6)}:{round(end_s * 1e6)}:{nth}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
