"""The commit log: finished rows become visible all at once, whatever dies when.

A commit is one object under `_commits/` that holds the new rows of all three tables and says which parts they go to.
Once it is there the rows are safe; writing them into the parts (projecting) can be done again, by anyone, with the same
result. The alternative, a table format with its own snapshots, would put a catalogue between users and plain Parquet.

Late writers. After reading a part and before replacing it, the writer looks whether its record is still there; a holder
that took over has replayed and removed it. Replacing is conditional on the bytes that were read. Hence a late writer
either repeats what its record says while that record is current, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from qwen_ray.errors import ConfigError, LeaseLostError, TransientError
from qwen_ray.io.lease import Lease, record_key
from qwen_ray.io.objects import Conflict, NotFound, Storage
from qwen_ray.io.parts import conform, decode_part, encode_part, in_parallel, list_parts, part_key, read_part
from qwen_ray.schema import TABLES, table_of

COMMITS = "_commits/"
OPEN = "_commits/open.arrow"
_TRIES = 8
_RECORD = pa.schema(
    [("part", pa.string()), ("table", pa.string()), ("replaces", pa.list_(pa.string())), ("rows", pa.large_binary())]
)


@dataclass(frozen=True, slots=True)
class PartChange:
    """What a commit does to one part of one table: remove the rows of some videos, then append others."""

    part: str
    table: str
    replaces: Sequence[str]
    """Ids of videos whose rows go; those that occur in `rows` go anyway."""
    rows: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRows:
    """The outcome of one video: rows per table, or None for a table whose rows of this video stay as they are."""

    video_id: str
    part: str | None
    """The part that holds this video; None for one that is new."""
    clips: list[dict[str, Any]] | None
    segments: list[dict[str, Any]] | None
    video: dict[str, Any] | None


class _RecordGone(Exception):  # noqa: N818
    """Somebody else has projected and removed the record."""


class CommitLog:
    """Writes commits under a lease. Recover first; one thread commits."""

    def __init__(self, storage: Storage, lease: Lease, num_threads: int = 16) -> None:
        self._storage, self._lease, self._num_threads = storage, lease, num_threads
        self._seq = 1
        self._open_etag: str | None = None
        self._broken = False

    @property
    def new_part(self) -> str:
        """Name of the part for new videos of the next commit."""
        return f"part-{self._lease.epoch:08d}-{self._seq:08d}"

    def commit(self, changes: Sequence[PartChange]) -> None:
        """Make changes durable, then visible. When this returns both has happened; with no changes it does nothing.

        After a TransientError it is unknown whether the changes will be: the next `recover`, of any run, settles it.
        Until then this log refuses further commits.

        Raises:
            LeaseLostError: another run has taken over; these changes are not, and will not be, committed by this one.
            TransientError: the store failed.
        """
        if self._broken:
            raise TransientError(
                "storage", "an earlier commit of this run failed halfway; start the run again to recover"
            )
        if not changes:
            return
        self._broken = True
        key = record_key(self._lease.epoch, self._seq)
        complete = _in_all_tables(changes)
        self._lease.advance(self._seq)
        self._write_record(key, encode_record(complete))
        self._lease.settle()
        try:
            self._project_all(key, complete)
        except _RecordGone:
            self._lease.lost.set()
            raise LeaseLostError(
                f"{self._storage.uri}: another run has taken over and finished this run's commit"
            ) from None
        self._storage.delete(key)
        self._seq += 1
        self._broken = False

    def commit_videos(self, videos: Iterable[VideoRows]) -> None:
        """Commit outcomes: new videos into the next new part, others where they are. Raises as `commit` does."""
        self.commit(changes_of(videos, self.new_part))

    def recover(self) -> int:
        """Finish what earlier holders have committed but not projected; returns how many commits that were.

        Raises:
            LeaseLostError: another run has taken over.
            TransientError: the store failed.
        """
        self._storage.sweep()
        keys = list_records(self._storage)
        for key in keys:
            self._replay(key)
        return len(keys)

    def load_open(self) -> bytes | None:
        """What the last holder saved of videos that it had not finished; None if there is nothing."""
        try:
            found = self._storage.read(OPEN)
        except NotFound:
            self._open_etag = None
            return None
        self._open_etag = found.etag
        return found.data

    def save_open(self, rows: bytes | None) -> None:
        """Save, instead of what was saved before, finished rows of unfinished videos; None saves nothing.

        Unlike commits these rows are not fenced. A writer that was paused within this very call may leave old rows, or
        delete newer ones, which costs work and no more: rows of another version or recipe must not be taken up anyway.

        Raises:
            LeaseLostError: another run has taken over, and its rows are not touched.
            TransientError: the store failed.
        """
        if rows is None:
            self._delete_open()
            return
        try:
            self._open_etag = self._write_open(rows)
        except Conflict:  # another holder's, or an own write whose answer was lost
            self._lease.renew()
            self._open_etag = self._storage.head(OPEN)
            try:
                self._open_etag = self._write_open(rows)
            except Conflict as conflict:
                raise TransientError("storage", f"{self._storage.uri}/{OPEN} keeps changing") from conflict

    def _write_open(self, rows: bytes) -> str:
        if self._open_etag is None:
            self._lease.renew()  # creating succeeds whenever nothing is there: it does not show a takeover by itself
            return self._storage.write_new(OPEN, rows)
        return self._storage.write_if(OPEN, rows, self._open_etag)

    def _delete_open(self) -> None:
        if self._open_etag is None and not self._storage.exists(OPEN):
            return
        self._lease.renew()
        self._storage.delete(OPEN)
        self._open_etag = None

    def _write_record(self, key: str, data: bytes) -> None:
        try:
            self._storage.write_new(key, data)
        except Conflict:
            self._lease.lost.set()
            raise LeaseLostError(f"{self._storage.uri}: another run has taken over and fenced this one off") from None

    def _replay(self, key: str) -> None:
        try:
            changes = decode_record(self._storage.read(key).data)
            self._project_all(key, _without_strays(self._storage, changes))
        except (NotFound, _RecordGone):
            self._lease.renew()  # still ours: then its own writer lived, has finished it, and stops at its next commit
            return
        self._storage.delete(key)

    def _project_all(self, key: str, changes: Sequence[PartChange]) -> None:
        """Table after table, `videos` last; the parts of one table side by side."""
        for table in TABLES:
            in_parallel(
                lambda change: self._project(key, change), [c for c in changes if c.table == table], self._num_threads
            )

    def _project(self, key: str, change: PartChange) -> None:
        target = part_key(change.table, change.part)
        if not change.replaces and not len(change.rows) and self._storage.exists(target):
            return
        for _ in range(_TRIES):
            old, etag = self._read(target)
            new = _changed(old, change)
            if new == old:
                return
            if not self._storage.exists(key):
                raise _RecordGone
            try:
                if etag is None:
                    self._storage.write_new(target, new)
                else:
                    self._storage.write_if(target, new, etag)
                return
            except Conflict:
                self._lease.renew()  # an own write whose answer was lost, or a late writer that is still at it
        raise TransientError("storage", f"{self._storage.uri}/{target} keeps changing")

    def _read(self, key: str) -> tuple[bytes | None, str | None]:
        try:
            found = self._storage.read(key)
        except NotFound:
            return None, None
        return found.data, found.etag


def list_records(storage: Storage) -> list[str]:
    """Keys of the commits that wait to be projected, oldest first. Fences are empty, and no commits."""
    return [entry.key for entry in storage.list(COMMITS) if entry.size_bytes and entry.key != OPEN]


def changes_of(videos: Iterable[VideoRows], new_part: str) -> list[PartChange]:
    """Outcomes of videos, gathered into one change per part and table."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    replaces: dict[tuple[str, str], list[str]] = {}
    for video in videos:
        for table, new in _rows_of(video).items():
            where = (video.part or new_part, table)
            rows.setdefault(where, []).extend(new)
            replaces.setdefault(where, []).append(video.video_id)
    return [PartChange(part, table, replaces[part, table], table_of(table, new)) for (part, table), new in rows.items()]


def encode_record(changes: Sequence[PartChange]) -> bytes:
    """A commit as one Arrow file."""
    columns = {
        "part": [change.part for change in changes],
        "table": [change.table for change in changes],
        "replaces": [list(change.replaces) for change in changes],
        "rows": [_to_ipc(change.rows) for change in changes],
    }
    return _to_ipc(pa.table(columns, schema=_RECORD))


def decode_record(data: bytes) -> list[PartChange]:
    """The inverse of `encode_record`. Raises ConfigError if this is no commit."""
    try:
        rows = pa.ipc.open_file(pa.BufferReader(data)).read_all().to_pylist()
        return [
            PartChange(
                row["part"], row["table"], row["replaces"], pa.ipc.open_file(pa.BufferReader(row["rows"])).read_all()
            )
            for row in rows
        ]
    except (pa.ArrowException, KeyError) as error:
        raise ConfigError(f"a commit record is not readable: {error}") from error


def _to_ipc(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _rows_of(video: VideoRows) -> dict[str, list[dict[str, Any]]]:
    given = {"clips": video.clips, "segments": video.segments, "videos": None if video.video is None else [video.video]}
    return {table: rows for table, rows in given.items() if rows is not None}


def _in_all_tables(changes: Sequence[PartChange]) -> list[PartChange]:
    """Changes, and empty ones that bring a part into the tables for which the commit has nothing."""
    known = {(change.part, change.table) for change in changes}
    if len(known) != len(changes):
        raise AssertionError("a commit has two changes for one part of one table")
    parts = dict.fromkeys(change.part for change in changes)
    missing = [(part, table) for part in parts for table in TABLES if (part, table) not in known]
    return [*changes, *(PartChange(part, table, [], TABLES[table].empty_table()) for part, table in missing)]


def _changed(old: bytes | None, change: PartChange) -> bytes:
    """The part's new bytes; those of before if nothing changes."""
    new = conform(change.rows, change.table)
    if old is not None:
        kept = _without(decode_part(old, change.table), {*change.replaces, *new["video_id"].to_pylist()})
        new = pa.concat_tables([kept, new])
    return encode_part(new.combine_chunks())


def _without(rows: pa.Table, video_ids: Iterable[str]) -> pa.Table:
    import pyarrow.compute as pc

    gone = pa.array(sorted(video_ids), pa.string())
    return rows.filter(pc.invert(pc.is_in(rows["video_id"], value_set=gone)))


def _without_strays(storage: Storage, changes: list[PartChange]) -> list[PartChange]:
    """Leave out videos that another part holds by now.

    Fences keep a late writer's record from arriving after a takeover; should one arrive all the same (a store that
    loses a fence), whoever came after it has done those videos again, elsewhere, and theirs is the newer word.
    """
    wanted: dict[str, set[str]] = {}
    for change in changes:
        wanted.setdefault(change.part, set()).update(change.rows["video_id"].to_pylist())
    strays = _held_elsewhere(storage, wanted)
    return [replace(c, rows=_without(c.rows, strays[c.part])) if strays[c.part] else c for c in changes]


def _held_elsewhere(storage: Storage, wanted: dict[str, set[str]]) -> dict[str, set[str]]:
    """Of the videos wanted in each part, those that stand in another part."""
    every = set().union(*wanted.values())
    found: dict[str, set[str]] = {part: set() for part in wanted}

    def look(part: str) -> tuple[str, set[str]]:
        return part, every.intersection(read_part(storage, "videos", part, ["video_id"])["video_id"].to_pylist())

    for part, held in in_parallel(look, list_parts(storage, "videos"), 16):
        for target in wanted.keys() - {part}:
            found[target] |= held & wanted[target]
    return found
