"""From the pipeline's rows to the rows of the three tables. Pure: no storage, no Ray."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from qwen_ray.errors import RETRYABLE
from qwen_ray.io.ledger import Fingerprints, Todo
from qwen_ray.schema import CLIPS, VIDEOS, span_id
from qwen_ray.stages.rows import Row

CAPTION_COLUMNS = (
    *("caption_status", "num_clips", "summary", "summary_flags"),
    *("decode_fingerprint", "caption_fingerprint"),
)
FACT_COLUMNS = (
    *("duration_s", "width", "height", "rotation_deg", "sar", "codec", "avg_fps", "num_frames", "tracks"),
    *("has_audio", "audio_offset_s", "start_offset_s"),
)
SPEECH_COLUMNS = ("speech_status", "num_segments", "language", "transcript", "speech_fingerprint")
"""Columns of `videos` that belong to one component, kept from the old row when only the other is done again."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What every row of a run is stamped with."""

    run_id: str
    fingerprints: Fingerprints


@dataclass(frozen=True, slots=True)
class Finished:
    """All rows of one input, in the columns of the tables."""

    todo: Todo
    video: dict[str, Any]
    clips: list[dict[str, Any]]
    segments: list[dict[str, Any]]


def finish(todo: Todo, summary: Row, items: Sequence[Row], identity: Identity) -> Finished:
    """The rows of one input from its summary and all of its clips and chunks."""
    clips = clip_rows([row for row in items if row.kind == "clip"], todo, identity)
    chunks = sorted((row for row in items if row.kind == "speech"), key=lambda row: float(row.body["start_s"]))
    info = summary.body["info"]
    segments = segment_rows(todo.source.video_id, chunks, info["duration_s"] if info else 0.0, identity)
    video = video_row(todo, summary, clips, chunks, segments, identity)
    merged = next((row.body for row in items if row.kind == "summary"), None)
    return Finished(todo, with_summary(video, merged) if merged else video, clips, segments)


def with_summary(video: dict[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """The row of `videos` with the summary of its captions; one that failed leaves the captions `partial`."""
    if merged["status"] == "ok":
        return video | {"summary": merged["summary"], "summary_flags": merged["flags"]}
    error = {name: video[name] or merged[name] for name in ("error_type", "error_message")}
    status = {name: "partial" if video[name] == "ok" else video[name] for name in ("status", "caption_status")}
    return video | status | error


def clip_rows(rows: Sequence[Row], todo: Todo, identity: Identity) -> list[dict[str, Any]]:
    """Rows of `clips`, in order of time."""
    stamp = {
        "decode_fingerprint": identity.fingerprints.decode,
        "caption_fingerprint": identity.fingerprints.of_caption(todo.source),
        "run_id": identity.run_id,
        "attempts": todo.attempts + 1,
    }
    columns = set(CLIPS.names)
    ordered = sorted(rows, key=lambda row: int(row.body["clip_index"]))
    return [
        {"flags": []}
        | {name: value for name, value in row.body.items() if name in columns}
        | {"clip_id": row.item_id, "video_id": row.video_id}
        | stamp
        for row in ordered
    ]


def segment_rows(video_id: str, chunks: Sequence[Row], duration_s: float, identity: Identity) -> list[dict[str, Any]]:
    """Rows of `segments`, numbered in order of time, every time within [0, `duration_s`].

    A chunk that could not be transcribed is one row with `status = failed`, so that no stretch of speech is silently
    absent.
    """
    rows: list[dict[str, Any]] = []
    seen: Counter[tuple[float, float]] = Counter()
    for chunk in chunks:
        for found in _segments_of(chunk.body):
            start_s, end_s = _within(found["start_s"], duration_s), _within(found["end_s"], duration_s)
            nth = seen[start_s, end_s]
            seen[start_s, end_s] += 1
            flags = [*found["flags"], *(["before_video"] if found["start_s"] < 0 else [])]
            words = [w | {k: _within(w[k], duration_s) for k in ("start_s", "end_s")} for w in found["words"]]
            rows.append(
                found
                | {"start_s": start_s, "end_s": max(start_s, end_s), "flags": flags, "words": words}
                | {"segment_id": span_id("segment", video_id, start_s, end_s, nth), "video_id": video_id}
                | {"segment_index": len(rows), "raw_text": found["text"], "run_id": identity.run_id}
                | {"decode_fingerprint": identity.fingerprints.decode}
                | {"speech_fingerprint": identity.fingerprints.speech}
            )
    return rows


def _segments_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    made_by = {"model": body.get("model"), "model_revision": body.get("model_revision")}
    if body.get("status") == "failed":
        kept = ("start_s", "end_s", "status", "error_type", "error_message")
        return [{k: body.get(k) for k in kept} | {"text": None, "flags": [], "words": []} | made_by]
    return [segment | {"status": "ok"} | made_by for segment in body["segments"] if segment["text"]]


def _within(time_s: float, duration_s: float) -> float:
    return min(max(time_s, 0.0), duration_s)


def video_row(
    todo: Todo,
    summary: Row,
    clips: Sequence[dict[str, Any]],
    chunks: Sequence[Row],
    segments: Sequence[dict[str, Any]],
    identity: Identity,
) -> dict[str, Any]:
    """The row of `videos`."""
    source, body = todo.source, summary.body
    info: dict[str, Any] = body["info"] or {}
    caption = caption_status(todo.want_caption, info, clips)
    speech = speech_status(todo.want_speech, info, body["error"] or body["audio_error"], chunks, segments)
    error_type, error_message = _error_of(body, clips, segments)
    spoken = [segment for segment in segments if segment["status"] == "ok"]
    return {
        **{name: info[name] for name in VIDEOS.names if name in info and name != "tracks"},
        "tracks": json.dumps(info["tracks"]) if info else None,
        "video_id": source.video_id,
        "uri": source.uri,
        "version": source.version,
        "size_bytes": source.size_bytes,
        "status": status_of(caption, speech, damaged=body["damaged"] or body["error"] is not None),
        "caption_status": caption,
        "speech_status": speech,
        "error_type": error_type,
        "error_message": error_message,
        "attempts": todo.attempts + 1,
        "num_clips": len(clips),
        "num_segments": len(segments),
        "language": _language(spoken),
        "transcript": " ".join(segment["text"] for segment in spoken) if todo.want_speech else None,
        "summary": None,
        "summary_flags": [],
        "metadata": json.dumps(source.metadata, ensure_ascii=False),
        "decode_fingerprint": identity.fingerprints.decode,
        "caption_fingerprint": identity.fingerprints.of_caption(source),
        "speech_fingerprint": identity.fingerprints.speech,
        "run_id": identity.run_id,
        "finished_at": datetime.now(UTC),
    }


def caption_status(wanted: bool, info: dict[str, Any], clips: Sequence[dict[str, Any]]) -> str:
    """One of `schema.CAPTION_STATUSES`; `info` is empty when the file could not be opened."""
    if not wanted:
        return "skipped"
    if info and not info["has_video"]:
        return "no_video"
    return _status_of_pieces([clip["status"] for clip in clips])


def speech_status(
    wanted: bool,
    info: dict[str, Any],
    error: Any,
    chunks: Sequence[Row],
    segments: Sequence[dict[str, Any]],
) -> str:
    """One of `schema.SPEECH_STATUSES`; `error` is what kept the sound from being read to its end, if anything did."""
    if not wanted:
        return "skipped"
    if info and not info["has_audio"]:
        return "no_audio"
    if not chunks:
        return "no_speech" if info and not error else "failed"
    status = _status_of_pieces([chunk.body.get("status", "ok") for chunk in chunks])
    if status == "ok" and error:
        return "partial"
    return "no_speech" if status == "ok" and not segments else status


def _status_of_pieces(statuses: Sequence[str]) -> str:
    if all(status == "failed" for status in statuses):
        return "failed"  # also when there is not one piece
    return "ok" if all(status == "ok" for status in statuses) else "partial"


def status_of(caption: str, speech: str, *, damaged: bool) -> str:
    """`failed` when nothing asked for came out, `partial` when some piece failed or the file was damaged, else `ok`."""
    asked = [status for status in (caption, speech) if status != "skipped"]
    troubled = damaged or any(status in ("failed", "partial") for status in asked)
    if not troubled:
        return "ok"
    produced = any(status in ("ok", "partial") for status in asked)
    harmless = not any(status == "failed" for status in asked)  # damaged, yet there was nothing to lose
    return "partial" if produced or harmless else "failed"


def _error_of(
    body: dict[str, Any], clips: Sequence[dict[str, Any]], segments: Sequence[dict[str, Any]]
) -> tuple[str | None, str | None]:
    """The first error that may pass, or else the first: on it depends whether the video is tried again."""
    errors = [(error[0], error[1]) for error in (body["error"], body["audio_error"]) if error]
    errors += [(p["error_type"], p["error_message"]) for p in (*clips, *segments) if p["status"] != "ok"]
    passing = [error for error in errors if RETRYABLE[error[0]]]
    return next(iter(passing + errors), (None, None))


def _language(spoken: Sequence[dict[str, Any]]) -> str | None:
    """The language that most of the speaking time is in."""
    time_s: Counter[str] = Counter()
    for segment in spoken:
        time_s[segment["language"]] += segment["end_s"] - segment["start_s"]
    return time_s.most_common(1)[0][0] if time_s else None


def merge(old: dict[str, Any], new: dict[str, Any], *, keep_caption: bool, keep_speech: bool) -> dict[str, Any]:
    """The `videos` row after one component was done again: the kept one's columns stay as they were.

    So do the facts of the file where it could not be opened this time, and the word that it is damaged: it is the same
    version of it.
    """
    kept = (CAPTION_COLUMNS if keep_caption else ()) + (SPEECH_COLUMNS if keep_speech else ())
    kept += FACT_COLUMNS if new["duration_s"] is None else ()
    merged = new | {name: old[name] for name in kept}
    damaged = _is_damaged(old) or _is_damaged(new)
    merged["status"] = status_of(merged["caption_status"], merged["speech_status"], damaged=damaged)
    if merged["status"] != "ok" and merged["error_type"] is None:  # the trouble lies in the component that is kept
        merged |= {name: old[name] for name in ("error_type", "error_message")}
    return merged


def _is_damaged(video: dict[str, Any]) -> bool:
    """Whether a row is `partial` though neither component had trouble."""
    troubled = {video["caption_status"], video["speech_status"]} & {"partial", "failed"}
    return video["status"] == "partial" and not troubled
