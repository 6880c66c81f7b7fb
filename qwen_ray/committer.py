"""Turns finished videos into commits: which rows replace which, and when."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qwen_ray.assemble import Assembler
from qwen_ray.config import CommitConfig
from qwen_ray.io.commits import CommitLog, VideoRows
from qwen_ray.io.ledger import Todo, read_videos
from qwen_ray.io.storage import Storage
from qwen_ray.records import Finished, merge


class Committer:
    """Commits what an assembler has finished, every so often.

    Args:
        log: the commit log of the output.
        storage: the output.
        config: how often.
        on_commit: called with the videos of each commit after they are durable.
    """

    def __init__(
        self, log: CommitLog, storage: Storage, config: CommitConfig, on_commit: Callable[[list[Finished]], None]
    ) -> None:
        self._log, self._storage, self._config, self._on_commit = log, storage, config, on_commit
        self._last_at = time.monotonic()

    def tick(self, assembler: Assembler) -> None:
        """Commit when it is time, or when much is waiting."""
        waited_s = time.monotonic() - self._last_at
        if waited_s >= self._config.every_s or assembler.num_bytes >= self._config.max_bytes:
            self.commit(assembler)

    def commit(self, assembler: Assembler, *, everything: bool = False) -> None:
        """Make finished videos visible, and keep the finished rows of unfinished ones beside the log."""
        finished = assembler.take(everything=everything)
        if finished:
            self._log.commit_videos(outcomes(finished, self._storage))
            self._on_commit(finished)
        self._log.save_open(assembler.save())
        self._last_at = time.monotonic()


def outcomes(finished: Sequence[Finished], storage: Storage) -> list[VideoRows]:
    """What a commit of these videos writes; a component that was not done again keeps its rows and columns."""
    old = _old_rows([one.todo for one in finished if one.todo.keep_caption or one.todo.keep_speech], storage)
    return [_outcome(one, old.get(one.todo.source.video_id)) for one in finished]


def _outcome(one: Finished, old: dict[str, Any] | None) -> VideoRows:
    todo = one.todo
    if old is None:
        return VideoRows(
            video_id=todo.source.video_id, part=todo.part, clips=one.clips, segments=one.segments, video=one.video
        )
    return VideoRows(
        video_id=todo.source.video_id,
        part=todo.part,
        clips=None if todo.keep_caption else one.clips,
        segments=None if todo.keep_speech else one.segments,
        video=merge(old, one.video, keep_caption=todo.keep_caption, keep_speech=todo.keep_speech),
    )


def _old_rows(todos: Iterable[Todo], storage: Storage) -> dict[str, dict[str, Any]]:
    by_part: dict[str, list[str]] = defaultdict(list)
    for todo in todos:
        assert todo.part is not None
        by_part[todo.part].append(todo.source.video_id)
    rows = (row for part, ids in by_part.items() for row in read_videos(storage, part, ids))
    return {row["video_id"]: row for row in rows}
