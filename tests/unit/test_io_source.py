"""Listing inputs: every form, odd names, duplicates, and clear words when there is nothing to list."""

from __future__ import annotations

import datetime
import decimal
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qwen_ray.config import StorageConfig
from qwen_ray.errors import ConfigError
from qwen_ray.io.source import Source, belongs, list_sources
from qwen_ray.io.storage import fetch, open_storage
from qwen_ray.schema import video_id_of

if TYPE_CHECKING:
    from tests.s3 import S3Server

pytest_plugins = ("tests.s3",)

ODD = ["a b.mp4", "c#d?e.mp4", "f%20g.mp4", "видео.mkv", "sub folder/日本.webm", "no_extension", "UPPER.MOV", "x.xyz"]
PASSED_OVER = [".hidden.mp4", "_tmp/x.mp4", ".git/y.mp4", "a b.srt", "notes.TXT", "table.parquet", "m.csv", "x.json"]


class Place:
    """A folder to fill with files, on disk or in a bucket."""

    def __init__(self, uri: str, config: StorageConfig) -> None:
        self.uri, self.config = uri, config
        self.storage = open_storage(uri, config)

    def fill(self, names: list[str]) -> None:
        for name in names:
            self.storage.write(name, name.encode())

    def names(self, sources: list[Source]) -> list[str]:
        """Names of sources by their contents, so that each URI is shown to lead to its own file."""
        found = []
        for source in sources:
            with fetch(source.uri, source.version, self.config) as path:
                found.append(path.read_bytes().decode())
        return found


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "in"), StorageConfig())
    server: S3Server = request.getfixturevalue("s3_server")
    return Place(f"s3://{server.new_bucket()}/in", server.config)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder(place: Place, slash: str) -> None:
    place.fill(ODD + PASSED_OVER)
    open_storage(place.uri + "-other", place.config).write("near.mp4", b"")
    listing = list_sources(place.uri + slash, place.config)
    names = place.names(listing.sources)
    assert names == sorted(ODD, key=str.encode)
    assert listing.num_skipped == 5
    assert listing.num_duplicates == 0
    assert listing.root
    assert all(source.uri.startswith(listing.root) for source in listing.sources)
    assert [source.video_id for source in listing.sources] == [video_id_of(source.uri) for source in listing.sources]
    assert [source.size_bytes for source in listing.sources] == [len(name.encode()) for name in names]
    assert list_sources(place.uri, place.config) == listing
    assert all(belongs(name) for name in ODD)
    assert not any(belongs(name) for name in PASSED_OVER)


def test_a_version_follows_the_content(place: Place) -> None:
    place.fill(["a.mp4", "b.mp4"])
    before = list_sources(place.uri, place.config).sources
    place.storage.write("b.mp4", b"another")
    after = list_sources(place.uri, place.config).sources
    assert [one.version == other.version for one, other in zip(before, after, strict=True)] == [True, False]
    assert [source.video_id for source in before] == [source.video_id for source in after]


@pytest.mark.parametrize("name", [*ODD, "what*[1]?.mp4", "notes.txt"])
def test_one_file(place: Place, name: str) -> None:
    place.fill([name, "what_else1x.mp4"])
    listing = list_sources(f"{place.uri}/{name}", place.config)
    assert place.names(listing.sources) == [name]
    assert listing.root is None


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.mp4", ["1.mp4", "2.mp4"]),
        ("?.mp4", ["1.mp4", "2.mp4"]),
        ("[!1].mp4", ["2.mp4"]),
        ("**/*.mp4", ["1.mp4", "2.mp4", "a/3.mp4", "a/b c/4.mp4"]),
        ("a/**", ["a/3.mp4", "a/b c/4.mp4"]),
        ("*/*.mp4", ["a/3.mp4"]),
        ("a/b*/4.mp4", ["a/b c/4.mp4"]),
        ("_x/*.mp4", ["_x/5.mp4"]),
        ("*", ["1.mp4", "2.mp4"]),
    ],
)
def test_globs(place: Place, pattern: str, expected: list[str]) -> None:
    place.fill(["1.mp4", "2.mp4", "a/3.mp4", "a/b c/4.mp4", "_x/5.mp4", ".6.mp4", "1.srt", "a/.h/7.mp4"])
    listing = list_sources(f"{place.uri}/{pattern}", place.config)
    assert place.names(listing.sources) == expected
    assert listing.root is None


def test_limit(place: Place) -> None:
    place.fill(["b.mp4", "a.mp4", "a.srt", "c.mp4"])
    listing = list_sources(place.uri, place.config, limit=2)
    assert place.names(listing.sources) == ["a.mp4", "b.mp4"]
    assert listing.root is None  # not complete: nothing may be taken to have vanished


def _manifest(kind: str, rows: list[dict[str, Any]]) -> bytes:
    if kind == "jsonl":
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n\n"
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        return ("\ufeff" + "\r\n".join(lines)).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_manifests(place: Place, kind: str) -> None:
    place.fill(ODD)
    names = [*ODD, "./a b.mp4", "gone.mp4", f"{place.uri}/a b.mp4", "x/../a b.mp4"]
    rows = [{"uri": name, "label": f"l{index}, é"} for index, name in enumerate(names)]
    place.storage.write(f"list.{kind}", _manifest(kind, rows))
    listing = list_sources(f"{place.uri}/list.{kind}", place.config)
    assert place.names(listing.sources[: len(ODD)]) == ODD
    assert listing.num_duplicates == 3
    assert listing.root is None
    assert [source.metadata for source in listing.sources] == [{"label": f"l{i}, é"} for i in [*range(len(ODD)), 9]]
    gone = listing.sources[-1]
    assert (gone.version, gone.size_bytes) == ("", 0)
    folder = {source.uri: source for source in list_sources(place.uri, place.config).sources}
    for source in listing.sources[:-1]:  # the same ids and versions as when the folder is listed
        assert (folder[source.uri].video_id, folder[source.uri].version) == (source.video_id, source.version)
    limited = list_sources(f"{place.uri}/list.{kind}", place.config, limit=2)
    assert place.names(limited.sources) == ODD[:2]


def test_manifest_values_become_plain_json(tmp_path: Path) -> None:
    row = {
        "uri": "a.mp4", "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "nan": float("nan"),
        "raw": b"\x00\xff",
        "price": decimal.Decimal("1.50"), "deep": {"list": [{"x": True}, None]}, "none": None,
    }  # fmt: skip
    (tmp_path / "m.parquet").write_bytes(_manifest("parquet", [row]))
    metadata = list_sources(str(tmp_path / "m.parquet"), StorageConfig()).sources[0].metadata
    assert json.loads(json.dumps(metadata, allow_nan=False)) == {
        "when": "2026-01-02T00:00:00+00:00", "nan": None, "raw": "AP8=", "price": "1.50",
        "deep": {"list": [{"x": True}, None]}, "none": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", b"url,label\na,b\n", "no column 'uri'.*did you mean 'url'"),
        ("m.csv", b"uri\n", "no rows"),
        ("m.csv", b"", "no rows"),
        ("m.csv", b"uri\na,b,c\n", "row 1 has more values"),
        ("m.csv", b"uri,x\n,b\n", "row 1 has no uri"),
        ("m.csv", b"uri\n\xff\xfe\n", "not UTF-8"),
        ("m.jsonl", b'{"uri": "a"}\n{oops\n', "line 2 is not JSON"),
        ("m.jsonl", b'["a"]\n', "line 1 is not an object"),
        ("m.jsonl", b'{"uri": 3}\n', "row 1 has no uri"),
        ("m.jsonl", b'{"uri": "ftp://x/y"}\n', "unknown scheme ftp://"),
        ("m.parquet", b"PAR1 no", "not Parquet"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list_sources(str(tmp_path / name), StorageConfig())


def test_nothing_to_list(place: Place) -> None:
    place.fill(["only.srt", "sub/_h.mp4"])
    for text, message in [
        (place.uri, "holds no videos .only 1 side-car"),
        (f"{place.uri}/nope", "there is nothing there"),
        (f"{place.uri}/nope/", "there is nothing there"),
        (f"{place.uri}/*.mp4", "no file matches"),
        ("gs://bucket/x", "unknown scheme gs://"),
        ("", "is needed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            list_sources(text, place.config)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no videos"):
        list_sources(str(tmp_path), StorageConfig())


def test_s3_pages_and_folder_markers(s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    s3_server.put(bucket, "v/", b"")
    for index in range(1050):
        s3_server.put(bucket, f"v/{index:04d}.mp4", b"x")
    listing = list_sources(f"s3://{bucket}/v/", s3_server.config)
    assert [source.uri for source in listing.sources] == [f"s3://{bucket}/v/{i:04d}.mp4" for i in range(1050)]
    assert len(list_sources(f"s3://{bucket}", s3_server.config).sources) == 1050
    s3_server.requests.clear()
    assert len(list_sources(f"s3://{bucket}/v/", s3_server.config, limit=3).sources) == 3
    assert len(s3_server.requests) <= 3  # it stops asking


def test_a_manifest_row_that_is_denied_stands_alone(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = s3_server.new_bucket()
    (tmp_path / "m.csv").write_text(f"uri\ns3://{bucket}/a\n")
    s3_server.fail_next("HEAD", 403, False)
    assert list_sources(str(tmp_path / "m.csv"), s3_server.config).sources[0].version == ""


def test_links_on_disk(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.mp4").write_text("a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.mp4").write_text("b")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "circle").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "dangling.mp4").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "in" / "pipe.mp4")
    sources = list_sources(str(tmp_path / "in"), StorageConfig()).sources
    assert [(source.uri.rpartition("in/")[2], bool(source.version)) for source in sources] == [
        ("a.mp4", True), ("dangling.mp4", False), ("linked/b.mp4", True),
    ]  # fmt: skip


def test_undecodable_names(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.mp4"
    with open(path, "wb") as file:  # noqa: PTH123  a name that is no text
        file.write(b"x")
    source = list_sources(str(tmp_path), StorageConfig()).sources[0]
    assert source.uri.isascii()
    with fetch(source.uri, source.version, StorageConfig()) as found:
        assert found.read_bytes() == b"x"
