"""The folder in which a node keeps models and what it knows about them, shared by all processes of the node.

Nothing in it is precious: it can be removed at any time when no run is starting. Locks are those of the operating
system (`flock`), so the lock of a killed process is free at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qwen_ray.config import WeightsConfig
from qwen_ray.engines.checksums import File, digest_path

VARIABLE = "QWEN_RAY_CACHE"


def root(config: WeightsConfig) -> Path:
    """The folder on this node: `weights.cache_dir`, else the variable, else one in the user's own cache."""
    named = config.cache_dir or os.environ.get(VARIABLE, "")
    return Path(named).expanduser() if named else Path("~/.cache/qwen_ray").expanduser()


def hub_root(config: WeightsConfig) -> Path | None:
    """Where the hub's client keeps its files: in our folder where one was named; None leaves it to the client."""
    return root(config) / "hub" if config.cache_dir or os.environ.get(VARIABLE) else None


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """One process of the node at a time for a key. Without a lock where the cache cannot be written: only what writes
    there needs it.
    """
    from filelock import FileLock

    path = folder / "locks" / f"{_short(key)}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        lock.acquire()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release()


def remember(folder: Path, kind: str, key: str, value: Any) -> None:
    """Keep a JSON value for whoever comes later; a cache that cannot be written forgets."""
    with suppress(OSError):
        write(folder / kind / f"{_short(key)}.json", json.dumps(value))


def recall(folder: Path, kind: str, key: str) -> Any:
    """What was remembered; None for nothing."""
    try:
        return json.loads((folder / kind / f"{_short(key)}.json").read_text())
    except (OSError, ValueError):
        return None


def write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


class Checked:
    """Digests of a folder's files as they were found, good while a file keeps its size and times.

    Hashing 15 GB takes many seconds; every engine of a node and every later run would pay for it again.
    """

    def __init__(self, cache: Path, folder: Path) -> None:
        self._cache, self._folder = cache, folder
        self._seen: dict[str, list[Any]] = recall(cache, "checked", str(folder)) or {}

    def digest(self, file: File) -> str | None:
        """The digest of the file as it lies there now; None where that must be found out, or there is no file."""
        state = self._state(file.name)
        *known, digest = self._seen.get(file.name, [None])
        fits = state is not None and known == state and digest.startswith(f"{file.kind}:")
        return str(digest) if fits else None

    def found(self, file: File, digest: str) -> None:
        """Take note of a digest."""
        state = self._state(file.name)
        if state is not None:
            self._seen[file.name] = [*state, digest]

    def save(self) -> None:
        """Let later processes know."""
        remember(self._cache, "checked", str(self._folder), self._seen)

    def _state(self, name: str) -> list[int] | None:
        """Size and times. The time of the last change of the file's entry cannot be set back by a copying tool."""
        try:
            found = (self._folder / name).stat()
        except OSError:
            return None
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def digests(cache: Path, folder: Path, names: list[str]) -> tuple[File, ...]:
    """The named files of a folder with their SHA-256, from notes where those still hold."""
    checked = Checked(cache, folder)
    files = []
    for name in names:
        file = File(name, (folder / name).stat().st_size, "")
        digest = checked.digest(file) or digest_path(folder / name, file)
        checked.found(file, digest)
        files.append(File(name, file.size_bytes, digest))
    checked.save()
    return tuple(files)


def _short(key: str) -> str:
    return hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
