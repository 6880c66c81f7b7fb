"""Collects the pipeline's rows until a video has all of its own.

Rows may come in any order, twice, or from a run that was killed: the first row of an id counts, a video is finished
when every id that its summary lists is there, and what never comes is told by subtraction. Nothing here depends on
how Ray cut or retried its blocks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from qwen_ray.io.ledger import Todo
from qwen_ray.records import Finished, Identity, finish
from qwen_ray.stages.rows import Kind, Row

OPEN_ROWS = pa.schema([(name, pa.string()) for name in ("recipe", "kind", "video_id", "item_id", "body")])


@dataclass(slots=True)
class _Open:
    todo: Todo
    items: dict[str, Row] = field(default_factory=dict)
    summary: Row | None = None
    num_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.summary is not None and not self.missing()

    def listed(self) -> tuple[Row, list[Row]]:
        """The summary and the rows it lists; a saved row of a cut that this decode does not have is left out."""
        assert self.summary is not None
        ids = [item_id for name in ("clips", "chunks") for item_id, _, _ in self.summary.body[name]]
        return self.summary, [self.items[item_id] for item_id in ids]

    def missing(self) -> list[tuple[Kind, str, int, float, float]]:
        """(kind, id, position, start, end) of what the summary lists and has not come."""
        assert self.summary is not None
        spans: dict[Kind, list[tuple[str, float, float]]] = {
            "clip": self.summary.body["clips"],
            "speech": self.summary.body["chunks"],
        }
        return [
            (kind, item_id, position, start_s, end_s)
            for kind, listed in spans.items()
            for position, (item_id, start_s, end_s) in enumerate(listed)
            if item_id not in self.items
        ]


class Assembler:
    """Holds the videos of one run that are not committed yet.

    Args:
        todos: what is planned.
        identity: stamp of the run.
    """

    def __init__(self, todos: Iterable[Todo], identity: Identity) -> None:
        self._identity = identity
        self._open = {todo.source.video_id: _Open(todo) for todo in todos}
        self._complete: dict[str, _Open] = {}
        self._left_in_part = Counter(video.todo.part for video in self._open.values())
        self._bytes_in_part: Counter[str | None] = Counter()

    def add(self, row: Row) -> bool:
        """Take a row; False when it was not needed (its id is there already, or its video is not planned)."""
        video = self._open.get(row.video_id)
        if video is None or row.item_id in video.items or (row.kind == "video" and video.summary is not None):
            return False
        if row.kind == "video":
            video.summary = row
        else:
            video.items[row.item_id] = row
        video.num_bytes += len(str(row.body))
        if video.is_complete:
            self._complete[row.video_id] = self._open.pop(row.video_id)
            self._left_in_part[video.todo.part] -= 1
            self._bytes_in_part[video.todo.part] += video.num_bytes
        return True

    @property
    def num_bytes(self) -> int:
        """Size of what `take` would give."""
        return sum(size for part, size in self._bytes_in_part.items() if part is None or not self._left_in_part[part])

    def take(self, *, everything: bool = False) -> list[Finished]:
        """Remove and return finished videos.

        Those that replace rows of an existing part are held until all planned videos of that part are finished, so that
        the part is rewritten once; with `everything` they are given at once.
        """
        ready = [v for v in self._complete.values() if everything or self._is_ready(v.todo)]
        for video in ready:
            del self._complete[video.todo.source.video_id]
            self._bytes_in_part[video.todo.part] -= video.num_bytes
        return [self._finish(video) for video in ready]

    def unfinished(self) -> list[Todo]:
        """What is planned and still has rows missing."""
        return [video.todo for video in self._open.values()]

    def done_items(self, video_id: str) -> tuple[list[int], list[str]]:
        """(indices of the clips, ids of the chunks) of an unfinished video that are already here."""
        items = self._open[video_id].items.values()
        clips = sorted(int(row.body["clip_index"]) for row in items if row.kind == "clip")
        return clips, sorted(row.item_id for row in items if row.kind == "speech")

    def give_up(self) -> None:
        """Count what never came as failed, `error_type = lost`, so that every planned id ends in a row."""
        for video_id, video in list(self._open.items()):
            if video.summary is None:
                video.items.clear()  # without the summary nothing tells whether its times lie within the video
            for row in _lost_rows(video):
                self.add(row)
            assert video_id not in self._open, f"{video_id} is still open after its missing rows were made up"

    def save(self) -> bytes | None:
        """The rows held here as Arrow IPC, or None when there is none."""
        rows = [
            {
                "recipe": self._recipe(video.todo),
                "kind": row.kind,
                "video_id": row.video_id,
                "item_id": row.item_id,
                "body": json.dumps(row.body),
            }
            for video in (*self._open.values(), *self._complete.values())
            for row in (*video.items.values(), *([video.summary] if video.summary else []))
        ]
        if not rows:
            return None
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, OPEN_ROWS) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=OPEN_ROWS))
        return bytes(sink.getvalue())

    def load(self, saved: bytes) -> int:
        """Take the rows that an earlier run saved, where input and recipe are still the same. Returns how many."""
        taken = 0
        for values in pa.ipc.open_file(saved).read_all().to_pylist():
            video = self._open.get(values["video_id"])
            if video is not None and values["recipe"] == self._recipe(video.todo):
                row = Row(values["kind"], values["video_id"], values["item_id"], json.loads(values["body"]))
                taken += self.add(row)
        return taken

    def _recipe(self, todo: Todo) -> str:
        """What a saved row depends on besides its id."""
        prints = self._identity.fingerprints
        wants = f"{todo.want_caption}{todo.want_speech}"
        return json.dumps([todo.source.version, wants, prints.decode, prints.caption, prints.speech])

    def _is_ready(self, todo: Todo) -> bool:
        return todo.part is None or self._left_in_part[todo.part] == 0

    def _finish(self, video: _Open) -> Finished:
        return finish(video.todo, *video.listed(), self._identity)


def _lost_rows(video: _Open) -> Iterator[Row]:
    video_id = video.todo.source.video_id
    if video.summary is None:
        error = ("lost", "no row came back for this input in two passes")
        nothing: dict[str, Any] = {"info": None, "clips": [], "chunks": [], "audio_error": None, "damaged": False}
        yield Row("video", video_id, video_id, nothing | {"error": error})
        return
    for kind, item_id, position, start_s, end_s in video.missing():
        body = {
            "clip_index": position,
            "start_s": start_s,
            "end_s": end_s,
            "status": "failed",
            "error_type": "lost",
            "error_message": f"this {kind} was planned and did not come back in two passes",
        }
        yield Row(kind, video_id, item_id, body)
