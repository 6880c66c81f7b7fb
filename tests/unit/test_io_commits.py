"""A crash, a lost answer or a late writer at any point of any run: nothing is lost, doubled or turned back.

The tests play a whole history through the public interface (lease, recover, plan, commit, mark). It is broken off at
every operation there is, and two writers are interleaved in every way that a random schedule finds. After each
single operation a reader looks at all parts.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_ray.config import StorageConfig
from qwen_ray.errors import LeaseLostError, TransientError
from qwen_ray.io import parts
from qwen_ray.io.commits import (
    OPEN,
    CommitLog,
    PartChange,
    VideoRows,
    changes_of,
    decode_record,
    encode_record,
    list_records,
)
from qwen_ray.io.lease import Lease, record_key
from qwen_ray.io.ledger import Fingerprints, Ledger, Todo, mark_changes, plan, read_videos
from qwen_ray.io.local import etag_of
from qwen_ray.io.objects import Conflict, Entry, NotFound, Object, Storage
from qwen_ray.io.parts import decode_part, encode_part, list_parts, read_part
from qwen_ray.io.source import Source
from qwen_ray.io.storage import open_storage
from qwen_ray.io.verify import verify
from qwen_ray.schema import SCHEMA_VERSION, TABLES, table_of, video_id_of

if TYPE_CHECKING:
    from tests.s3 import S3Server

pytest_plugins = ("tests.s3",)

IDS = {"clips": "clip_id", "segments": "segment_id", "videos": "video_id"}
ROOT = "file:///in/"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


# The history


def source(name: str, version: str = "v1") -> Source:
    uri = f"{ROOT}{name}.mp4"
    return Source(video_id_of(uri), uri, version, 1)


PHASES: list[tuple[list[Source], Fingerprints]] = [
    # new videos, in several commits
    ([source(n) for n in "abcde"], Fingerprints(decode="d", caption="c1", speech="s1")),
    # b changed, e vanished, f new
    ([source("a"), source("b", "v2"), *map(source, "cdf")], Fingerprints(decode="d", caption="c1", speech="s1")),
    # e is back; only captions are made again, with another prompt
    ([source("a"), source("b", "v2"), *map(source, "cdef")], Fingerprints(decode="d", caption="c2", speech="s1")),
]


def outcome(todo: Todo, fingerprints: Fingerprints, storage: Storage) -> VideoRows:
    """What a run makes of a video: always the same for the same video, version and recipe."""
    video_id, version = todo.source.video_id, todo.source.version
    clips = [
        {"clip_id": f"{video_id}{i}", "video_id": video_id, "start_s": 0.0, "end_s": 1.0, "status": "ok",
         "caption": f"{version} {fingerprints.caption}"}
        for i in range(3 if version == "v2" else 2)
    ]  # fmt: skip
    segments = [
        {"segment_id": f"{video_id}{version}", "video_id": video_id, "start_s": 0.0, "end_s": 1.0, "status": "ok",
         "text": f"{version} {fingerprints.speech}"}
    ]  # fmt: skip
    video = {
        "video_id": video_id, "uri": todo.source.uri, "version": version, "status": "ok", "caption_status": "ok",
        "speech_status": "ok", "attempts": 1, "duration_s": 1.0, "num_clips": len(clips), "num_segments": 1,
        "decode_fingerprint": fingerprints.decode, "caption_fingerprint": fingerprints.caption,
        "speech_fingerprint": fingerprints.speech,
    }  # fmt: skip
    if todo.keep_speech:
        assert todo.part
        video = read_videos(storage, todo.part, [video_id])[0] | {
            "caption_fingerprint": fingerprints.caption,
            "vanished_at": None,
        }
    return VideoRows(
        video_id=video_id, part=todo.part, clips=clips, segments=None if todo.keep_speech else segments, video=video
    )


def run_once(storage: Storage, phase: int) -> None:
    """One run, as the product does it, with two videos to a commit."""
    sources, fingerprints = PHASES[phase]
    with Lease.acquire(storage, f"run-{phase}", 3600.0) as lease:
        log = CommitLog(storage, lease, num_threads=1)
        log.recover()
        log.load_open()
        planned = plan(sources, Ledger.load(storage), fingerprints, max_attempts=3, root=ROOT)
        log.commit(list(mark_changes(storage, planned, NOW)))
        for start in range(0, len(planned.todo), 2):
            log.commit_videos([outcome(todo, fingerprints, storage) for todo in planned.todo[start : start + 2]])
            log.save_open(b"open %d" % start)
        log.save_open(None)


def run_phase(storage: Storage, phase: int) -> None:
    """Runs until one gets through, as whoever operates it would."""
    for _ in range(20):
        try:
            run_once(storage, phase)
            return
        except (Died, TransientError):
            if isinstance(storage, Faulty):
                storage.dead = False
    raise AssertionError("twenty runs did not suffice")


# Stores that break, and what a reader sees


class Died(BaseException):
    """The process is gone. Not an Exception, and once raised every later operation raises it too."""


class Memory:
    """A store in memory, for histories by the thousand; held to the others by the same tests."""

    uri = "memory:"

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self._objects = dict(objects or {})
        self._mutex = threading.Lock()

    def copy(self) -> Memory:
        return Memory(self._objects)

    def read(self, key: str) -> Object:
        if key not in self._objects:
            raise NotFound(key)
        data = self._objects[key]
        return Object(data, etag_of(data))

    def head(self, key: str) -> str | None:
        return etag_of(self._objects[key]) if key in self._objects else None

    def exists(self, key: str) -> bool:
        return key in self._objects

    def write(self, key: str, data: bytes) -> str:
        self._objects[key] = data
        return etag_of(data)

    def write_new(self, key: str, data: bytes) -> str:
        with self._mutex:
            if key in self._objects:
                raise Conflict(key)
            return self.write(key, data)

    def write_if(self, key: str, data: bytes, etag: str) -> str:
        with self._mutex:
            if self.head(key) != etag:
                raise Conflict(key)
            return self.write(key, data)

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[Entry]:
        for key in sorted(self._objects):
            if key.startswith(prefix):
                yield Entry(key, len(self._objects[key]), etag_of(self._objects[key]), 0.0)

    def age_s(self, key: str) -> float:
        return 0.0

    def sweep(self) -> None:
        return

    def check_writable(self) -> None:
        return


class Reader:
    """Globs all parts, as a user would, and compares what it sees with what it saw before."""

    _parsed: dict[tuple[str, bytes], list[dict[str, Any]]] = {}  # noqa: RUF012  shared: parts repeat by the thousand

    def __init__(self, storage: Storage, every: int = 1) -> None:
        self._storage, self._every = storage, every
        self._seen: dict[str, str] = {}
        self.looks = 0

    def rows(self, table: str) -> list[dict[str, Any]]:
        rows = []
        for entry in self._storage.list(f"{table}/"):
            assert entry.key.startswith(f"{table}/part-")
            assert entry.key.endswith(".parquet")
            data = self._storage.read(entry.key).data
            if (table, data) not in self._parsed:
                self._parsed[table, data] = pq.read_table(pa.BufferReader(data)).to_pylist()
            rows += self._parsed[table, data]
        return rows

    def look(self) -> None:
        self.looks += 1
        if self.looks % self._every:
            return
        state: dict[str, str] = {}
        for table, name in IDS.items():
            rows = self.rows(table)
            ids = [row[name] for row in rows]
            assert len(ids) == len(set(ids)), f"{table} holds an id twice"
            for row in rows:
                key = f"{table} {row['video_id']}"
                word = row.get("caption") or row.get("text") or f"{row.get('version')} {row.get('caption_fingerprint')}"
                state[key] = max(state.get(key, ""), word)
        for key, word in self._seen.items():
            assert key in state, f"{key} was visible and is gone"
            assert state[key] >= word, f"{key} went back from {word} to {state[key]}"
        self._seen = state

    def content(self) -> dict[str, list[dict[str, Any]]]:
        return {table: sorted(self.rows(table), key=lambda row, n=name: row[n]) for table, name in IDS.items()}  # type: ignore[misc]


READS = ("read", "head", "exists", "list", "age_s", "sweep")
WRITES = ("write", "write_new", "write_if", "delete")


class Faulty:
    """A store whose n-th write is the last thing that the process does, is done without an answer, or is not done."""

    def __init__(self, inner: Storage, reader: Reader, faults: dict[int, str]) -> None:
        self._inner, self._reader, self._faults = inner, reader, faults
        self.uri = inner.uri
        self.dead = False
        self.num_writes = 0
        self.after_write: Callable[[], None] = lambda: None

    def age_s(self, key: str) -> float:
        self._inner.age_s(key)
        return 1e9  # whoever held the lease is dead: that is what these tests do to them

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._inner, name)

        def operation(*args: Any) -> Any:
            if self.dead:
                raise Died
            return self._write(act, args) if name in WRITES else act(*args)

        return operation

    def _write(self, act: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        fault = self._faults.get(self.num_writes)
        self.num_writes += 1
        if fault == "refused":
            raise TransientError("storage", "no answer, and not done")
        result = act(*args)
        self._reader.look()
        self.after_write()
        if fault == "died":
            self.dead = True
            raise Died
        if fault == "unanswered":
            raise TransientError("storage", "done, but no answer")
        return result


FAULTS = ("died", "unanswered", "refused")
"""To die before a write is to die after the one before it: the store looks the same."""


def play(inner: Storage, faults: dict[int, str], start: int = 0, every: int = 1) -> tuple[Faulty, Reader]:
    """The history from a phase on; a reader looks after every write, or every some."""
    reader = Reader(inner, every)
    storage = Faulty(inner, reader, faults)
    for phase in range(start, len(PHASES)):
        run_phase(storage, phase)  # type: ignore[arg-type]
    return storage, reader


class History:
    """The undisturbed course of things: the store's state after every write, and at the start of every phase."""

    def __init__(self) -> None:
        inner = Memory()
        reader = Reader(inner)  # type: ignore[arg-type]
        storage = Faulty(inner, reader, {})  # type: ignore[arg-type]
        self.after_write: list[tuple[int, Memory]] = []
        self.starts: list[tuple[int, Memory]] = []
        """Number of writes before the phase, and the state."""
        for phase in range(len(PHASES)):
            self.starts.append((storage.num_writes, inner.copy()))
            storage.after_write = lambda phase=phase: self.after_write.append((phase, inner.copy()))  # type: ignore[misc]
            run_phase(storage, phase)  # type: ignore[arg-type]
        self.content = reader.content()

    def play(self, faults: dict[int, str]) -> tuple[Faulty, Reader, Memory]:
        """The history with faults, picked up at the start of the phase in which the first one falls."""
        phase = max(n for n, (before, _) in enumerate(self.starts) if before <= min(faults, default=0))
        before, state = self.starts[phase]
        inner = state.copy()
        return *play(inner, {at - before: fault for at, fault in faults.items()}, phase), inner  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def history() -> Iterator[History]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_COMPRESSION", "none")  # thousands of tiny parts: half of the time would go there
        patch.setattr(os, "fsync", lambda _: None)  # processes die here, machines do not
        yield History()


def check_end(history: History, storage: Any, reader: Reader) -> None:
    assert reader.content() == history.content
    assert verify(storage) == []
    assert not storage.exists(OPEN)


# Crashes


def test_the_history_is_what_it_says(history: History) -> None:
    videos = {row["uri"].removeprefix(ROOT)[0]: row for row in history.content["videos"]}
    assert sorted(videos) == list("abcdef")
    assert [videos[name]["version"] for name in "abf"] == ["v1", "v2", "v1"]
    assert {row["caption_fingerprint"] for row in videos.values()} == {"c2"}
    assert all(row["vanished_at"] is None for row in videos.values())
    assert {row["caption"] for row in history.content["clips"]} == {"v1 c2", "v2 c2"}
    assert {row["text"] for row in history.content["segments"]} == {"v1 s1", "v2 s1"}
    assert len(history.after_write) > 60


def test_death_after_every_write(history: History) -> None:
    for phase, state in history.after_write:
        inner = state.copy()
        _, reader = play(inner, {}, phase)  # type: ignore[arg-type]
        check_end(history, inner, reader)


@pytest.mark.parametrize(("fault", "step"), [("unanswered", 1), ("refused", 4)])
def test_no_answer_to_any_write(history: History, fault: str, step: int) -> None:
    for at in range(0, len(history.after_write), step):
        storage, reader, inner = history.play({at: fault})
        assert storage.num_writes > 0
        check_end(history, inner, reader)


def test_death_on_a_real_file_system(history: History, tmp_path: Path) -> None:
    for at in range(1, len(history.after_write), 6):
        inner = open_storage(str(tmp_path / str(at)), StorageConfig())
        storage, reader = play(inner, {at: "died"})
        assert storage.num_writes > at
        check_end(history, inner, reader)


def test_death_on_s3(history: History, s3_server: S3Server) -> None:
    inner = open_storage(f"s3://{s3_server.new_bucket()}/out", s3_server.config)
    for key, data in history.starts[1][1].copy()._objects.items():
        inner.write(key, data)
    storage, reader = play(inner, {9: "died", 26: "unanswered"}, 1, every=8)
    assert storage.num_writes > 26
    check_end(history, inner, reader)


def test_death_in_the_recovery_from_death(history: History) -> None:
    """A second death soon after the first: in the takeover, in the recovery, or in the work after it."""
    for phase, state in history.after_write[::6]:
        for again in (0, 2, 5):
            inner = state.copy()
            _, reader = play(inner, {again: "died"}, phase)  # type: ignore[arg-type]
            check_end(history, inner, reader)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.dictionaries(st.integers(0, 120), st.sampled_from(FAULTS), min_size=2, max_size=12))
def test_any_faults(history: History, faults: dict[int, str]) -> None:
    _, reader, inner = history.play(faults)
    check_end(history, inner, reader)


# Late writers


class Paused:
    """A store that stops its writer before the n-th operation, of any kind, and lets others work meanwhile."""

    def __init__(self, inner: Memory, reader: Reader, at: int, meanwhile: Callable[[], None]) -> None:
        self._inner, self._reader, self._at, self._meanwhile = inner, reader, at, meanwhile
        self.uri = inner.uri
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._inner, name)

        def operation(*args: Any) -> Any:
            if len(self.done) == self._at:
                self._meanwhile()
            self.done.append(name)
            result = act(*args)
            if name in WRITES:
                self._reader.look()
            return result

        return operation


def late_writer(history: History, phase: int, at: int) -> tuple[list[str], str]:
    """The run of `phase` is paused before its `at`-th operation; it, by another, and all later ones pass meanwhile."""
    inner = history.starts[phase][1].copy()
    reader = Reader(inner)  # type: ignore[arg-type]
    others = Faulty(inner, reader, {})  # type: ignore[arg-type]

    def meanwhile() -> None:
        for later in range(phase, len(PHASES)):
            run_phase(others, later)  # type: ignore[arg-type]
        assert reader.content() == history.content

    late = Paused(inner, reader, at, meanwhile)
    try:
        run_once(late, phase)  # type: ignore[arg-type]
        end = "finished"
    except LeaseLostError:
        end = "lost"
    if len(late.done) > at:
        assert reader.content() == history.content
        assert [problem.message for problem in verify(inner) if OPEN not in problem.message] == []  # type: ignore[arg-type]
        run_phase(others, len(PHASES) - 1)  # type: ignore[arg-type]
        check_end(history, inner, reader)
    return late.done, end


@pytest.mark.parametrize("phase", range(len(PHASES)))
def test_a_writer_paused_anywhere_does_no_harm(history: History, phase: int) -> None:
    """Before each of its writes, when what it knows is oldest; and before some of its reads."""
    operations, end = late_writer(history, phase, 10**9)
    assert end == "finished"
    taken = next(at for at, name in enumerate(operations) if name in WRITES) + 1  # before, it is merely the next run
    points = [at for at in range(taken, len(operations)) if operations[at] in WRITES or at % 8 == 0]
    ends = [late_writer(history, phase, at)[1] for at in points]
    # At first there is nothing left to do. At last, what was lost is only given back, and open rows only deleted.
    assert set(ends[1:-2]) == {"lost"}
    assert ends[-2:] == ["finished"] * 2


class Turns:
    """Lets two writers take turns, one operation at a time, in a given order."""

    def __init__(self, order: list[int]) -> None:
        self._order, self._at = order, 0
        self._alive = {0, 1}
        self._condition = threading.Condition()

    def _current(self) -> int:
        wanted = self._order[self._at % len(self._order)] if self._order else 0
        return wanted if wanted in self._alive else next(iter(self._alive), wanted)

    def wait(self, me: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._current() == me, timeout=20)
            self._at += 1
            self._condition.notify_all()

    def leave(self, me: int) -> None:
        with self._condition:
            self._alive.discard(me)
            self._condition.notify_all()


class InTurn:
    def __init__(self, inner: Storage, reader: Reader, turns: Turns, me: int) -> None:
        self._inner, self._reader, self._turns, self._me = inner, reader, turns, me
        self.uri = inner.uri

    def age_s(self, key: str) -> float:
        return 1e9

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._inner, name)

        def operation(*args: Any) -> Any:
            self._turns.wait(self._me)
            result = list(act(*args)) if name == "list" else act(*args)
            if name in WRITES:
                self._reader.look()
            return iter(result) if name == "list" else result

        return operation


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=st.integers(0, 2), order=st.lists(st.integers(0, 1), min_size=20, max_size=300))
def test_two_writers_in_any_order(history: History, first: int, order: list[int]) -> None:
    """Both believe that the other is dead. Whatever their operations' order, the tables stay right."""
    inner = history.starts[first][1].copy()
    reader = Reader(inner)  # type: ignore[arg-type]
    others = Faulty(inner, reader, {})  # type: ignore[arg-type]
    turns = Turns(order)
    failures: list[BaseException] = []

    def work(me: int) -> None:
        try:
            run_once(InTurn(inner, reader, turns, me), first)  # type: ignore[arg-type]
        except LeaseLostError:
            pass
        except BaseException as error:  # noqa: BLE001  shown by the test's own thread
            failures.append(error)
        finally:
            turns.leave(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for phase in range(first, len(PHASES)):
        run_phase(others, phase)  # type: ignore[arg-type]
    check_end(history, inner, reader)


def test_a_record_that_slips_past_the_fence_makes_no_duplicate() -> None:
    """Should a store lose a fence, the videos that were done again elsewhere win."""
    inner = Memory()
    reader = Reader(inner)  # type: ignore[arg-type]
    others = Faulty(inner, reader, {})  # type: ignore[arg-type]
    run_phase(others, 0)  # type: ignore[arg-type]
    run_phase(others, 1)  # type: ignore[arg-type]
    before = reader.content()
    todos = plan(PHASES[0][0][:2], Ledger.load(Memory()), PHASES[0][1], max_attempts=3).todo  # type: ignore[arg-type]
    late = changes_of([outcome(todo, PHASES[0][1], inner) for todo in todos], "part-00000001-00000009")  # type: ignore[arg-type]
    inner.write(record_key(1, 9), encode_record(late))
    run_phase(others, 1)  # type: ignore[arg-type]
    assert reader.content() == before
    assert verify(inner) == []  # type: ignore[arg-type]


# The log by itself


@pytest.fixture
def disk(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"), StorageConfig())


@pytest.fixture
def log(disk: Storage) -> Iterator[CommitLog]:
    with Lease.acquire(disk, "run", 3600.0) as lease:
        yield CommitLog(disk, lease)


def _new(name: str, num_clips: int = 1) -> VideoRows:
    clips = [{"clip_id": f"{name}{i}", "video_id": name} for i in range(num_clips)]
    return VideoRows(
        video_id=name, part=None, clips=clips, segments=[], video={"video_id": name, "num_clips": num_clips}
    )


def test_every_part_is_in_all_tables(disk: Storage, log: CommitLog) -> None:
    log.commit_videos([_new("a", num_clips=0)])
    assert [list_parts(disk, table) for table in TABLES] == [["part-00000001-00000001"]] * 3
    assert read_part(disk, "segments", "part-00000001-00000001").schema == TABLES["segments"]


def test_untouched_tables_are_not_written(disk: Storage, log: CommitLog) -> None:
    log.commit_videos([_new("a"), _new("b")])
    part = list_parts(disk, "videos")[0]
    before = {table: disk.head(f"{table}/{part}.parquet") for table in TABLES}
    log.commit_videos([VideoRows(video_id="a", part=part, clips=[], segments=None, video=None)])
    after = {table: disk.head(f"{table}/{part}.parquet") for table in TABLES}
    assert after["clips"] != before["clips"]
    assert (after["videos"], after["segments"]) == (before["videos"], before["segments"])
    assert read_part(disk, "clips", part)["video_id"].to_pylist() == ["b"]


def test_many_parts_in_one_commit(disk: Storage, log: CommitLog) -> None:
    for index in range(6):
        log.commit_videos([_new(f"v{index}")])
    parts = list_parts(disk, "videos")
    log.commit_videos([VideoRows(**(_fields(_new(f"v{i}", 2)) | {"part": parts[i]})) for i in range(6)])
    assert [len(read_part(disk, "clips", part)) for part in parts] == [2] * 6
    assert list_records(disk) == []


def _fields(video: VideoRows) -> dict[str, Any]:
    return {name: getattr(video, name) for name in ("video_id", "part", "clips", "segments", "video")}


def test_an_empty_commit_writes_nothing(disk: Storage, log: CommitLog) -> None:
    log.commit([])
    assert list(disk.list("clips/")) == []


def test_a_replay_changes_nothing(tmp_path: Path, disk: Storage, log: CommitLog) -> None:
    """Not even when a change names only new rows, and none that they replace."""
    changes = [
        PartChange("part-x", table, [], table_of(table, [{name: "1", "video_id": "v"}])) for table, name in IDS.items()
    ]
    log.commit(changes)
    parts_on_disk = sorted((tmp_path / "out").glob("*/part-x.parquet"))
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in parts_on_disk]
    disk.write(record_key(1, 9), encode_record(changes))
    assert log.recover() == 1
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in parts_on_disk] == before
    assert len(before) == 3
    assert [row["video_id"] for row in Reader(disk).rows("clips")] == ["v"]


def test_records_round_trip() -> None:
    changes = [
        PartChange("part-1", "clips", ["a"], table_of("clips", [{"clip_id": "x", "video_id": "a", "flags": ["f"]}])),
        PartChange("part-1", "videos", [], TABLES["videos"].empty_table()),
    ]
    assert decode_record(encode_record(changes)) == changes


def test_parts_are_compressed_and_carry_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_COMPRESSION", "zstd")
    data = encode_part(table_of("clips", [{"clip_id": str(i), "caption": "x" * 50} for i in range(40_000)]))
    file = pq.ParquetFile(pa.BufferReader(data))
    assert file.metadata.metadata[b"qwen_ray.schema_version"].decode() == SCHEMA_VERSION
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.metadata.num_row_groups == 3


def test_a_part_of_an_older_version_reads_with_nulls() -> None:
    rows = table_of("clips", [{"clip_id": "x"}]).drop_columns(["caption", "flags"])
    read = decode_part(encode_part(rows), "clips")
    assert read.schema == TABLES["clips"]
    assert read.to_pylist()[0] == table_of("clips", [{"clip_id": "x"}]).to_pylist()[0]


def test_pandas_and_duckdb_read_the_tables_by_glob(tmp_path: Path, disk: Storage, log: CommitLog) -> None:
    """Blocks of which one has all captions null, and one no rows at all, read as one table."""
    log.commit_videos([_new("a", 2)])
    log.commit_videos([_new("b", 0)])
    clip = {"clip_id": "c0", "video_id": "c", "caption": "words", "flags": ["padded"], "frame_times_s": [0.0, 0.5]}
    log.commit_videos([VideoRows(video_id="c", part=None, clips=[clip], segments=[], video={"video_id": "c"})])
    glob = str(tmp_path / "out" / "clips" / "part-*.parquet")
    assert duckdb.sql(f"select count(*), count(caption), any_value(flags) from '{glob}'").fetchall() == [
        (3, 1, ["padded"])
    ]
    frame = pd.read_parquet(tmp_path / "out" / "clips")
    assert sorted(frame.clip_id) == ["a0", "a1", "c0"]
    assert len(pd.concat(map(pd.read_parquet, sorted((tmp_path / "out" / "videos").glob("part-*.parquet"))))) == 3


def test_open_rows_are_kept_replaced_and_removed(disk: Storage) -> None:
    with Lease.acquire(disk, "first", 3600.0) as lease:
        log = CommitLog(disk, lease)
        assert log.load_open() is None
        log.save_open(b"one")
        log.save_open(b"two")
    with Lease.acquire(disk, "second", 3600.0) as lease:
        log = CommitLog(disk, lease)
        assert log.load_open() == b"two"
        log.save_open(b"three")
        log.save_open(None)
        log.save_open(None)
        assert log.load_open() is None


def test_a_late_writer_does_not_touch_open_rows(disk: Storage) -> None:
    first = Lease.acquire(disk, "first", 3600.0)
    log = CommitLog(disk, first)
    log.save_open(b"old")
    first.stop_heartbeat()
    reader = Reader(disk)
    with Lease.acquire(Faulty(disk, reader, {}), "second", 3600.0) as second:  # type: ignore[arg-type]
        later = CommitLog(disk, second)
        later.load_open()
        later.save_open(b"new")
        for late in (b"late", None):
            with pytest.raises(LeaseLostError):
                log.save_open(late)
        assert disk.read(OPEN).data == b"new"


def test_after_a_failed_commit_the_log_refuses_more(disk: Storage) -> None:
    storage = Faulty(disk, Reader(disk), {4: "unanswered"})
    lease = Lease.acquire(storage, "run", 3600.0)  # type: ignore[arg-type]
    log = CommitLog(storage, lease)  # type: ignore[arg-type]
    with pytest.raises(TransientError, match="no answer"):
        log.commit_videos([_new("a")])
    with pytest.raises(TransientError, match="halfway"):
        log.commit_videos([_new("b")])
    lease.release()
    with Lease.acquire(disk, "next", 3600.0) as following:
        assert CommitLog(disk, following).recover() == 1
    assert [row["video_id"] for row in Reader(disk).rows("videos")] == ["a"]
