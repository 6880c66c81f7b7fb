"""Objects as files of a folder, on a local or shared POSIX file system.

A write is a finished, synced temporary file under `<root>/_tmp/` that then takes its name in one step, so that nobody
who globs the tables meets half a file or a stray one. Etags are content hashes: unlike inode and mtime they do not
depend on clock ticks, inode reuse or NFS attribute caches, and cost one pass over bytes that were read anyway.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qwen_ray.errors import TransientError
from qwen_ray.io.objects import TEMP, Conflict, Entry, NotFound, Object, check_conditional

_LOCK = "_lock"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def version_of(stat: os.stat_result) -> str:
    """Size and mtime: tells a changed file apart without reading it."""
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def below(path: str, folder: str) -> str:
    """The part of a walked path that lies below the folder; os.path.relpath takes 20 times as long."""
    return path[len(folder.rstrip("/")) + 1 :]


def etag_of(data: bytes) -> str:
    """blake2b-128 of the content."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class LocalStorage:
    """Storage in a folder; created by the first write."""

    def __init__(self, root: Path, uri: str) -> None:
        self.root = root
        self.uri = uri

    def read(self, key: str) -> Object:
        with _os_errors(self.root / key):
            data = (self.root / key).read_bytes()  # one open file is one version, also while its name moves on
        return Object(data, etag_of(data))

    def head(self, key: str) -> str | None:
        try:
            return self.read(key).etag
        except NotFound:
            return None

    def exists(self, key: str) -> bool:
        return (self.root / key).exists()

    def write(self, key: str, data: bytes) -> str:
        with self._staged(key, data) as (temp, path), self._locked():
            temp.replace(path)
        return etag_of(data)

    def write_new(self, key: str, data: bytes) -> str:
        with self._staged(key, data) as (temp, path), self._locked():
            _link(temp, path)
        return etag_of(data)

    def write_if(self, key: str, data: bytes, etag: str) -> str:
        with self._staged(key, data) as (temp, path), self._locked():
            if self.head(key) != etag:
                raise Conflict(f"{path} has changed")
            temp.replace(path)
        return etag_of(data)

    def delete(self, key: str) -> None:
        path = self.root / key
        if not path.exists():
            return
        with _os_errors(path), self._locked():
            path.unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[Entry]:
        folder = self.root / prefix.rpartition("/")[0]
        for path in sorted(walk(str(folder))):
            key = below(path, str(self.root))
            if not key.startswith(prefix) or (key.startswith(TEMP) and not prefix.startswith(TEMP)):
                continue
            with suppress(FileNotFoundError):  # deleted since the folder was read
                stat = Path(path).stat()
                yield Entry(key, stat.st_size, version_of(stat), stat.st_mtime)

    def age_s(self, key: str) -> float:
        with _os_errors(self.root / key):
            return max(0.0, time.time() - (self.root / key).stat().st_mtime)

    def sweep(self) -> None:
        folder = self.root / TEMP
        if not folder.is_dir():
            return
        with _os_errors(folder):
            for path in folder.iterdir():
                if path.name != _LOCK:  # whoever waits for it would hold the lock of a file that is gone
                    _unlink_if_abandoned(path)

    def check_writable(self) -> None:
        check_conditional(self)

    @contextmanager
    def _staged(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        """A finished temporary file, and the path that it is to have; synced before, the folder's entry after."""
        path = self.root / key
        with _os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            (self.root / TEMP).mkdir(exist_ok=True)
            temp, handle = self._new_temp()
            try:
                _write_all(handle, data)
                yield temp, path
                _sync_folder(path.parent)
            finally:
                temp.unlink(missing_ok=True)
                os.close(handle)

    def _new_temp(self) -> tuple[Path, int]:
        """A file that `sweep` leaves alone for as long as this process lives: it holds the file's lock."""
        while True:
            temp = self.root / TEMP / uuid.uuid4().hex
            handle = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return temp, handle
            os.close(handle)  # swept in the instant before it was locked

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Compare and replace as one step among all processes and threads that write here."""
        handle = os.open(self.root / TEMP / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def walk(folder: str, depth: int = -1, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of the files under a folder, through symbolic links but never in circles; missing folders are empty.

    Args:
        depth: how many levels to look into; -1 for all.
        skip: first letters of names that are passed over, with all below them.
    """
    yield from _walk(folder, depth, skip, frozenset())


def _walk(folder: str, depth: int, skip: tuple[str, ...], above: frozenset[tuple[int, int]]) -> Iterator[str]:
    with _os_errors(Path(folder)):
        try:
            here = os.stat(folder)  # noqa: PTH116  as text: millions of paths pass through here
            children = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
    identity = (here.st_dev, here.st_ino)
    if identity in above or depth == 0:
        return
    for child in children:
        if skip and child.name.startswith(skip):
            continue
        if child.is_dir():
            yield from _walk(child.path, depth - 1, skip, above | {identity})
        elif child.is_file() or child.is_symlink():  # a dangling link is listed: it becomes a row that says so
            yield child.path


def _link(temp: Path, path: Path) -> None:
    try:
        os.link(temp, path)
    except FileExistsError:
        raise Conflict(f"{path} exists already") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(temp, path)


def _rename_new(temp: Path, path: Path) -> None:
    """For file systems without hard links (SMB, some FUSE): as safe as the lock under which it runs."""
    if path.exists():
        raise Conflict(f"{path} exists already")
    temp.replace(path)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
    os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unlink_if_abandoned(path: Path) -> None:
    with suppress(FileNotFoundError, BlockingIOError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
            path.unlink()
        finally:
            os.close(handle)


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(str(path)) from error
    except OSError as error:
        raise TransientError("storage", f"{error.filename or path}: {error.strerror or error}") from error
