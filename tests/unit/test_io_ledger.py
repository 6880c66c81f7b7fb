"""What is to be done, for every reason there is; and that the ledger stays small."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_ray.config import StorageConfig
from qwen_ray.errors import RETRYABLE
from qwen_ray.io.commits import CommitLog, VideoRows
from qwen_ray.io.lease import Lease
from qwen_ray.io.ledger import Fingerprints, Ledger, Mark, Plan, Todo, mark_changes, plan, read_videos
from qwen_ray.io.source import Source
from qwen_ray.io.storage import Storage, open_storage
from qwen_ray.schema import video_id_of

ROOT = "file:///in/"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
BOTH = Fingerprints(decode="d", caption="c", speech="s")
CAPTIONS = Fingerprints(decode="d", caption="c", speech=None)
SPEECH = Fingerprints(decode="", caption=None, speech="s")


def source(name: str, version: str = "v1") -> Source:
    uri = f"{ROOT}{name}"
    return Source(video_id_of(uri), uri, version, 1)


def row(name: str, **values: Any) -> dict[str, Any]:
    """A video that is done, but for what is said."""
    done = {
        "video_id": source(name).video_id, "uri": source(name).uri, "version": "v1", "status": "ok", "attempts": 1,
        "caption_status": "ok", "speech_status": "ok", "decode_fingerprint": "d", "caption_fingerprint": "c",
        "speech_fingerprint": "s", "num_clips": 1, "num_segments": 1,
    }  # fmt: skip
    return done | values


FAILED = {"status": "failed", "caption_status": "failed", "speech_status": "failed"}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"), StorageConfig())


def fill(storage: Storage, *parts: list[dict[str, Any]]) -> Ledger:
    with Lease.acquire(storage, "run", 3600.0) as lease:
        log = CommitLog(storage, lease)
        for rows in parts:
            log.commit_videos(
                VideoRows(video_id=r["video_id"], part=None, clips=[], segments=[], video=r) for r in rows
            )
    return Ledger.load(storage)


def plan_one(storage: Storage, known: dict[str, Any], listed: Source, prints: Fingerprints = BOTH, **more: Any) -> Plan:
    return plan([listed], fill(storage, [known]), prints, max_attempts=3, **more)


def only(found: Plan) -> Todo:
    assert len(found.todo) == 1
    return found.todo[0]


def wants(todo: Todo) -> tuple[str, bool, bool, bool, bool]:
    return todo.reason, todo.want_caption, todo.want_speech, todo.keep_caption, todo.keep_speech


def test_nothing_known(storage: Storage) -> None:
    found = plan([source("b"), source("a")], Ledger.load(storage), BOTH, max_attempts=3, root=ROOT)
    assert [todo.source for todo in found.todo] == [source("b"), source("a")]
    assert [wants(todo) for todo in found.todo] == [("new", True, True, False, False)] * 2
    assert {todo.part for todo in found.todo} == {None}
    assert found.counts == {"new": 2, "vanished": 0, "returned": 0}


@pytest.mark.parametrize(
    ("known", "version", "prints", "expected"),
    [
        ({}, "v2", BOTH, ("changed", True, True, False, False)),
        ({}, "v2", CAPTIONS, ("changed", True, False, False, False)),
        ({"caption_fingerprint": "old"}, "v1", BOTH, ("stale_caption", True, False, False, True)),
        ({"decode_fingerprint": "old"}, "v1", BOTH, ("stale_caption", True, False, False, True)),
        ({"caption_fingerprint": None, "decode_fingerprint": None}, "v1", BOTH,
         ("stale_caption", True, False, False, True)),
        ({"speech_fingerprint": "old"}, "v1", BOTH, ("stale_speech", False, True, True, False)),
        ({"speech_fingerprint": None}, "v1", BOTH, ("stale_speech", False, True, True, False)),
        ({"speech_fingerprint": "x", "decode_fingerprint": "x"}, "v1", BOTH, ("stale_both", True, True, False, False)),
        (FAILED | {"error_type": "storage"}, "v1", BOTH, ("retry", True, True, False, False)),
        ({"status": "partial", "speech_status": "failed", "error_type": "engine_crashed"}, "v1", BOTH,
         ("retry", False, True, True, False)),
        ({"status": "partial", "caption_status": "partial", "error_type": "engine_crashed"}, "v1", BOTH,
         ("retry", True, False, False, True)),
        ({"status": "partial", "error_type": "decode_timeout"}, "v1", BOTH, ("retry", True, True, False, False)),
        (FAILED | {"error_type": "storage"}, "v1", SPEECH,
         ("retry", False, True, True, False)),
        (FAILED | {"error_type": "unreadable", "caption_fingerprint": "old"}, "v1", BOTH,
         ("stale_caption", True, False, False, True)),
    ],
)  # fmt: skip
def test_what_is_to_be_done(
    storage: Storage, known: dict[str, Any], version: str, prints: Fingerprints, expected: tuple[Any, ...]
) -> None:
    todo = only(plan_one(storage, row("a", **known), source("a", version), prints))
    assert wants(todo) == expected
    assert todo.part == "part-00000001-00000001"
    assert todo.attempts == (1 if todo.reason == "retry" else 0)


@pytest.mark.parametrize(
    ("known", "prints", "left"),
    [
        ({}, BOTH, "done"),
        ({"status": "partial", "error_type": "unreadable"}, BOTH, "done"),
        ({"caption_status": "no_video"}, BOTH, "done"),
        ({"speech_fingerprint": "old"}, CAPTIONS, "done"),
        ({"caption_fingerprint": "old", "decode_fingerprint": "old"}, SPEECH, "done"),
        ({"status": "partial", "caption_status": "failed", "error_type": "engine_crashed"},
         SPEECH, "done"),
        (FAILED | {"error_type": "unreadable"}, BOTH, "failed"),
        (FAILED | {"error_type": "storage", "attempts": 3}, BOTH, "failed"),
        (FAILED | {"error_type": None}, BOTH, "failed"),
    ],
)  # fmt: skip
def test_what_is_left_alone(storage: Storage, known: dict[str, Any], prints: Fingerprints, left: str) -> None:
    found = plan_one(storage, row("a", **known), source("a"), prints, root=ROOT)
    assert found.todo == []
    assert found.counts == {left: 1, "vanished": 0, "returned": 0}


@pytest.mark.parametrize("error_type", list(RETRYABLE))
def test_the_code_decides_about_another_try(storage: Storage, error_type: str) -> None:
    known = row("a", **FAILED, error_type=error_type)
    assert bool(plan_one(storage, known, source("a")).todo) == RETRYABLE[error_type]


def test_retry_all(storage: Storage) -> None:
    ledger = fill(storage, [row("a", **FAILED, error_type="unreadable", attempts=9), row("b")])
    found = plan([source("a"), source("b")], ledger, BOTH, max_attempts=3, retry_all=True)
    assert wants(only(found)) == ("retry", True, True, False, False)


def test_a_manifests_missing_file(storage: Storage) -> None:
    """New, it becomes a row that says so; known, its rows are worth more than the news that it is away."""
    ledger = fill(storage, [row("a"), row("b", version="", **FAILED, error_type="not_found", attempts=2)])
    found = plan([source("a", ""), source("b", ""), source("c", "")], ledger, BOTH, max_attempts=3)
    assert [(todo.source.uri[-1], todo.reason, todo.attempts) for todo in found.todo] == [
        ("c", "new", 0),
        ("b", "retry", 2),
    ]
    assert found.counts["missing"] == 1
    assert only(plan([source("b", "v1")], ledger, BOTH, max_attempts=3)).reason == "changed"


def test_vanished_and_returned(storage: Storage) -> None:
    rows = [
        row("a"),
        row("b"),
        row("gone", vanished_at=NOW),
        row("back", vanished_at=NOW),
        row("back2", vanished_at=NOW),
    ]
    outside = row("x") | {"uri": "file:///inside/x", "video_id": "x"}
    hidden = [row("_raw/y"), row("z.txt")]  # once named by a manifest; a listing passes them over
    ledger = fill(storage, [*rows, outside, *hidden])
    part = "part-00000001-00000001"
    listed = [source("a"), source("back"), source("back2", "v2")]
    found = plan(listed, ledger, BOTH, max_attempts=3, root=ROOT)
    assert found.vanished == [Mark(source("b").video_id, part)]
    assert found.returned == [Mark(source("back").video_id, part)]
    assert only(found).reason == "changed"
    assert plan(listed, ledger, BOTH, max_attempts=3).vanished == []
    with Lease.acquire(storage, "marks", 3600.0) as lease:
        CommitLog(storage, lease).commit(list(mark_changes(storage, found, NOW)))
    after = {r["uri"].rpartition("/")[2]: r["vanished_at"] for r in read_videos(storage, part, _ids(ledger))}
    assert after == {"a": None, "b": NOW, "gone": NOW, "back": None, "back2": NOW, "x": None, "y": None, "z.txt": None}
    assert plan(listed, Ledger.load(storage), BOTH, max_attempts=3, root=ROOT).vanished == []


def _ids(ledger: Ledger) -> list[str]:
    ids: list[str] = ledger.rows["video_id"].to_pylist()
    return ids


def test_todo_goes_part_by_part(storage: Storage) -> None:
    ledger = fill(storage, [row("a"), row("b")], [row("c"), row("d")], [row("e")])
    listed = [source(name, "v2") for name in ("d", "a", "new", "e", "c", "b")]
    todo = plan(listed, ledger, BOTH, max_attempts=3).todo
    assert [item.source.uri[-1] for item in todo] == ["w", "a", "b", "d", "c", "e"]
    assert [item.part and item.part[-1] for item in todo] == [None, "1", "1", "2", "2", "3"]


def test_read_videos(storage: Storage) -> None:
    ledger = fill(storage, [row("a"), row("b", transcript="words")])
    found = read_videos(storage, "part-00000001-00000001", [source("b").video_id, "unknown"])
    assert [(r["uri"], r["transcript"]) for r in found] == [(source("b").uri, "words")]
    assert len(ledger) == 2


KNOWN = st.fixed_dictionaries(
    {
        "version": st.sampled_from(["v1", "v2", ""]),
        "status": st.sampled_from(["ok", "partial", "failed"]),
        "caption_status": st.sampled_from(["ok", "partial", "failed", "skipped", "no_video"]),
        "speech_status": st.sampled_from(["ok", "partial", "failed", "skipped", "no_audio"]),
        "error_type": st.sampled_from([None, "storage", "unreadable"]),
        "attempts": st.sampled_from([None, 1, 2, 3]),
        "decode_fingerprint": st.sampled_from([None, "d", "x"]),
        "caption_fingerprint": st.sampled_from([None, "c", "x"]),
        "speech_fingerprint": st.sampled_from([None, "s", "x"]),
    }
)


@given(
    known=st.lists(KNOWN, max_size=6),
    prints=st.sampled_from([BOTH, CAPTIONS, SPEECH]),
    version=st.sampled_from(["v1", ""]),
)  # fmt: skip
def test_a_plan_accounts_for_every_source(known: list[dict[str, Any]], prints: Fingerprints, version: str) -> None:
    from qwen_ray.io import ledger as module
    from qwen_ray.schema import table_of

    rows = [row(f"v{index}", **values) for index, values in enumerate(known)]
    narrow = table_of("videos", rows).select(module._COLUMNS)
    ledger = Ledger(narrow.append_column("part", pa.array(["part-1"] * len(rows), pa.string())))
    sources = [source(f"v{index}", version) for index in range(len(rows) + 1)]
    found = plan(sources, ledger, prints, max_attempts=3)
    assert sum(found.counts.values()) == len(sources)
    assert len(found.todo) == sum(
        n for reason, n in found.counts.items() if reason not in ("done", "failed", "missing")
    )
    for todo in found.todo:
        assert todo.want_caption or todo.want_speech
        assert not (todo.want_caption and (todo.keep_caption or prints.caption is None))
        assert not (todo.want_speech and (todo.keep_speech or prints.speech is None))
        assert (todo.part is None) == (todo.reason == "new")
    # What the plan makes is then done: no run would plan it again for ever.
    made = {todo.source.video_id: todo for todo in found.todo}
    for r in rows:
        if todo := made.get(r["video_id"]):
            r |= {
                "version": todo.source.version,
                "status": "ok",
                "error_type": None,
                "caption_status": "ok",
                "speech_status": "ok",
            }
            r |= (
                {"decode_fingerprint": prints.decode, "caption_fingerprint": prints.caption}
                if todo.want_caption
                else {}
            )
            r |= {"speech_fingerprint": prints.speech} if todo.want_speech else {}
    done = Ledger(
        table_of("videos", rows)
        .select(module._COLUMNS)
        .append_column("part", pa.array(["part-1"] * len(rows), pa.string()))
    )
    assert {todo.reason for todo in plan(sources, done, prints, max_attempts=3).todo} <= {"new"}


def test_the_ledger_is_lean() -> None:
    """2 GiB for 10 million rows is 214 bytes a row, of which URI, version and id take most."""
    from qwen_ray.io import ledger as module
    from qwen_ray.schema import table_of

    class OnePart:
        uri = "memory:"

        def list(self, prefix: str) -> Any:
            return []

    rows = table_of("videos", [row(f"some/folder/of/videos/{i:08d}.mp4") for i in range(20_000)]).select(
        module._COLUMNS
    )
    ledger = Ledger(module._gather([module._narrowed(rows, "part-00000001-00000001")]))
    assert ledger.rows.nbytes / len(ledger) < 214
    assert len(Ledger.load(OnePart())) == 0  # type: ignore[arg-type]


def test_ids_with_the_same_key(storage: Storage) -> None:
    """The first 64 bits of two ids agree: still each is found as itself, and a third is not found."""
    ids = [f"{'0123456789abcdef'}{end:016x}" for end in range(3)]
    ledger = fill(storage, [row(name, video_id=name) for name in [*ids[:2], "no hex", "f" * 32]])
    assert ledger.find([ids[1], ids[0], ids[2], "f" * 32, "no hex", "0" * 32]).to_pylist() == [1, 0, None, 3, 2, None]
    assert ledger.find(["f" * 32, "no hex", "other"]).to_pylist() == [3, 2, None]
    assert ledger.find([]).to_pylist() == []
