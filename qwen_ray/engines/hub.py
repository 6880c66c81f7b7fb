"""The model hub, through its own client and in its own cache, so that what a user has downloaded before is used.

The hub states the SHA-256 of large files and git's hash of small ones. The client's cache names each file by that hash,
so the hashes are known even without a network.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from qwen_ray.engines import cache
from qwen_ray.engines.checksums import File, OnBytes, needed
from qwen_ray.errors import ConfigError, TransientError

_KINDS = {64: "sha256", 40: "git"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def look_up(name: str, revision: str, folder: Path | None, *, offline: bool) -> tuple[str, tuple[File, ...]]:
    """The commit that `revision` (or the default branch) names now, and the files of it that an engine reads.

    From the client's cache when offline, and when the hub does not answer.

    Raises:
        ConfigError: no such model or revision, or nothing is in the cache.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if offline:
        return _cached(name, revision, folder, "offline")
    try:
        info = HfApi().model_info(name, revision=revision or None, files_metadata=True)
    except RevisionNotFoundError:
        raise ConfigError(f"model {name!r}: the hub has no revision {revision!r} of it") from None
    except RepositoryNotFoundError:
        raise ConfigError(f"model {name!r}: the hub has no such repository, or it needs a token (HF_TOKEN)") from None
    except Exception as error:  # noqa: BLE001  the hub client's transport errors differ from version to version
        return _cached(name, revision, folder, f"the hub cannot be reached ({type(error).__name__})")
    listed = {item.rfilename: item for item in info.siblings or ()}
    if not _COMMIT.fullmatch(revision):
        with suppress(OSError):  # offline, the branch is looked up here
            cache.write(_repository(name, folder) / "refs" / (revision or "main"), str(info.sha))
    return str(info.sha), tuple(_listed(listed[chosen]) for chosen in needed(listed))


def _listed(item: Any) -> File:
    if item.lfs is not None:
        return File(item.rfilename, int(item.lfs.size), f"sha256:{item.lfs.sha256}")
    return File(item.rfilename, int(item.size or 0), f"git:{item.blob_id}")


def snapshot(name: str, commit: str, folder: Path | None) -> Path:
    """The folder of the client's cache that holds a commit's files."""
    return _repository(name, folder) / "snapshots" / commit


def cache_folder(folder: Path | None) -> Path:
    """Where the client's cache is."""
    from huggingface_hub import constants

    return folder or Path(constants.HF_HUB_CACHE)


def download(name: str, commit: str, file: File, folder: Path | None, on_bytes: OnBytes) -> None:
    """Have the client put one file into its cache, in place of what lies there.

    Raises:
        ConfigError: the hub refuses us. TransientError: it does not answer.
    """
    from huggingface_hub import hf_hub_download

    there = (snapshot(name, commit, folder) / file.name).exists()
    try:
        hf_hub_download(
            name, file.name, revision=commit, cache_dir=folder, force_download=there, tqdm_class=_counter(on_bytes)
        )
    except Exception as error:  # noqa: BLE001  the hub client's transport errors differ from version to version
        _raise(name, file.name, error)


def small_file(name: str, commit: str, file: File, folder: Path | None, *, offline: bool) -> Path:
    """A file of a few kilobytes, through the cache. Raises as `download` does."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file.name, revision=commit, cache_dir=folder, local_files_only=offline))
    except Exception as error:  # noqa: BLE001  as above
        _raise(name, file.name, error)


def _raise(name: str, file: str, error: Exception) -> NoReturn:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, (GatedRepoError, RepositoryNotFoundError)):
        raise ConfigError(f"model {name!r}: the hub lets nobody have {file} without a token (HF_TOKEN)") from None
    if isinstance(error, OSError) and error.errno:
        where = error.filename or cache_folder(None)
        raise ConfigError(f"model {name!r}: {file} cannot be written to {where}: {error.strerror}") from None
    why = type(error.__cause__ or error).__name__
    raise TransientError("storage", f"model {name!r}: {file} cannot be had from the hub ({why})") from None


def _cached(name: str, revision: str, folder: Path | None, why: str) -> tuple[str, tuple[File, ...]]:
    repository = _repository(name, folder)
    ref = repository / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    kept = snapshot(name, commit, folder)
    if not commit or not kept.is_dir():
        what = f"revision {revision!r} of it" if revision else "copy of it"
        raise ConfigError(
            f"model {name!r}: {why}, and the cache {cache_folder(folder)} has no {what}; "
            f"`qwen-ray fetch {name}` fills it where there is a network"
        )
    return commit, tuple(_kept(kept / chosen) for chosen in needed([path.name for path in kept.iterdir()]))


def _kept(path: Path) -> File:
    """A file of the cache: a link whose target is named by the hash."""
    target = path.readlink().name if path.is_symlink() else ""
    kind = _KINDS.get(len(target), "")
    return File(path.name, path.stat().st_size if path.exists() else 0, f"{kind}:{target}" if kind else "")


def _repository(name: str, folder: Path | None) -> Path:
    return cache_folder(folder) / f"models--{name.replace('/', '--')}"


def _counter(on_bytes: OnBytes) -> Any:
    """What the client takes for the class of its progress bar: of all that it reports, the bytes on disk."""

    def ignore(*_: Any, **__: Any) -> None:
        pass

    class Counter:
        __init__ = __exit__ = close = ignore
        update_transfer = set_postfix_str = set_transfer_postfix_str = ignore

        def __enter__(self) -> Counter:
            return self

        def update(self, num_bytes: float | None = 1) -> None:
            on_bytes(int(num_bytes or 0))

    return Counter
