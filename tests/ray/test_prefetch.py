"""Weights of a run: one download per node before the engines start, and a refusal before anything is written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

import qwen_ray
from jobs.conformance.assets import x264
from jobs.conformance.recipe import render
from qwen_ray.api import plan
from qwen_ray.engines.models import builtin_folder
from qwen_ray.runner import run
from tests.s3 import S3Server, s3_server  # noqa: F401
from tests.tables import content, rows

WEIGHTS = "model.safetensors"


@pytest.fixture
def model_uri(s3_server: S3Server) -> str:  # noqa: F811
    """The tiny model with its manifest in an object store."""
    bucket, lines = s3_server.new_bucket(), []
    for path in sorted(builtin_folder("tiny-qwen2.5-vl").iterdir()):
        s3_server.put(bucket, f"tiny/{path.name}", path.read_bytes())
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    s3_server.put(bucket, "tiny/SHA256SUMS", "".join(lines).encode())
    s3_server.requests.clear()
    return f"s3://{bucket}/tiny"


@pytest.fixture
def film(tmp_path: Path) -> Path:
    path = tmp_path / "a.mp4"
    render(path, num_frames=60, size=(160, 120), video=x264())
    return path


def _settings(model_uri: str, server: S3Server, cache_dir: Path) -> list[str]:
    """Two engines of that model, and nothing else."""
    return [
        f"caption.model={model_uri}", "caption.replicas=2", "caption.max_new_tokens=4", "speech=null",
        "decode.window_s=1", f"storage.endpoint_url={server.url}", f"weights.cache_dir={cache_dir}",
    ]  # fmt: skip


def test_two_engines_start_together_with_one_download(ray_address, s3_server, model_uri, film, tmp_path):  # noqa: F811
    settings = _settings(model_uri, s3_server, tmp_path / "cache")
    job = qwen_ray.configure(str(film), str(tmp_path / "out"), preset="tiny", set=settings)
    told: list[tuple[int, int]] = []
    report = run(job, on_progress=lambda progress: told.append((progress.bytes_ready, progress.bytes_wanted)))
    assert report.clips == {"ok": 2}
    assert s3_server.num_gets(WEIGHTS) == 1
    assert told[-1][0] == told[-1][1] > (builtin_folder("tiny-qwen2.5-vl") / WEIGHTS).stat().st_size
    revision = plan(job)["models"]["caption"]["revision"]
    clips = rows(job.output, "clips")
    assert {(clip["model"], clip["model_revision"]) for clip in clips} == {(model_uri, revision)}


def test_a_corrupt_weight_file_is_refused_by_name(ray_address, s3_server, model_uri, film, tmp_path):  # noqa: F811
    data = (builtin_folder("tiny-qwen2.5-vl") / WEIGHTS).read_bytes()
    bucket = model_uri.split("/")[2]
    s3_server.put(bucket, f"tiny/{WEIGHTS}", data[:-1] + bytes([data[-1] ^ 1]))
    values = [f"--set={value}" for value in _settings(model_uri, s3_server, tmp_path / "cache")]
    arguments = ["run", film, tmp_path / "out", "--preset", "tiny", "--address", ray_address, *values]
    command = [sys.executable, "-m", "qwen_ray", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    err = " ".join(done.stderr.split())
    assert (done.returncode, "Traceback" in err) == (2, False), err
    assert f"{WEIGHTS} is corrupt" in err
    assert content(str(tmp_path / "out")) == {"videos": [], "clips": [], "segments": []}
    assert s3_server.num_gets(WEIGHTS) == 1
