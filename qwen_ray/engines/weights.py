"""A model's files on this node: downloaded once, verified once, and then there for every engine.

Files come under a temporary name, are hashed as they come, and get their own name only when they are right, so a crash
leaves nothing half that could be taken for whole. The lock is per node and model: of engines that start together one
works and the others wait, and then find everything done.
"""

from __future__ import annotations

import queue
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from qwen_ray.engines import cache, checksums, hub
from qwen_ray.engines.checksums import File, OnBytes, unheard
from qwen_ray.engines.models import Model, folder_of
from qwen_ray.errors import ConfigError
from qwen_ray.io.storage import copy_to

PARALLEL_FILES = 4
"""Files downloaded at once; a store gives one connection 100 MB/s or so."""
PROGRESS_EVERY_S = 0.5
_PART = ".part"


class _StoppedError(Exception):
    """Another file of the model has failed, so this one is not worth finishing."""


def local(model: Model, on_bytes: OnBytes = unheard) -> Model:
    """The same model as a folder of this node with verified files, downloaded first where that must be.

    Args:
        model: as `models.resolve` gives it.
        on_bytes: told of bytes as they are downloaded, hashed, or found to be right already.

    Raises:
        ConfigError: a file is not what it must be, is missing and cannot be downloaded, or does not fit on the disk.
        TransientError: the store or hub does not answer.
    """
    folder, kept = folder_of(model), cache.root(model.weights)
    if not _open_files(model, cache.Checked(kept, folder)):
        on_bytes(model.size_bytes)
    else:
        with cache.locked(kept, str(folder)):
            _complete(model, folder, cache.Checked(kept, folder), on_bytes)
    return replace(model, location=str(folder), source="folder")


def fetch(models: Sequence[Model]) -> Iterator[int]:
    """Have models here, one after another; yields the bytes that are ready so far, about twice a second.

    Raises as `local` does.
    """
    arrived: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for model in models:
                local(model, arrived.put)
            arrived.put(None)
        except BaseException as error:  # noqa: BLE001  handed to the caller's thread
            arrived.put(error)

    threading.Thread(target=work, name="weights", daemon=True).start()
    total, done, told_at = sum(model.size_bytes for model in models), 0, 0.0
    while (item := arrived.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        done += item
        if time.monotonic() - told_at >= PROGRESS_EVERY_S:
            told_at = time.monotonic()
            yield min(done, total)
    yield total


def _open_files(model: Model, checked: cache.Checked) -> list[File]:
    """The files of which it is not known that they are here and right."""
    return [file for file in model.files if not _is_right(file, checked.digest(file))]


def _is_right(file: File, found: str | None) -> bool:
    """Whether a digest is the file's own; where none is stated, any will do."""
    return found is not None and file.digest in ("", found)


def _complete(model: Model, folder: Path, checked: cache.Checked, on_bytes: OnBytes) -> None:
    """Verify what is here and download the rest, some files at a time; the first failure stops the others."""
    todo = _open_files(model, checked)
    on_bytes(model.size_bytes - sum(file.size_bytes for file in todo))
    _make_room(model, folder, [file for file in todo if not _has_size(folder, file)])
    stop = threading.Event()

    def heard(num_bytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        on_bytes(num_bytes)

    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        working = {pool.submit(_have, model, folder, file, heard): file for file in todo}
        try:
            for future in as_completed(working):
                checked.found(working[future], future.result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            checked.save()


def _have(model: Model, folder: Path, file: File, on_bytes: OnBytes) -> str:
    """One file, right and in its place; returns its digest."""
    path, found = folder / file.name, "no such file"
    if _has_size(folder, file):
        found = checksums.digest_path(path, file, on_bytes)
        if _is_right(file, found):
            return found
    elif path.is_file():
        found = f"{path.stat().st_size} bytes of {file.size_bytes}"
    if model.source == "folder" or model.weights.offline:
        raise _refusal(model, file, path, found)
    found = (_from_hub if model.source == "hub" else _from_store)(model, path, file, on_bytes)
    if not _is_right(file, found):
        raise _refusal(model, file, f"what was downloaded to {path}", found)
    return found


def _from_hub(model: Model, path: Path, file: File, on_bytes: OnBytes) -> str:
    hub.download(model.location, model.revision, file, cache.hub_root(model.weights), on_bytes)
    found = checksums.digest_path(path, file)
    if not _is_right(file, found):  # must not stay in a cache that others use, under a name that promises the content
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return found


def _from_store(model: Model, path: Path, file: File, on_bytes: OnBytes) -> str:
    running, part = checksums.hasher(file), path.with_name(path.name + _PART)

    def on_chunk(chunk: bytes) -> None:
        running.update(chunk)
        on_bytes(len(chunk))

    try:
        copy_to(f"{model.location}/{file.name}", part, model.storage, on_chunk)
        found = f"{file.kind}:{running.hexdigest()}"
        if found == file.digest:
            part.replace(path)
        return found
    finally:
        part.unlink(missing_ok=True)


def _make_room(model: Model, folder: Path, missing: list[File]) -> None:
    """A folder to download to, without what killed downloads have left, on a disk that holds what is missing."""
    if not missing or model.source == "folder" or model.weights.offline:
        return
    if model.source == "hub":
        folder = hub.cache_folder(cache.hub_root(model.weights))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"model {model.name!r}: {folder} on {socket.gethostname()} cannot be made: {error.strerror}; "
            f"name another folder with weights.cache_dir or {cache.VARIABLE}"
        ) from None
    for left in folder.glob(f"*{_PART}"):
        left.unlink(missing_ok=True)
    needed, free = sum(file.size_bytes for file in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"model {model.name!r}: its weights need {needed:,} bytes more, and {folder} on {socket.gethostname()} "
            f"has {free:,} free; make room, or name another folder with weights.cache_dir or {cache.VARIABLE}"
        )


def _has_size(folder: Path, file: File) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size_bytes


def _refusal(model: Model, file: File, where: object, found: str) -> ConfigError:
    place = f"{where} on {socket.gethostname()}"
    if model.source == "folder":
        return checksums.mismatch(model.name, file, place, found, "put the checkpoint's own file there, on every node")
    if model.weights.offline:
        remedy = f"offline, so nothing is downloaded; `qwen-ray fetch {model.name}` does that where there is a network"
        return checksums.mismatch(model.name, file, place, found, remedy)
    remedy = f"upload the file to {model.location} again, or make its {checksums.MANIFEST} anew if the file is right"
    if model.source == "hub":
        remedy = "try again; a proxy on the way may change files"
    return checksums.mismatch(model.name, file, place, found, remedy)
