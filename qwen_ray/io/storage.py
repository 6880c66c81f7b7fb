"""URIs: the only file that knows their schemes. Everything else passes them on as text.

Canonical URIs. Local: what `pathlib.Path.as_uri()` gives, `file:///a%20b.mp4`: absolute, without `.` and `..`, bytes
percent-encoded. Encoding beat plain text because names on disk need not be valid UTF-8, while a Parquet string must be.
S3: `s3://bucket/key` with the key exactly as the store has it: there `%`, `..` and `//` are ordinary parts of a name.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote_from_bytes, unquote_to_bytes

from qwen_ray.config import StorageConfig
from qwen_ray.errors import ConfigError, TransientError
from qwen_ray.io import local
from qwen_ray.io.objects import Conflict, Denied, Entry, NotFound, Object, Storage

__all__ = [
    "Conflict", "Denied", "Entry", "Location", "NotFound", "Object", "Storage",
    "canonical_uri", "copy_to", "fetch", "file_name", "is_folder", "list_folder", "locate", "open_storage", "read_uri",
    "resolve", "stat",
]  # fmt: skip

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Location:
    """A taken-apart URI: a path on disk (no bucket), or a key in a bucket."""

    bucket: str
    key: str

    @property
    def is_local(self) -> bool:
        return not self.bucket

    @property
    def uri(self) -> str:
        return _file_uri(self.key) if self.is_local else f"s3://{self.bucket}/{self.key}"


def locate(text: str) -> Location:
    """Take apart a URI, or a local path as people write it.

    Raises:
        ConfigError: empty, or a scheme other than `file` and `s3`.
    """
    if not text:
        raise ConfigError("an input or output is needed: a path, or s3://bucket/prefix")
    match = _SCHEME.match(text)
    if not match:
        return Location("", _absolute(text))
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return Location("", _path_of(rest, text))
    if scheme == "s3":
        return _bucket_and_key(rest, text)
    raise ConfigError(f"{text}: unknown scheme {scheme}://; known are s3:// and file://, or a plain path")


def file_name(uri: str) -> str:
    """The last part of a URI's path or key, as people know it."""
    return posixpath.basename(locate(uri).key)


def canonical_uri(text: str) -> str:
    """The one spelling of a URI or path, from which ids are made. Raises ConfigError on an unknown scheme."""
    return locate(text).uri


def resolve(folder: str, text: str) -> str:
    """Canonical URI of `text` as it stands in a manifest that lies in `folder` (a canonical URI)."""
    if _SCHEME.match(text) or text.startswith(("/", "~/")):
        return canonical_uri(text)
    base = locate(folder)
    if base.is_local:
        return canonical_uri(f"{base.key}/{text}")
    return Location(base.bucket, posixpath.normpath(posixpath.join(base.key, text)).lstrip("/")).uri


def open_storage(uri: str, config: StorageConfig) -> Storage:
    """The tree of objects under a folder or prefix; nothing is created or contacted yet.

    Raises:
        ConfigError: unknown scheme, or no such endpoint.
    """
    location = locate(uri)
    if location.is_local:
        return local.LocalStorage(Path(location.key), location.uri)
    from qwen_ray.io.s3 import S3Storage

    return S3Storage(location.bucket, location.key.strip("/"), config)


def stat(uri: str, config: StorageConfig) -> Entry | None:
    """The state of one file or object; None where there is none. Raises ConfigError when the store refuses us."""
    location = locate(uri)
    if location.is_local:
        return _local_entry(location.key)
    if not location.key:  # a bucket is no object
        return None
    from qwen_ray.io import s3

    try:
        answer = s3.head_object(s3.client(config), location.bucket, location.key)
    except NotFound:
        return None
    modified_at = answer["LastModified"].timestamp()
    return Entry(location.key, answer["ContentLength"], answer["ETag"].strip('"'), modified_at)


def list_folder(uri: str, config: StorageConfig, depth: int, skip: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
    """(canonical URI, entry with its key relative to the folder) of what lies under a folder or prefix, in key order.

    A file that vanishes while it is listed comes with an empty version.

    Args:
        depth: levels to descend; -1 for all.
        skip: first letters of names that are left out, with all below them.
    """
    location = locate(uri)
    if location.is_local:
        yield from _list_disk(location.key, depth, skip)
        return
    from qwen_ray.io import s3

    prefix = f"{location.key.rstrip('/')}/" if location.key.strip("/") else ""
    for entry in s3.list_bucket(s3.client(config), location.bucket, prefix):
        name = entry.key[len(prefix) :]
        names = name.split("/")
        if name.endswith("/") or not name or 0 <= depth < len(names) or any(n.startswith(skip) for n in names if skip):
            continue
        found = Entry(name, entry.size_bytes, entry.version, entry.modified_at)
        yield Location(location.bucket, entry.key).uri, found


def is_folder(uri: str, config: StorageConfig) -> bool:
    """Whether anything lies under this folder or prefix; an empty local folder is one too."""
    location = locate(uri)
    if location.is_local:
        return Path(location.key).is_dir()
    return next(list_folder(uri, config, -1, ()), None) is not None


def read_uri(uri: str, config: StorageConfig) -> bytes:
    """All bytes of one file or object. Raises NotFound, TransientError, ConfigError."""
    location = locate(uri)
    folder, _, name = location.key.rpartition("/")
    return (
        open_storage(Location(location.bucket, folder or ("/" if location.is_local else "")).uri, config)
        .read(name)
        .data
    )


@contextmanager
def fetch(uri: str, version: str, config: StorageConfig) -> Iterator[Path]:
    """A local path to exactly the listed version of an input: the file itself, or a copy that goes when the block ends.

    Args:
        version: as listed; empty takes whatever is there.

    Raises:
        TransientError: `not_found`, `changed` (another version by now), `storage` (no answer, or access denied).
    """
    location = locate(uri)
    if location.is_local:
        _check_version(location.key, version)
        yield Path(location.key)
        return
    with tempfile.TemporaryDirectory(prefix="qwen_ray-", ignore_cleanup_errors=True) as folder:
        target = Path(folder) / _file_name(location.key)
        _download(location, version, config, target)
        yield target


def copy_to(uri: str, target: Path, config: StorageConfig, on_chunk: Callable[[bytes], None]) -> None:
    """Copy an object of a store to a file, handing each piece on as it is written. Raises TransientError as `fetch`."""
    _download(locate(uri), "", config, target, on_chunk)


def _file_name(key: str) -> str:
    """The object's own name, since messages name files by it; another where a disk would not take it."""
    name = posixpath.basename(key)
    usable = name not in ("", ".", "..") and len(os.fsencode(name)) <= 255 and "\0" not in name
    return name if usable else f"video{Path(key).suffix[:16]}"


def _download(
    location: Location,
    version: str,
    config: StorageConfig,
    target: Path,
    on_chunk: Callable[[bytes], None] | None = None,
) -> None:
    from qwen_ray.io import s3

    try:
        s3.download(config, location.bucket, location.key, version, target, on_chunk)
    except NotFound:
        _raise_not_found(location.uri)
    except Conflict:
        raise TransientError("changed", f"{location.uri} is not the version that was listed") from None
    except ConfigError as error:  # on a worker this concerns one input; the run has its own check of the output
        raise TransientError("storage", str(error)) from error
    except OSError as error:
        raise TransientError("storage", f"{target}: {error.strerror or error}") from error


def _check_version(path: str, version: str) -> None:
    try:
        entry = _local_entry(path)
    except Denied as error:
        raise TransientError("storage", str(error)) from error
    if entry is None:
        _raise_not_found(_file_uri(path))
    if version and entry.version != version:
        raise TransientError("changed", f"{_file_uri(path)} is not the version that was listed")


def _raise_not_found(uri: str) -> NoReturn:
    raise TransientError("not_found", f"{uri} is not there") from None


def _local_entry(path: str) -> Entry | None:
    try:
        found = os.stat(path)  # noqa: PTH116  as text: millions of paths pass through here
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL, which no name on disk has
        return None
    except PermissionError as error:
        raise Denied(f"{path}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise TransientError("storage", f"{path}: {error.strerror}") from error
    return Entry(path, found.st_size, local.version_of(found), found.st_mtime)


def _list_disk(folder: str, depth: int, skip: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
    for path in sorted(local.walk(folder, depth, skip), key=os.fsencode):
        name = local.below(path, folder)
        found = _local_entry(path) or Entry(path, 0, "", 0.0)
        yield _file_uri(path), Entry(name, found.size_bytes, found.version, found.modified_at)


def _absolute(text: str) -> str:
    """Without `.` and `..`, but with symbolic links as they are: an input is known by the name it was given."""
    path = str(Path(text).expanduser()) if text.startswith("~/") else text
    return os.path.abspath(path)  # noqa: PTH100  pathlib only removes `..` together with links


def _file_uri(path: str) -> str:
    return f"file://{quote_from_bytes(os.fsencode(path))}"


def _path_of(rest: str, text: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{text}: a file URI has three slashes, file:///folder/name")
    return _absolute(os.fsdecode(unquote_to_bytes(f"/{path}")))


def _bucket_and_key(rest: str, text: str) -> Location:
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{text}: no bucket; expected s3://bucket/prefix")
    return Location(bucket, key)
