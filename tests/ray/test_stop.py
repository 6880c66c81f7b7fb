"""What ends a run, or a piece of it, before its time: stalls, budgets, GPUs that do not come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import qwen_ray
from jobs.conformance.assets import x264
from jobs.conformance.recipe import render
from qwen_ray.config import StorageConfig
from qwen_ray.errors import ConfigError
from qwen_ray.io.storage import open_storage
from tests.s3 import S3Server, s3_server  # noqa: F401
from tests.tables import rows

FAKE = ("caption.engine=fake", "speech=null", "decode.window_s=1")


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of a second."""
    path = tmp_path_factory.mktemp("film") / "a.mp4"
    render(path, num_frames=60, size=(160, 120), video=x264(), first=1)
    return path


def test_a_download_that_hangs_is_named_ended_and_tried_again(ray_address, s3_server: S3Server, film):  # noqa: F811
    bucket = s3_server.new_bucket()
    s3_server.put(bucket, "in/a.mp4", film.read_bytes())
    output = f"s3://{bucket}/out"
    settings = [*FAKE, f"storage.endpoint_url={s3_server.url}", "stall_s=3"]
    job = qwen_ray.configure(f"s3://{bucket}/in/", output, preset="tiny", set=settings)
    s3_server.hold_next_body(after_bytes=5_000)

    def on_progress(progress: qwen_ray.Progress) -> None:
        if progress.notes:
            s3_server.release.set()  # it answers one request at a time

    report = qwen_ray.run(job, on_progress=on_progress)

    assert report.videos == {"ok": 1}
    (stall,) = report.stalls
    assert "stage decode was stuck, 1 rows" in stall
    assert f"s3://{bucket}/in/a.mp4" in stall
    storage = open_storage(output, StorageConfig(endpoint_url=s3_server.url))
    stacks = storage.read(f"_runs/{report.run_id}/stall-1.txt").data.decode()
    assert "in download" in stacks  # s3.py, where it hung
    assert qwen_ray.verify(output, endpoint_url=s3_server.url) == []


def test_a_run_whose_time_is_up_stops_and_goes_on_later(ray_address, tmp_path):
    (tmp_path / "in").mkdir()
    for name in "abcdefgh":
        render(tmp_path / "in" / f"{name}.mp4", num_frames=60, size=(160, 120), video=x264(), first=ord(name))
    settings = [*FAKE, "budget.gpu_hour_price=2", "budget.cpu_hour_price=360"]
    arguments = (str(tmp_path / "in"), str(tmp_path / "out"))
    short = qwen_ray.configure(*arguments, preset="tiny", set=[*settings, "budget.max_hours=0.0001"])
    report = qwen_ray.run(short)
    assert (report.exit_code, report.finished) == (3, False)
    assert "max_hours" in report.stopped
    cheap = qwen_ray.configure(*arguments, preset="tiny", set=[*settings, "budget.max_cost=0.05"])
    report = qwen_ray.run(cheap)
    assert report.exit_code == 3
    assert "budget.max_cost" in report.stopped
    assert report.cost >= 0.05
    assert report.cost == pytest.approx(2 * 0.1 * report.elapsed_s, rel=0.5)  # two cores at 360 an hour
    assert qwen_ray.verify(short.output) == []
    report = qwen_ray.run(qwen_ray.configure(*arguments, preset="tiny", set=settings))
    assert (report.exit_code, report.stopped, report.finished) == (0, "", True)
    assert len(rows(short.output, "clips")) == 16


GROWING = """
import json, os, sys
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
import ray, qwen_ray
from ray.cluster_utils import Cluster
source, output, cards, result = sys.argv[1:]
cluster = Cluster()
cluster.add_node(num_cpus=2, num_gpus=0)
ray.init(cluster.address, log_to_driver=False)

def job(**values):
    settings = ["caption.engine=fake", f"caption.model=card:{cards}", "caption.num_gpus=1", "speech=null"]
    return qwen_ray.configure(source, output, preset="tiny", set=[*settings, *(f"{k}={v}" for k, v in values.items())])

def grow(progress):
    if progress.phase.startswith("waiting for GPUs (0 of 2)") and len(cluster.list_all_nodes()) == 1:
        cluster.add_node(num_cpus=2, num_gpus=2)  # as an autoscaler does that has been asked

found = {}
try:
    qwen_ray.run(job(gpus=2, gpus_wait_s=1))
except qwen_ray.ConfigError as error:
    found["error"] = str(error)
found["videos"] = qwen_ray.run(job(gpus=2, gpus_wait_s=60), on_progress=grow).videos
found["cards"] = sorted(open(f"{cards}/{name}").read() for name in os.listdir(cards))
with open(result, "w") as file:
    json.dump(found, file)
ray.shutdown()
cluster.shutdown()
"""


def test_a_run_waits_for_gpus_that_are_on_their_way(tmp_path, film):
    cards, result = tmp_path / "cards", tmp_path / "result.json"
    cards.mkdir()
    arguments = [str(film), str(tmp_path / "out"), str(cards), str(result)]
    done = subprocess.run([sys.executable, "-c", GROWING, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(result.read_text())
    assert "gpus = 2: the cluster has 0" in found["error"]
    assert found["videos"] == {"ok": 1}
    assert found["cards"] == ["0", "1"]  # the pool is as large as what came


def test_a_bound_on_cost_needs_a_price():
    with pytest.raises(ConfigError, match=r"budget.max_cost.*gpu_hour_price"):
        qwen_ray.configure("in", "out", preset="tiny", set=["budget.max_cost=5"])
