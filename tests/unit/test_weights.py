"""Models come to a node whole, right and once, from a folder, an object store and a hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_ray.config import StorageConfig, WeightsConfig
from qwen_ray.engines import weights
from qwen_ray.engines.cache import locked
from qwen_ray.engines.checksums import needed
from qwen_ray.engines.models import Model, builtin_folder, folder_of, read_json, resolve
from qwen_ray.errors import ConfigError
from tests.hub import COMMIT, Hub, serve_hub
from tests.s3 import S3Server, s3_server  # noqa: F401

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint with a manifest, as `sha256sum` writes it."""
    target = tmp_path / "checkpoint"
    shutil.copytree(builtin_folder("tiny-qwen2.5-vl"), target)
    _make_manifest(target)
    return target


def _make_manifest(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def _flip(path: Path) -> None:
    """Change one bit, nothing else."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def cache(tmp_path: Path) -> WeightsConfig:
    return WeightsConfig(cache_dir=str(tmp_path / "cache"))


@dataclasses.dataclass
class Store:
    """A checkpoint under a prefix."""

    server: S3Server
    bucket: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/models/tiny"

    @property
    def config(self) -> StorageConfig:
        return self.server.config

    def put(self, name: str, data: bytes) -> None:
        self.server.put(self.bucket, f"models/tiny/{name}", data)


@pytest.fixture
def store(folder: Path, s3_server: S3Server) -> Store:  # noqa: F811
    store = Store(s3_server, s3_server.new_bucket())
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    s3_server.requests.clear()
    return store


@pytest.fixture
def hub(folder: Path):
    with serve_hub(folder) as hub:
        yield hub


def _fetch(*arguments: object, **environment: object) -> subprocess.Popen[str]:
    """`qwen-ray fetch` in a process of its own."""
    command = [sys.executable, "-m", "qwen_ray", "fetch", *map(str, arguments), "--json"]
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output, and errors in one line."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, " ".join(err.split())


def _same_files(model: Model, folder: Path) -> bool:
    return all((Path(model.location) / f.name).read_bytes() == (folder / f.name).read_bytes() for f in model.files)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        ("config.json README.md .gitattributes LICENSE model.safetensors", "config.json model.safetensors"),
        ("config.json model.safetensors pytorch_model.bin tf.h5 w.onnx", "config.json model.safetensors"),
        ("model.safetensors model.fp32-00001-of-00002.safetensors", "model.safetensors"),
        ("m.json model-1-of-2.safetensors model-2-of-2.safetensors consolidated.safetensors original/x.pth",
         "m.json model-1-of-2.safetensors model-2-of-2.safetensors"),
        ("config.json model.bin vocabulary.txt training_args.bin", "config.json vocabulary.txt model.bin"),
        ("chat_template.jinja merges.txt onnx/model.bin optimizer.bin", "chat_template.jinja merges.txt"),
    ],
)  # fmt: skip
def test_only_what_an_engine_reads_is_taken(names, taken):
    assert needed(names.split()) == taken.split()


def test_the_same_content_has_the_same_revision_in_a_folder_and_a_store(folder, store, cache):
    in_store = resolve(store.uri, storage=store.config, weights=cache)
    assert in_store.revision == resolve(str(folder), weights=cache).revision
    assert in_store.revision == resolve("builtin:tiny-qwen2.5-vl", weights=cache).revision


def test_a_corrupt_file_of_a_folder_is_refused_by_name(folder, cache):
    resolve(str(folder), weights=cache)
    right = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    _flip(folder / WEIGHTS)
    found = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    with pytest.raises(ConfigError) as raised:
        resolve(str(folder), weights=cache)
    assert all(word in str(raised.value) for word in (WEIGHTS, right, found))


@pytest.mark.parametrize("name", ["extra.json", WEIGHTS])
def test_a_folder_and_its_manifest_name_the_same_files(folder, cache, name):
    (folder / name).unlink() if (folder / name).exists() else (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{name} is "):
        resolve(str(folder), weights=cache)


def test_a_folder_that_differs_on_another_node_is_refused_there(folder, cache):
    (folder / "SHA256SUMS").unlink()
    model = resolve(str(folder), weights=cache)
    _flip(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is corrupt"):
        weights.local(model)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="no such file"):
        weights.local(model)


def test_another_revision_than_the_one_asked_for_is_refused(folder, store, cache):
    found = resolve(store.uri, storage=store.config, weights=cache).revision
    assert resolve(store.uri, found, store.config, cache).revision == found
    for name in (store.uri, str(folder)):
        with pytest.raises(ConfigError) as raised:
            resolve(name, "sha256-0000000000000000", store.config, cache)
        assert found in str(raised.value)
        assert "sha256-0000000000000000" in str(raised.value)


def test_a_prefix_without_a_manifest_is_refused_with_the_command_that_makes_one(store, cache):
    with pytest.raises(ConfigError, match=r"sha256sum \* > SHA256SUMS"):
        resolve(f"{store.uri}/elsewhere", storage=store.config, weights=cache)
    store.put("SHA256SUMS", b"model.safetensors 12\n")
    with pytest.raises(ConfigError, match="line 1"):
        resolve(store.uri, storage=store.config, weights=cache)


def test_a_missing_shard_is_refused_before_anything_is_downloaded(folder, cache):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    _make_manifest(folder)
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors"):
        resolve(str(folder), weights=cache)


def test_small_files_are_read_without_the_weights(store, cache):
    model = resolve(store.uri, storage=store.config, weights=cache)
    config = read_json(model, "config.json")
    assert config is not None
    assert config["model_type"] == "qwen2_5_vl"
    assert read_json(model, "nothing.json") is None
    assert store.server.num_gets(WEIGHTS) == 0
    store.put("config.json", b"{}")
    with pytest.raises(ConfigError, match=r"config\.json is corrupt"):
        read_json(model, "config.json")


def test_processes_that_start_together_download_once(store, folder, cache):
    arguments = (store.uri, "--endpoint-url", store.server.url, "--cache-dir", cache.cache_dir)
    model = resolve(store.uri, storage=store.config, weights=cache)
    with locked(Path(cache.cache_dir), str(folder_of(model))):  # until all of them want to download
        started = [_fetch(*arguments) for _ in range(3)]
        assert store.server.wait_for_gets("SHA256SUMS", 4)
    ended = [_ends(process) for process in started]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert {file.name: store.server.num_gets(file.name) for file in model.files} == {f.name: 1 for f in model.files}
    here = weights.local(model)
    assert _same_files(here, folder)
    assert store.server.num_gets(WEIGHTS) == 1


def test_progress_ends_at_the_size_of_the_model(store, cache):
    model = resolve(store.uri, storage=store.config, weights=cache)
    for _ in range(2):
        told = list(weights.fetch([model]))
        assert told == sorted(told)
        assert told[-1] == model.size_bytes


def test_a_process_killed_while_it_downloads_leaves_nothing_half_and_no_lock(store, folder, cache):
    arguments = (store.uri, "--endpoint-url", store.server.url, "--cache-dir", cache.cache_dir)
    store.server.hold_next_body(after_bytes=1 << 20)
    first = _fetch(*arguments)
    assert store.server.held.wait(60)
    first.kill()
    first.communicate()
    store.server.release.set()
    model = resolve(store.uri, storage=store.config, weights=cache)
    kept = Path(cache.cache_dir) / "models" / model.revision
    assert [path.name for path in kept.iterdir() if path.name.startswith(WEIGHTS)] == [f"{WEIGHTS}.part"]
    assert _ends(_fetch(*arguments))[0] == 0
    assert {path.name for path in kept.iterdir()} == {file.name for file in model.files}
    assert _same_files(weights.local(model), folder)


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_a_corrupt_object_is_refused_by_name_and_not_kept(store, folder, cache, damage):
    data = (folder / WEIGHTS).read_bytes()
    store.put(WEIGHTS, data[:-1000] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    process = _fetch(store.uri, "--endpoint-url", store.server.url, "--cache-dir", cache.cache_dir)
    code, _, err = _ends(process)
    assert (code, "Traceback" in err) == (2, False), err
    assert WEIGHTS in err
    assert hashlib.sha256(data).hexdigest() in err
    assert list(Path(cache.cache_dir).glob(f"models/*/{WEIGHTS}*")) == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_what_is_damaged_in_the_cache_is_downloaded_again_and_nothing_else(store, folder, cache, damage):
    model = resolve(store.uri, storage=store.config, weights=cache)
    path = Path(weights.local(model).location) / WEIGHTS
    store.server.requests.clear()
    if damage == "flipped":
        _flip(path)
    elif damage == "truncated":
        os.truncate(path, 1000)
    else:
        path.unlink()
    assert _same_files(weights.local(model), folder)
    assert store.server.num_gets(WEIGHTS) == 1
    assert store.server.num_gets("tokenizer.json") == 0


def test_a_model_that_does_not_fit_on_the_disk_is_refused_with_numbers(store, cache):
    model = resolve(store.uri, storage=store.config, weights=cache)
    huge = tuple(dataclasses.replace(file, size_bytes=10**17) for file in model.files if file.name == WEIGHTS)
    with pytest.raises(ConfigError) as raised:
        weights.local(dataclasses.replace(model, files=huge))
    assert "100,000,000,000,000,000 bytes" in str(raised.value)
    assert cache.cache_dir in str(raised.value)
    assert store.server.num_gets(WEIGHTS) == 0


def test_offline_a_store_is_not_asked(store, folder, cache):
    offline = dataclasses.replace(cache, offline=True)
    with pytest.raises(ConfigError) as raised:
        resolve(store.uri, storage=store.config, weights=offline)
    assert cache.cache_dir in str(raised.value)
    assert f"qwen-ray fetch {store.uri}" in str(raised.value)

    online = weights.local(resolve(store.uri, storage=store.config, weights=cache))
    store.server.requests.clear()
    model = resolve(store.uri, storage=store.config, weights=offline)
    assert read_json(model, "config.json") is not None
    assert _same_files(weights.local(model), folder)
    assert model.revision == online.revision
    _flip(Path(online.location) / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"{WEIGHTS} is corrupt.*offline"):
        weights.local(model)
    assert store.server.requests == []


@pytest.fixture
def hub_environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path), "QWEN_RAY_CACHE": ""}


def test_a_hub_is_asked_once_for_each_file_and_its_commit_is_the_revision(hub, folder, hub_environment):
    ended = [_ends(process) for process in [_fetch("acme/tiny", **hub_environment) for _ in range(2)]]
    assert [code for code, _, _ in ended] == [0, 0], ended
    found = json.loads(ended[0][1])
    assert found["revision"] == COMMIT
    assert set(hub.gets.values()) == {1}
    assert hub.gets.keys() == {file.name for file in resolve(str(folder)).files}
    assert (Path(found["location"]) / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", [WEIGHTS, "vocab.json"])
def test_a_corrupt_file_of_a_hub_is_refused_by_name_and_not_kept(hub, hub_environment, tmp_path, name):
    right = hub.files[name]
    hub.served[name] = right[:-1] + bytes([right[-1] ^ 1])
    code, _, err = _ends(_fetch("acme/tiny", **hub_environment))
    assert (code, "Traceback" in err) == (2, False), err
    assert f"{name} is corrupt" in err
    assert hub.etag(name) in err
    hub.served[name] = right
    code, out, err = _ends(_fetch("acme/tiny", **hub_environment))
    assert code == 0, err
    assert (Path(json.loads(out)["location"]) / name).read_bytes() == right


def test_a_file_damaged_in_the_hubs_cache_is_downloaded_again(hub, hub_environment):
    _, out, _ = _ends(_fetch("acme/tiny", **hub_environment))
    path = Path(json.loads(out)["location"]) / WEIGHTS
    _flip(path.resolve())
    assert _ends(_fetch("acme/tiny", **hub_environment))[0] == 0
    assert path.read_bytes() == hub.files[WEIGHTS]
    assert (hub.gets[WEIGHTS], hub.gets["vocab.json"]) == (2, 1)


def test_offline_a_hub_is_not_asked(folder, tmp_path):
    with serve_hub(folder) as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HOME": str(tmp_path),
            "QWEN_RAY_CACHE": "",
        }
        code, _, err = _ends(_fetch("acme/tiny", HF_HUB_OFFLINE=1, **environment))
        assert (code, str(tmp_path / "hf") in err, "qwen-ray fetch acme/tiny" in err) == (2, True, True), err
        _, online, _ = _ends(_fetch("acme/tiny", **environment))
    code, offline, err = _ends(_fetch("acme/tiny", HF_HUB_OFFLINE=1, **environment))
    assert code == 0, err
    assert offline == online
    _flip((Path(json.loads(online)["location"]) / WEIGHTS).resolve())
    code, _, err = _ends(_fetch("acme/tiny", HF_HUB_OFFLINE=1, **environment))
    assert (code, f"{WEIGHTS} is corrupt" in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("acme/other",), "no such repository"), (("acme/tiny", "--revision", "v9"), "no revision 'v9'")],
)
def test_what_a_hub_has_not_is_told(hub, hub_environment, arguments, words):
    code, _, err = _ends(_fetch(*arguments, **hub_environment))
    assert (code, words in err) == (2, True), err
