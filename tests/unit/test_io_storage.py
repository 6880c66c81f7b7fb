"""Both backends keep the same promises; conditional writes have one winner; inputs are fetched as they were listed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_ray.config import StorageConfig
from qwen_ray.errors import ConfigError, TransientError
from qwen_ray.io import local, s3
from qwen_ray.io.storage import (
    Conflict,
    Denied,
    NotFound,
    Storage,
    canonical_uri,
    fetch,
    locate,
    open_storage,
    resolve,
    stat,
)

if TYPE_CHECKING:
    from tests.s3 import S3Server

pytest_plugins = ("tests.s3",)

NAMES = ["plain.mp4", "with space.mp4", "a#b?c%20d.mp4", "видео/日本語 é.mp4", "100%.mp4", "[x]*.mp4"]


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "out"), StorageConfig())
    server: S3Server = request.getfixturevalue("s3_server")
    return open_storage(f"s3://{server.new_bucket()}/some/out", server.config)


def test_write_then_read(storage: Storage) -> None:
    etag = storage.write("a/b", b"one")
    assert storage.read("a/b").data == b"one"
    assert storage.read("a/b").etag == storage.head("a/b") == etag
    assert storage.write("a/b", b"two") != etag
    assert storage.read("a/b").data == b"two"


def test_absent(storage: Storage) -> None:
    with pytest.raises(NotFound):
        storage.read("no")
    with pytest.raises(NotFound):
        storage.age_s("no")
    assert storage.head("no") is None
    assert not storage.exists("no")
    storage.delete("no")
    assert list(storage.list("")) == []


def test_write_new_refuses_what_exists(storage: Storage) -> None:
    storage.write_new("k", b"one")
    for second in (b"two", b"one"):
        with pytest.raises(Conflict):
            storage.write_new("k", second)
    assert storage.read("k").data == b"one"
    storage.delete("k")
    storage.write_new("k", b"three")


def test_write_if_refuses_what_changed(storage: Storage) -> None:
    first = storage.write("k", b"one")
    second = storage.write_if("k", b"two", first)
    with pytest.raises(Conflict):
        storage.write_if("k", b"three", first)
    assert storage.read("k").data == b"two"
    storage.delete("k")
    with pytest.raises(Conflict):
        storage.write_if("k", b"four", second)
    assert not storage.exists("k")


def test_list_is_by_prefix_and_sorted(storage: Storage) -> None:
    for key in ("b/2", "b/10", "ba/1", "a", "b/c/d"):
        storage.write(key, key.encode())
    assert [entry.key for entry in storage.list("b/")] == ["b/10", "b/2", "b/c/d"]
    assert [entry.key for entry in storage.list("b/1")] == ["b/10"]
    assert [entry.key for entry in storage.list("b")] == ["b/10", "b/2", "b/c/d", "ba/1"]
    assert [entry.size_bytes for entry in storage.list("ba/")] == [4]


def test_version_of_a_listing_changes_with_the_object(storage: Storage) -> None:
    storage.write("k", b"one")
    before = next(storage.list("k"))
    assert next(storage.list("k")) == before
    storage.write("k", b"longer")
    assert next(storage.list("k")).version != before.version


def test_age_is_by_the_stores_clock(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("k", b"")
    assert 0 <= storage.age_s("k") < 5
    if isinstance(storage, local.LocalStorage):
        os.utime(storage.root / "k", (time.time() - 100, time.time() - 100))
        assert 99 < storage.age_s("k") < 110


@pytest.mark.parametrize("name", NAMES)
def test_names_round_trip(storage: Storage, name: str) -> None:
    storage.write(name, b"x")
    assert [entry.key for entry in storage.list("")] == [name]
    assert storage.read(name).data == b"x"


def test_check_writable_leaves_nothing(storage: Storage) -> None:
    storage.check_writable()
    assert list(storage.list("")) == []
    assert list(storage.list("_tmp/probe")) == []


class Careless:
    """A store that takes every write, as some S3 look-alikes do."""

    def __init__(self, inner: Storage) -> None:
        self.uri, self.delete, self.write_new = inner.uri, inner.delete, inner.write
        self.write_if: Callable[[str, bytes, str], str] = lambda key, data, etag: inner.write(key, data)


def test_a_store_without_conditions_is_refused(storage: Storage) -> None:
    from qwen_ray.io.objects import check_conditional

    with pytest.raises(ConfigError, match="ignores conditional writes"):
        check_conditional(Careless(storage))  # type: ignore[arg-type]


def _race(storage: Storage, act: Callable[[int], str], num: int) -> list[int]:
    """Who of `num` threads that start together is not refused."""
    barrier = threading.Barrier(num)

    def attempt(index: int) -> bool:
        barrier.wait()
        try:
            act(index)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(num) as pool:
        won = list(pool.map(attempt, range(num)))
    return [index for index in range(num) if won[index]]


def test_threads_one_creates(storage: Storage) -> None:
    for round_ in range(5):
        winners = _race(storage, lambda index, key=f"k{round_}": storage.write_new(key, b"%d" % index), 6)  # type: ignore[misc]
        assert len(winners) == 1
        assert storage.read(f"k{round_}").data == b"%d" % winners[0]


def test_threads_one_replaces(storage: Storage) -> None:
    etag = storage.write("k", b"start")
    for _ in range(5):
        winners = _race(storage, lambda index, tag=etag: storage.write_if("k", os.urandom(8) + b"%d" % index, tag), 6)  # type: ignore[misc]
        assert len(winners) == 1
        assert storage.read("k").data[8:] == b"%d" % winners[0]
        etag = str(storage.head("k"))


def _count_up(uri: str, config: StorageConfig, times: int) -> None:
    storage = open_storage(uri, config)
    done = 0
    while done < times:
        found = storage.read("counter")
        try:
            storage.write_if("counter", b"%d" % (int(found.data) + 1), found.etag)
            done += 1
        except Conflict:
            continue


def test_processes_lose_no_update(storage: Storage, request: pytest.FixtureRequest) -> None:
    config = StorageConfig() if storage.uri.startswith("file:") else request.getfixturevalue("s3_server").config
    storage.write("counter", b"0")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_count_up, args=(storage.uri, config, 12)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert storage.read("counter").data == b"36"


# On disk


@pytest.fixture
def disk(tmp_path: Path) -> local.LocalStorage:
    return local.LocalStorage(tmp_path / "out", (tmp_path / "out").as_uri())


def test_readers_never_see_a_part_of_a_write(disk: local.LocalStorage) -> None:
    versions = [bytes([letter]) * 2_000_000 for letter in b"ab"]
    disk.write("clips/part-1.parquet", versions[0])
    stop = threading.Event()

    def rewrite() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            disk.write("clips/part-1.parquet", versions[turn % 2])

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(100):
            seen = list(disk.root.glob("clips/*"))
            assert [path.name for path in seen] == ["part-1.parquet"]
            assert seen[0].read_bytes() in versions
    finally:
        stop.set()
        writer.join()


def test_a_failed_write_leaves_old_content_and_no_temp(
    disk: local.LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write("k", b"old")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TransientError, match="No space left"):
        disk.write("k", b"new")
    monkeypatch.undo()
    assert disk.read("k").data == b"old"
    assert [path.name for path in (disk.root / "_tmp").iterdir()] == ["_lock"]


def test_sweep_takes_leftovers_of_the_dead_only(disk: local.LocalStorage) -> None:
    disk.write("k", b"")
    leftover = disk.root / "_tmp" / "leftover"
    leftover.write_bytes(b"half")
    temp, handle = disk._new_temp()
    disk.sweep()
    assert not leftover.exists()
    assert temp.exists()
    os.close(handle)
    disk.sweep()
    assert [path.name for path in (disk.root / "_tmp").iterdir()] == ["_lock"]


def test_without_hard_links(disk: local.LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert len(_race(disk, lambda index: disk.write_new("k", b"%d" % index), 6)) == 1


def test_a_file_in_the_way_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_storage(str(tmp_path / "file" / "out"), StorageConfig()).check_writable()


# On S3


@pytest.fixture
def bucket(s3_server: S3Server) -> Storage:
    return open_storage(f"s3://{s3_server.new_bucket()}", s3_server.config)


@pytest.mark.parametrize("after", [True, False])
def test_retried_put_is_not_mistaken_for_anothers(bucket: Storage, s3_server: S3Server, after: bool) -> None:
    s3_server.fail_next("PUT", 503, after)
    etag = bucket.write_new("k", b"mine")
    assert bucket.read("k").etag == etag
    s3_server.fail_next("PUT", 500, after)
    bucket.write_if("k", b"mine, again", etag)
    assert bucket.read("k").data == b"mine, again"


def test_retried_put_sees_a_real_conflict(bucket: Storage, s3_server: S3Server) -> None:
    bucket.write("k", b"theirs")
    s3_server.fail_next("PUT", 503, False)
    with pytest.raises(Conflict):
        bucket.write_new("k", b"mine")


def test_collision_is_asked_again(bucket: Storage, s3_server: S3Server) -> None:
    s3_server.fail_next("PUT", 409, False)
    bucket.write_new("k", b"mine")
    s3_server.fail_next("PUT", 409, True)
    bucket.write_if("k", b"more", str(bucket.head("k")))
    assert bucket.read("k").data == b"more"


def test_a_store_that_stays_away(bucket: Storage, s3_server: S3Server) -> None:
    for _ in range(s3_server.config.max_attempts):
        s3_server.fail_next("GET", 503, False)
    with pytest.raises(TransientError) as caught:
        bucket.read("k")
    assert caught.value.error_type == "storage"


def test_no_such_bucket(s3_server: S3Server) -> None:
    storage = open_storage("s3://nowhere/out", s3_server.config)
    with pytest.raises(ConfigError, match="no such bucket"):
        storage.check_writable()
    with pytest.raises(ConfigError, match="no such bucket"):
        list(storage.list(""))


def test_access_denied(bucket: Storage, s3_server: S3Server) -> None:
    s3_server.fail_next("GET", 403, False)
    with pytest.raises(Denied, match="access denied"):
        bucket.read("k")


def test_no_credentials(bucket: Storage, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3.client.cache_clear()
    try:
        with pytest.raises(ConfigError, match="credentials"):
            open_storage(bucket.uri, s3_server.config).check_writable()
    finally:
        s3.client.cache_clear()


def test_no_server_and_no_url() -> None:
    config = StorageConfig(endpoint_url="http://127.0.0.1:9", max_attempts=1)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_storage("s3://bucket/out", config).check_writable()
    with pytest.raises(ConfigError, match="endpoint_url"):
        open_storage("s3://bucket/out", StorageConfig(endpoint_url="no url"))


# URIs


@pytest.mark.parametrize("name", NAMES)
def test_local_uris_are_those_of_pathlib(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert canonical_uri(str(path)) == path.as_uri()
    assert canonical_uri(path.as_uri()) == path.as_uri()
    assert locate(path.as_uri()).key == str(path)


def test_canonical_spelling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert canonical_uri("a/./b/../c.mp4") == (tmp_path / "a/c.mp4").as_uri()
    assert canonical_uri(f"file://localhost{tmp_path}/x/../c d") == (tmp_path / "c d").as_uri()
    assert canonical_uri("s3://b/x%20y/../z#.mp4") == "s3://b/x%20y/../z#.mp4"  # a key is what the store says it is
    assert canonical_uri("S3://b/k") == "s3://b/k"


def test_undecodable_names_have_ascii_uris(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.mp4")
    uri = canonical_uri(path)
    assert uri.isascii()
    assert locate(uri).key == path


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_canonical_is_a_fixed_point(text: str) -> None:
    uri = canonical_uri("/root/" + text.replace("://", ""))
    assert canonical_uri(uri) == uri
    assert locate(uri).uri == uri


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        ("file:///m", "a b.mp4", "file:///m/a%20b.mp4"),
        ("file:///m", "../x/a%20b.mp4", "file:///x/a%2520b.mp4"),
        ("file:///m", "/abs.mp4", "file:///abs.mp4"),
        ("file:///m", "s3://b/k", "s3://b/k"),
        ("s3://b/m", "a b.mp4", "s3://b/m/a b.mp4"),
        ("s3://b/m/n", "../a.mp4", "s3://b/m/a.mp4"),
        ("s3://b", "a.mp4", "s3://b/a.mp4"),
    ],
)
def test_resolve(folder: str, text: str, expected: str) -> None:
    assert resolve(folder, text) == expected


@pytest.mark.parametrize("text", ["", "gs://b/k", "https://x/y", "s3://", "s3:///k", "file://host/x"])
def test_what_is_no_location(text: str) -> None:
    with pytest.raises(ConfigError):
        canonical_uri(text)


# Fetching inputs


@pytest.fixture(params=["local", "s3"])
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Callable[[bytes], str], str, StorageConfig]]:
    """A function that writes an input, the input's URI, and how to reach it."""
    if request.param == "local":
        path = tmp_path / "a b#.mp4"
        yield path.write_bytes, path.as_uri(), StorageConfig()  # type: ignore[misc]
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        bucket = server.new_bucket()
        storage = open_storage(f"s3://{bucket}", server.config)
        yield lambda data: storage.write("a b#.mp4", data), f"s3://{bucket}/a b#.mp4", server.config


Put = tuple[Callable[[bytes], str], str, StorageConfig]


def _version(uri: str, config: StorageConfig) -> str:
    entry = stat(uri, config)
    assert entry
    return entry.version


def test_fetch(put: Put) -> None:
    write, uri, config = put
    data = os.urandom(3_000_000)
    write(data)
    for version in (_version(uri, config), ""):
        with fetch(uri, version, config) as path:
            assert path.read_bytes() == data
            assert path.suffix == ".mp4"
        assert path.exists() == uri.startswith("file:")


def test_fetch_of_what_changed_or_went(put: Put, tmp_path: Path) -> None:
    write, uri, config = put
    write(b"one")
    version = _version(uri, config)
    write(b"another")
    with pytest.raises(TransientError) as caught, fetch(uri, version, config):
        pass
    assert caught.value.error_type == "changed"
    with pytest.raises(TransientError) as caught, fetch(uri + "x", version, config):
        pass
    assert caught.value.error_type == "not_found"
    assert stat(uri + "x", config) is None


def test_fetch_passes_the_blocks_own_errors(put: Put) -> None:
    write, uri, config = put
    write(b"one")
    with pytest.raises(FileNotFoundError), fetch(uri, "", config):
        raise FileNotFoundError


def test_fetch_denied_concerns_one_row(s3_server: S3Server) -> None:
    s3_server.fail_next("GET", 403, False)
    with pytest.raises(TransientError, match="access denied") as caught, fetch("s3://b/k", "x", s3_server.config):
        pass
    assert caught.value.error_type == "storage"


def test_fetch_resumes_a_broken_download(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3_server.new_bucket()
    storage = open_storage(f"s3://{bucket}", s3_server.config)
    data = os.urandom(3_000_000)
    etag = storage.write("k", data)
    s3_server.requests.clear()
    s3_server.break_next_body(after_bytes=1_500_000)
    with fetch(f"s3://{bucket}/k", etag, s3_server.config) as path:
        assert path.read_bytes() == data
    assert len(s3_server.requests) == 2
    s3_server.break_next_body(after_bytes=10)
    assert storage.read("k").data == data
