"""The Kubernetes manifests against KubeRay's own schemas, as the API server reads them, and against this package."""

from __future__ import annotations

import functools
import gzip
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement

from jobs import caption
from qwen_ray import api

ROOT = Path(__file__).parents[2]
CRDS = {"RayJob": "ray.io_rayjobs.yaml.gz", "RayCronJob": "ray.io_raycronjobs.yaml.gz"}
JOB = yaml.safe_load((ROOT / "cluster/rayjob.yaml").read_text())
CRON_JOB = yaml.safe_load((ROOT / "cluster/raycronjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
PODS = [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema that refuses fields it does not list, as `kubectl create` does."""
    closed = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            closed[key] = _strict(schema[key])
    if "properties" in schema:
        closed["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed


@functools.cache
def _crd(kind: str) -> dict[str, Any]:
    packed = (ROOT / "tests/fixtures/kuberay" / CRDS[kind]).read_bytes()
    return yaml.safe_load(gzip.decompress(packed))


def _errors(manifest: dict[str, Any]) -> list[str]:
    crd = _crd(manifest["kind"])
    group, _, version = manifest["apiVersion"].partition("/")
    assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, manifest["kind"])
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == version)
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(_strict(schema)).iter_errors(manifest)
    ]


def _gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


@pytest.mark.parametrize("manifest", [JOB, CRON_JOB], ids=lambda manifest: manifest["kind"])
def test_kuberay_accepts_it(manifest):
    assert _errors(manifest) == []


@pytest.mark.parametrize(
    ("right", "wrong", "path"),
    [
        ("shutdownAfterJobFinishes", "shutdownAfterJobFinish", "$.spec"),
        ("rayStartParams", "rayStartParam", "$.spec.rayClusterSpec.headGroupSpec"),
        ("sizeLimit", "limit", "$.spec.rayClusterSpec.headGroupSpec.template.spec.volumes[0].emptyDir"),
        ("backoffLimit: 2", "backoffLimit: two", "$.spec.backoffLimit"),
    ],
)
def test_kuberay_refuses_what_is_misspelt(right, wrong, path):
    text = (ROOT / "cluster/rayjob.yaml").read_text().replace(right, wrong)
    errors = _errors(yaml.safe_load(text))
    assert any(error.startswith(f"{path}: ") and wrong.split()[-1] in error for error in errors), errors


def test_the_nightly_run_is_the_same_run():
    assert CRON_JOB["spec"]["jobTemplate"] == JOB["spec"]


def test_the_entrypoint_is_one_that_the_job_understands():
    python, flag, module, *arguments = shlex.split(JOB["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", caption.__name__)
    values = typer.main.get_command(caption.app).make_context("caption", arguments).params
    job = api.configure(values["input"], values["output"], preset=values["preset"], set=values["set"] or [])
    assert job.input.startswith("s3://")
    assert job.output.startswith("s3://")


def test_every_place_names_one_version_of_ray_and_of_python():
    ray = CLUSTER["rayVersion"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / "cluster/Dockerfile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["cluster"])]
    assert arguments["RAY_VERSION"] == ray
    assert f"ray=={ray}" in (ROOT / "constraints-cpu.txt").read_text().split()
    assert all(ray in one.specifier for one in wanted if one.name == "ray")
    assert arguments["PYTHON_VERSION"] in Requirement(f"python{project['requires-python']}").specifier


def test_every_pod_has_the_image_the_secrets_the_weights_and_shared_memory():
    for pod in PODS:
        (container,) = pod["containers"]
        cache = {entry["name"]: entry["value"] for entry in container["env"]}["QWEN_RAY_CACHE"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert container["image"] == PODS[0]["containers"][0]["image"]
        assert container["envFrom"] == PODS[0]["containers"][0]["envFrom"]
        assert "persistentVolumeClaim" in volumes[mounts[cache]]
        shared = volumes[mounts["/dev/shm"]]["emptyDir"]
        assert shared["medium"] == "Memory"
        # Ray takes 30 % of the memory for its object store, and goes to disk where /dev/shm has less
        assert _gibibytes(shared["sizeLimit"]) >= 0.3 * _gibibytes(container["resources"]["limits"]["memory"])


def test_the_container_builds_from_files_that_are_there():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignore if line.startswith("!")]
    assert "*" in ignore
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "README.md", "qwen_ray", f"{caption.__name__.replace('.', '/')}.py"} <= set(kept)
