"""What every store of objects can do: the few operations, values and failures that the rest of `io` is written against.

Conditional writes are the only lock there is. A store that cannot refuse a write ("only if absent", "only if
unchanged") cannot hold an output; `check_conditional` finds that out before any work is done.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from qwen_ray.errors import ConfigError, QwenRayError, TransientError

TEMP = "_tmp/"
"""Prefix of what is not finished yet; nothing under it is ever read, and `sweep` clears it."""


class NotFound(QwenRayError, LookupError):  # noqa: N818  an answer more than an error
    """There is no object under that key."""


class Conflict(QwenRayError):  # noqa: N818
    """A conditional write was refused: the object exists already, or is not the one that was read."""


class Denied(ConfigError):  # noqa: N818
    """The store knows us not, or does not let us. With some policies S3 says so of keys that do not exist."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object's bytes, and the tag under which `write_if` will replace exactly these bytes."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing.

    `version` tells two states of the object apart: the ETag on S3; size and mtime on disk, where an etag would mean
    reading every file. Only `read`, `head` and the writes return etags that are good for `write_if`.
    """

    key: str
    size_bytes: int
    version: str
    modified_at: float
    """Seconds since the epoch, by the store's clock."""


class Storage(Protocol):
    """A tree of objects under one root. Keys are relative, with `/` between their parts. Safe to use from many threads.

    Every method may raise TransientError("storage") when the store does not answer, and ConfigError when it refuses us.
    """

    @property
    def uri(self) -> str:
        """Canonical URI of the root, without a trailing slash."""

    def read(self, key: str) -> Object:
        """The whole object, of one moment. Raises NotFound."""

    def head(self, key: str) -> str | None:
        """Its etag, or None if there is no such object."""

    def exists(self, key: str) -> bool:
        """Whether there is such an object; cheaper than `head` on disk."""

    def write(self, key: str, data: bytes) -> str:
        """Create or replace it, whatever was there; returns the etag. Readers see old or new, never a part."""

    def write_new(self, key: str, data: bytes) -> str:
        """Create it. Raises Conflict if it exists."""

    def write_if(self, key: str, data: bytes, etag: str) -> str:
        """Replace the object that has this etag. Raises Conflict if it has another one by now, or is gone."""

    def delete(self, key: str) -> None:
        """Remove it; it may be absent already."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """Objects whose key starts with `prefix`, in the order of their keys."""

    def age_s(self, key: str) -> float:
        """Seconds since the object was written, by the store's own clock. Raises NotFound."""

    def sweep(self) -> None:
        """Remove what writers that died have left under `_tmp/`."""

    def check_writable(self) -> None:
        """Raises ConfigError unless objects can be written here under conditions."""


def check_conditional(storage: Storage) -> None:
    """Write, and have refused, a probe.

    Raises:
        ConfigError: nothing can be written, or the store ignores conditions (some S3 look-alikes do, silently: two runs
            would then both believe that they hold the output).
    """
    key = f"{TEMP}probe-{uuid.uuid4().hex}"
    try:
        storage.write_new(key, b"probe")
        if not (_refuses_new(storage, key) and _refuses_changed(storage, key)):
            raise ConfigError(
                f"{storage.uri}: this store ignores conditional writes (If-None-Match, If-Match); use another"
            )
        storage.delete(key)
    except (TransientError, NotFound) as error:
        raise ConfigError(f"output {storage.uri} cannot be written: {error}") from error


def _refuses_new(storage: Storage, key: str) -> bool:
    try:
        storage.write_new(key, b"second")
    except Conflict:
        return True
    return False


def _refuses_changed(storage: Storage, key: str) -> bool:
    try:
        storage.write_if(key, b"third", "0" * 32)
    except Conflict:
        return True
    return False
