"""What there is to do: an input, in any of its forms, becomes a list of sources with stable ids and versions.

In a folder, prefix or glob every file counts, whatever its extension, except (1) names that start with `.` or `_`, and
all below such folders, and (2) known side-car extensions (`SIDECARS`: subtitles, texts, tables, pictures, unfinished
downloads). Whether something is a video is for the demuxer to say; a list of media extensions would silently pass over
the ones it lacks. A single file and the rows of a manifest are taken as they are named.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from qwen_ray.config import StorageConfig, nearest
from qwen_ray.errors import ConfigError, TransientError
from qwen_ray.io import manifest
from qwen_ray.io.storage import Denied, NotFound, canonical_uri, is_folder, list_folder, read_uri, resolve, stat
from qwen_ray.schema import video_id_of

_SIDECARS = """
    .ass .bmp .crdownload .csv .db .htm .html .idx .ini .jpeg .jpg .json .jsonl .lock .log .lrc .md .md5 .ndjson .nfo
    .parquet .part .pdf .png .py .sbv .sha1 .sha256 .srt .ssa .sub .svg .tif .tiff .tmp .toml .torrent .tsv .txt .vtt
    .webp .xml .yaml .yml
"""
SIDECARS = frozenset(_SIDECARS.split())
_HIDDEN = (".", "_")
_WILD = re.compile(r"[*?[]")
_THREADS = 32
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Source:
    """One distinct input, as it was when it was listed."""

    video_id: str
    uri: str
    """Canonical."""
    version: str
    """ETag, else size and mtime; empty for what a manifest names but is not there."""
    size_bytes: int
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other columns of the manifest, as plain JSON values."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The sources of one input, in a stable order."""

    sources: list[Source]
    num_duplicates: int
    """Entries that named an input which was already there."""
    root: str | None
    """Prefix of URIs of which this listing is complete, so that what it lacks has vanished; None if there is none."""
    num_skipped: int = 0
    """Side-car files passed over."""


def list_sources(input: str, config: StorageConfig, limit: int = 0) -> Listing:
    """List a file, folder, glob, `s3://` prefix, or CSV, JSONL or Parquet manifest.

    Args:
        limit: take only so many distinct sources, in listing order; 0 takes all.

    Raises:
        ConfigError: nothing there, nothing usable in it, a manifest that cannot be used, unknown scheme, no access.
    """
    try:
        listing = _list(input, canonical_uri(input), config, limit)
    except TransientError as error:
        raise ConfigError(f"input {input}: {error}") from error
    if not listing.sources:
        skipped = (
            f" (only {listing.num_skipped} side-car files such as texts and tables)" if listing.num_skipped else ""
        )
        raise ConfigError(f"input {input}: holds no videos{skipped}")
    return listing


def look_up(named: Iterable[tuple[str, dict[str, Any]]], config: StorageConfig) -> Listing:
    """The state, now, of inputs that are known by canonical URI, each with its metadata."""
    distinct = {video_id_of(uri): (uri, metadata) for uri, metadata in named}
    return Listing(list(_with_versions(distinct, config)), 0, None)


def belongs(name: str) -> bool:
    """Whether listing a folder takes the file with this name relative to it."""
    return not any(part.startswith(_HIDDEN) for part in name.split("/")) and _extension(name) not in SIDECARS


def _list(text: str, uri: str, config: StorageConfig, limit: int) -> Listing:
    """Names that exist come before wildcards: a file may well be called `what?.mp4`."""
    if not text.endswith("/") and not _is_local_folder(uri, config) and (entry := stat(uri, config)) is not None:
        if _extension(uri) in manifest.READERS:
            return _list_manifest(uri, config, limit)
        return Listing([Source(video_id_of(uri), uri, entry.version, entry.size_bytes)], 0, None)
    if is_folder(uri, config):
        return _list_folder(uri, config, limit)
    if _WILD.search(text):
        return _list_glob(text, config, limit)
    raise ConfigError(f"input {text}: there is nothing there")


def _is_local_folder(uri: str, config: StorageConfig) -> bool:
    """S3 has no folders that could be mistaken for files."""
    return uri.startswith("file:") and is_folder(uri, config)


def _list_folder(uri: str, config: StorageConfig, limit: int) -> Listing:
    found = list_folder(uri, config, -1, _HIDDEN)
    sources, num_skipped = _take(((u, e.key, e.version, e.size_bytes) for u, e in found), limit)
    return Listing(sources, 0, None if limit else f"{uri.rstrip('/')}/", num_skipped)


def _list_glob(text: str, config: StorageConfig, limit: int) -> Listing:
    folder, pattern = _split_glob(text)
    matches = re.compile(_regex(pattern), re.DOTALL).fullmatch
    depth = -1 if "**" in pattern else pattern.count("/") + 1
    found = list_folder(canonical_uri(folder), config, depth, ())
    sources, num_skipped = _take(((u, e.key, e.version, e.size_bytes) for u, e in found if matches(e.key)), limit)
    if not sources and not num_skipped:
        raise ConfigError(f"input {text}: no file matches")
    return Listing(sources, 0, None, num_skipped)


def _take(found: Iterable[tuple[str, str, str, int]], limit: int) -> tuple[list[Source], int]:
    """Sources of listed files (uri, name, version, size), and how many side-cars lay between them."""
    sources: list[Source] = []
    num_skipped = 0
    for uri, name, version, size_bytes in found:
        if _extension(name) in SIDECARS:
            num_skipped += 1
            continue
        sources.append(Source(video_id_of(uri), uri, version, size_bytes))
        if len(sources) == limit:
            break
    return sources, num_skipped


def _list_manifest(uri: str, config: StorageConfig, limit: int) -> Listing:
    folder = uri.rpartition("/")[0]
    distinct: dict[str, tuple[str, dict[str, Any]]] = {}
    num_rows = 0
    for number, row in enumerate(_rows(uri, config), 1):
        named = row.pop("uri")
        if not isinstance(named, str) or not named.strip():
            raise ConfigError(f"manifest {uri}: row {number} has no uri")
        try:
            source_uri = resolve(folder, named)
        except ConfigError as error:
            raise ConfigError(f"manifest {uri}: row {number}: {error}") from None
        if limit and len(distinct) == limit and video_id_of(source_uri) not in distinct:
            break
        distinct.setdefault(video_id_of(source_uri), (source_uri, row))
        num_rows += 1
    if not distinct:
        raise ConfigError(f"manifest {uri}: has no rows")
    return Listing(list(_with_versions(distinct, config)), num_rows - len(distinct), None)


def _rows(uri: str, config: StorageConfig) -> Iterator[dict[str, Any]]:
    try:
        data = read_uri(uri, config)
    except NotFound:
        raise ConfigError(f"manifest {uri}: there is nothing there") from None
    for number, row in enumerate(manifest.read_rows(uri, data), 1):
        if "uri" not in row:
            known = f"{nearest('uri', list(row))}; columns: {', '.join(row)}"
            raise ConfigError(f"manifest {uri}: row {number} has no column 'uri'{known}")
        yield row


def _with_versions(distinct: dict[str, tuple[str, dict[str, Any]]], config: StorageConfig) -> Iterator[Source]:
    """Look every named file up, many at a time and in batches: a manifest may have millions."""
    entries = iter(distinct.items())
    with ThreadPoolExecutor(_THREADS) as pool:
        while batch := list(itertools.islice(entries, _BATCH)):
            states = pool.map(lambda item: _state(item[1][0], config), batch)
            for (video_id, (uri, metadata)), (version, size_bytes) in zip(batch, states, strict=True):
                yield Source(video_id, uri, version, size_bytes, metadata)


def _state(uri: str, config: StorageConfig) -> tuple[str, int]:
    try:
        entry = stat(uri, config)
    except (Denied, TransientError):  # concerns one row of many: it fails by itself when it is read, with the reason
        entry = None
    return (entry.version, entry.size_bytes) if entry else ("", 0)


def _extension(name: str) -> str:
    stem, dot, extension = name.rpartition("/")[2].rpartition(".")
    return f".{extension.lower()}" if dot and stem else ""


def _split_glob(text: str) -> tuple[str, str]:
    """The folder that holds no wildcard, and the pattern below it."""
    start = _WILD.search(text)
    assert start
    folder, _, _ = text[: start.start()].rpartition("/")
    pattern = text[len(folder) :].lstrip("/")
    return folder or ("/" if text.startswith("/") else "."), pattern


def _regex(pattern: str) -> str:
    """As the shell has it: `*` and `?` stay within a name, `**/` spans folders, and none matches a hidden name."""
    return "".join(_segment_regex(segment, last) for segment, last in _segments(pattern))


def _segments(pattern: str) -> Iterator[tuple[str, bool]]:
    segments = pattern.split("/")
    for index, segment in enumerate(segments):
        yield segment, index == len(segments) - 1


def _segment_regex(segment: str, last: bool) -> str:
    visible = r"(?![._])"
    if segment == "**":
        folders = rf"(?:{visible}[^/]+/)*"
        return rf"{folders}{visible}[^/]+" if last else folders
    guard = visible if _WILD.match(segment) else ""
    tokens = re.findall(r"\[!?\]?[^]]*\]|.", segment, re.DOTALL)
    return guard + "".join(map(_token_regex, tokens)) + ("" if last else "/")


def _token_regex(token: str) -> str:
    if token == "*":
        return "[^/]*"
    if token == "?":
        return "[^/]"
    if len(token) > 1:
        inner = token[1:-1].replace("\\", r"\\")
        return f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]"
    return re.escape(token)
