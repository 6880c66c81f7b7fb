"""The decode stage: one input opened once becomes its clips, its chunks of speech, and one row that sums it up.

The summary comes last and lists every id that belongs to the video, so whoever collects the rows knows when it has
them all. Order and content depend on the input alone: Ray matches the rows of a retried task to the earlier ones by
position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from qwen_ray.config import JobConfig
from qwen_ray.errors import RowError
from qwen_ray.io.storage import fetch
from qwen_ray.media.events import ClipFailed, ClipFrames, DecodeRequest, Done, Event, Opened, SpeechChunk
from qwen_ray.media.isolate import DecodeBug, Decoder
from qwen_ray.schema import span_id
from qwen_ray.stages.rows import Row
from qwen_ray.work import NOWHERE, Work

TODO = pa.schema(
    [
        pa.field("video_id", pa.string()),
        pa.field("uri", pa.string()),
        pa.field("version", pa.string()),
        pa.field("want_caption", pa.bool_()),
        pa.field("want_speech", pa.bool_()),
        pa.field("done_clips", pa.list_(pa.int32())),  # indices whose captions are already there
        pa.field("done_chunks", pa.list_(pa.string())),  # ids whose transcripts are already there
        pa.field("metadata", pa.string()),  # JSON: what the prompts show of the video's metadata
    ]
)


@dataclass(slots=True)
class _Summary:
    """What the last row of a video says."""

    info: dict[str, Any] | None = None
    decoder: str | None = None
    clips: list[tuple[str, float, float]] = field(default_factory=list)
    chunks: list[tuple[str, float, float]] = field(default_factory=list)
    error: tuple[str, str] | None = None
    audio_error: tuple[str, str] | None = None
    damaged: bool = False

    def row(self, video_id: str) -> Row:
        body = {name: getattr(self, name) for name in self.__slots__}
        return Row("video", video_id, video_id, body)


class DecodeStage:
    """Holds a decoder's process."""

    def __init__(self, config: JobConfig, work: Work = NOWHERE) -> None:
        self._config, self._work = config, work
        self._decoder = Decoder(memory_bytes=int(config.decode.memory_gb * 2**30))

    @property
    def decoder_pid(self) -> int | None:
        """Id of the decoding process; None while there is none."""
        return self._decoder.pid

    def close(self) -> None:
        """End the decoding process; the next table starts another."""
        self._decoder.close()

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        """Rows of schema `TODO` in, rows of schema `ROWS` out, one a table."""
        for todo in table.to_pylist():
            with self._work.on(todo["video_id"]):
                for row in self._video(todo):
                    yield row.to_table()

    def _video(self, todo: dict[str, Any]) -> Iterator[Row]:
        summary = _Summary()
        emitted = set(todo["done_clips"])
        try:
            with fetch(todo["uri"], todo["version"], self._config.storage) as path:
                for event in self._decoder.decode(self._request(str(path), todo)):
                    yield from _rows(event, todo, summary, emitted)
        except RowError as error:
            summary.error = (error.error_type, error.message)
            yield from _unreached(todo["video_id"], summary, emitted)
        except DecodeBug as bug:  # our own fault on this one file; the others must not pay for it
            summary.error = ("decode_crashed", str(bug))
            yield from _unreached(todo["video_id"], summary, emitted)
        yield summary.row(todo["video_id"])

    def _request(self, path: str, todo: dict[str, Any]) -> DecodeRequest:
        return DecodeRequest(
            path=path,
            decode=self._config.decode,
            speech=self._config.speech if todo["want_speech"] else None,
            want_frames=todo["want_caption"],
            skip_clips=frozenset(todo["done_clips"]),
        )


def _rows(event: Event, todo: dict[str, Any], summary: _Summary, emitted: set[int]) -> Iterator[Row]:
    video_id = todo["video_id"]
    match event:
        case Opened():
            summary.info, summary.decoder = event.info.to_dict(), event.decoder
            summary.clips = [(span_id("clip", video_id, start, end), start, end) for start, end in event.windows]
        case ClipFrames():
            emitted.add(event.index)
            row = clip_row(event, json.loads(todo["metadata"]))
            yield replace(row, video_id=video_id, item_id=summary.clips[event.index][0])
        case ClipFailed():
            emitted.add(event.index)
            yield _failed_clip(video_id, summary, event.index, event.error_type, event.message)
        case SpeechChunk():
            chunk_id = span_id("chunk", video_id, event.start_s, event.end_s)
            summary.chunks.append((chunk_id, event.start_s, event.end_s))
            if chunk_id not in todo["done_chunks"]:
                times = {"start_s": event.start_s, "end_s": event.end_s}
                yield Row("speech", video_id, chunk_id, times, pcm=event.pcm_int16)
        case Done():
            summary.audio_error, summary.damaged = event.audio_error, event.damaged


def clip_row(event: ClipFrames, metadata: Mapping[str, Any]) -> Row:
    """The row of one clip, not yet of any video; `metadata` is what prompts may show of its video."""
    return Row("clip", "", "", _clip_body(event) | {"metadata": dict(metadata)}, event.frames_THWC)


def _clip_body(event: ClipFrames) -> dict[str, Any]:
    _, height, width, _ = event.frames_THWC.shape
    times = list(event.frame_times_s)
    distinct = sorted(set(times))
    span_s = distinct[-1] - distinct[0]
    return {
        "clip_index": event.index,
        "start_s": event.start_s,
        "end_s": event.end_s,
        "status": "ok",
        "flags": ["padded"] if event.padded else [],
        "frame_times_s": times,
        "num_frames_requested": event.num_requested,
        "num_frames_decoded": event.num_decoded,
        "num_repaired_frames": event.num_repaired,
        "height": height,
        "width": width,
        "effective_fps": (len(distinct) - 1) / span_s if span_s > 0 else None,
        "decoder": event.decoder,
    }


def _failed_clip(video_id: str, summary: _Summary, index: int, error_type: str, message: str) -> Row:
    clip_id, start_s, end_s = summary.clips[index]
    body = {
        "clip_index": index,
        "start_s": start_s,
        "end_s": end_s,
        "status": "failed",
        "error_type": error_type,
        "error_message": message,
        "decoder": summary.decoder,
    }
    return Row("clip", video_id, clip_id, body)


def _unreached(video_id: str, summary: _Summary, emitted: set[int]) -> Iterator[Row]:
    """The clips that were planned when the file was opened and did not come before it failed."""
    assert summary.error is not None
    for index in range(len(summary.clips)):
        if index not in emitted:
            yield _failed_clip(video_id, summary, index, *summary.error)


def todo_row(todo: Any, done_clips: list[int], done_chunks: list[str], metadata: Sequence[str] = ()) -> dict[str, Any]:
    """A row of schema `TODO` from a planned item; `metadata` names what the prompts show of it."""
    return {
        "video_id": todo.source.video_id,
        "uri": todo.source.uri,
        "version": todo.source.version,
        "want_caption": todo.want_caption,
        "want_speech": todo.want_speech,
        "done_clips": done_clips,
        "done_chunks": done_chunks,
        "metadata": json.dumps({name: todo.source.metadata.get(name) for name in metadata}),
    }
