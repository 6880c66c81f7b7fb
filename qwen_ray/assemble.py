"""Collects the pipeline's rows until a video has all of its own.

Rows may come in any order, twice, or from a run that was killed: the first row of an id counts, a video is finished
when every id that its contents list is there, and what never comes is told by subtraction. Nothing here depends on
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
from qwen_ray.schema import span_id
from qwen_ray.stages.rows import Kind, Row

OPEN_ROWS = pa.schema([(name, pa.string()) for name in ("recipe", "kind", "video_id", "item_id", "body")])


@dataclass(slots=True)
class _Open:
    todo: Todo
    items: dict[str, Row] = field(default_factory=dict)
    contents: Row | None = None
    """What the video consists of: its row of kind `video`."""
    num_bytes: int = 0

    @property
    def has_all_pieces(self) -> bool:
        return self.contents is not None and not self.missing()

    def listed(self) -> tuple[Row, list[Row]]:
        """The contents and the rows they list; a saved row of a cut that this decode does not have is left out."""
        assert self.contents is not None
        ids = [item_id for name in ("clips", "chunks") for item_id, _, _ in self.contents.body[name]]
        summaries = [row for row in self.items.values() if row.kind == "summary"]
        return self.contents, [*(self.items[item_id] for item_id in ids), *summaries]

    def captions(self) -> list[tuple[float, float, str]]:
        """(start, end, caption) of the clips that have one, in order of time."""
        _, rows = self.listed()
        clips = (row.body for row in rows if row.kind == "clip" and row.body.get("caption"))
        return sorted((body["start_s"], body["end_s"], body["caption"]) for body in clips)

    def missing(self) -> list[tuple[Kind, str, int, float, float]]:
        """(kind, id, position, start, end) of what the contents list and has not come."""
        assert self.contents is not None
        spans: dict[Kind, list[tuple[str, float, float]]] = {
            "clip": self.contents.body["clips"],
            "speech": self.contents.body["chunks"],
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
        summaries: whether a video's captions are merged into one before it is finished.
    """

    def __init__(self, todos: Iterable[Todo], identity: Identity, *, summaries: bool = False) -> None:
        self._identity, self.summaries = identity, summaries
        self._open = {todo.source.video_id: _Open(todo) for todo in todos}
        self._complete: dict[str, _Open] = {}
        self._left_in_part = Counter(video.todo.part for video in self._open.values())
        self._bytes_in_part: Counter[str | None] = Counter()

    def add(self, row: Row) -> bool:
        """Take a row; False when it was not needed (its id is there already, or its video is not planned)."""
        video = self._open.get(row.video_id)
        if video is None or row.item_id in video.items or (row.kind == "video" and video.contents is not None):
            return False
        if row.kind == "video":
            video.contents = row
        else:
            video.items[row.item_id] = row
        video.num_bytes += len(str(row.body))
        if video.has_all_pieces and not self._lacks_summary(video):
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

    def unfinished(self, todos: Iterable[Todo]) -> list[Todo]:
        """Those of `todos` that still have rows missing, apart from a summary."""
        videos = (self._open.get(todo.source.video_id) for todo in todos)
        return [video.todo for video in videos if video is not None and not video.has_all_pieces]

    def to_summarise(self) -> list[Row]:
        """One row for each video of which nothing but its summary is missing."""
        return [self._summary_row(video) for video in self._open.values() if video.has_all_pieces]

    def _lacks_summary(self, video: _Open) -> bool:
        wanted = self.summaries and video.todo.want_caption and video.captions()
        return bool(wanted) and not any(row.kind == "summary" for row in video.items.values())

    def _summary_row(self, video: _Open) -> Row:
        source = video.todo.source
        shown = {name: source.metadata.get(name) for name in self._identity.fingerprints.metadata}
        body = {"captions": video.captions(), "metadata": shown}
        return Row("summary", source.video_id, span_id("summary", source.video_id, 0, 0), body)

    def done_items(self, video_id: str) -> tuple[list[int], list[str]]:
        """(indices of the clips, ids of the chunks) of an unfinished video that are already here."""
        items = self._open[video_id].items.values()
        clips = sorted(int(row.body["clip_index"]) for row in items if row.kind == "clip")
        return clips, sorted(row.item_id for row in items if row.kind == "speech")

    def give_up(self) -> None:
        """Count what never came as failed, `error_type = lost`, so that every planned id ends in a row."""
        for video_id, video in list(self._open.items()):
            if video.contents is None:
                video.items.clear()  # without the contents nothing tells whether its times lie within the video
            for row in _lost_rows(video):
                self.add(row)
            if video_id in self._open:
                row = self._summary_row(video)
                self.add(Row(row.kind, video_id, row.item_id, _lost("the summary was asked for")))
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
            for row in (*video.items.values(), *([video.contents] if video.contents else []))
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
        caption = prints.of_caption(todo.source)
        return json.dumps([todo.source.version, wants, prints.decode, caption, prints.speech])

    def _is_ready(self, todo: Todo) -> bool:
        return todo.part is None or self._left_in_part[todo.part] == 0

    def _finish(self, video: _Open) -> Finished:
        return finish(video.todo, *video.listed(), self._identity)


def _lost_rows(video: _Open) -> Iterator[Row]:
    video_id = video.todo.source.video_id
    if video.contents is None:
        error = ("lost", "no row came back for this input in two passes")
        nothing: dict[str, Any] = {"info": None, "clips": [], "chunks": [], "audio_error": None, "damaged": False}
        yield Row("video", video_id, video_id, nothing | {"error": error})
        return
    for kind, item_id, position, start_s, end_s in video.missing():
        body = {
            "clip_index": position,
            "start_s": start_s,
            "end_s": end_s,
            **_lost(f"this {kind} was planned"),
        }
        yield Row(kind, video_id, item_id, body)


def _lost(what: str) -> dict[str, Any]:
    return {"status": "failed", "error_type": "lost", "error_message": f"{what} and did not come back in two passes"}
