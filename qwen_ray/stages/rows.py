"""The one row type that flows through the pipeline.

Every stage gets and gives rows of this schema, whatever their kind, so blocks never differ in type. Small facts
travel as JSON in `body`, in the words of the output tables; pixels and samples travel as bytes that the stage which
uses them drops.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Kind = Literal["video", "clip", "speech", "summary"]

ROWS = pa.schema(
    [
        pa.field("kind", pa.string()),
        pa.field("video_id", pa.string()),
        pa.field("item_id", pa.string()),  # clip id, chunk id, or the video's own
        pa.field("body", pa.string()),  # JSON
        pa.field("frames_THWC", pa.large_binary()),  # uint8; `binary` would end at 2 GiB a block
        pa.field("frames_shape", pa.list_(pa.int32())),
        pa.field("pcm", pa.large_binary()),  # int16, 16 kHz, mono
    ]
)


@dataclass(slots=True)
class Row:
    """A row in Python: a clip to caption, a chunk of speech to transcribe, what a video consists of (kind `video`, its
    last row), or a video's captions to merge.
    """

    kind: Kind
    video_id: str
    item_id: str
    body: dict[str, Any] = field(default_factory=dict)
    frames_THWC: npt.NDArray[np.uint8] | None = None
    pcm: npt.NDArray[np.int16] | None = None

    @property
    def name(self) -> str:
        """Tells the row from every other, its video first."""
        return f"{self.video_id}-{self.item_id}"

    def to_table(self) -> pa.Table:
        """One-row Arrow table of schema `ROWS`."""
        texts = (self.kind, self.video_id, self.item_id, json.dumps(self.body))
        shape = None if self.frames_THWC is None else list(self.frames_THWC.shape)
        columns = [pa.array([text], pa.string()) for text in texts]
        columns += [_binary(self.frames_THWC), pa.array([shape], pa.list_(pa.int32())), _binary(self.pcm)]
        return pa.table(columns, schema=ROWS)


def _binary(values: npt.NDArray[Any] | None) -> pa.Array:
    """An array's memory as one value of type `large_binary`, not copied.

    Not `pa.array([memoryview])`: pyarrow 26 never lets go of the memory, which cost a decode actor 4 MB a clip.
    """
    if values is None:
        return pa.nulls(1, pa.large_binary())
    data = np.ascontiguousarray(values)
    offsets = np.array([0, data.nbytes], np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, buffers)


def read_rows(table: pa.Table) -> Iterator[Row]:
    """Rows of a table; pixels and samples are read-only views of its memory, not copies."""
    names = ("kind", "video_id", "item_id", "body", "frames_shape")
    small = table.select(names).to_pylist()
    frames = _views(table.column("frames_THWC"))
    pcm = _views(table.column("pcm"))
    for values, pixels, samples in zip(small, frames, pcm, strict=True):
        yield Row(
            kind=cast(Kind, values["kind"]),
            video_id=values["video_id"],
            item_id=values["item_id"],
            body=json.loads(values["body"]),
            frames_THWC=None if pixels is None else pixels.reshape(values["frames_shape"]),
            pcm=None if samples is None else samples.view(np.int16),
        )


def _views(column: pa.ChunkedArray) -> Iterator[npt.NDArray[np.uint8] | None]:
    """Zero-copy views: `scalar.as_buffer()` copies, the chunk's own buffers do not (measured, Arrow 26)."""
    for chunk in column.chunks:
        _, offsets_buffer, data = chunk.buffers()
        if data is None:  # nothing but nulls
            yield from [None] * len(chunk)
            continue
        offsets = np.frombuffer(offsets_buffer, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        pixels = np.frombuffer(data, np.uint8)
        for k, valid in enumerate(chunk.is_valid().to_pylist()):
            yield pixels[offsets[k] : offsets[k + 1]] if valid else None
