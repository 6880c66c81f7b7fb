"""`ray job submit` on a private cluster with a dashboard: a run is a job, and its exit code is the job's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest

import qwen_ray
from qwen_ray.api import SAMPLES
from tests.tables import rows

ROOT = Path(__file__).parents[2]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
FAKE = ("--preset", "tiny", "--set", "caption.engine=fake", "--set", "speech.engine=fake")


@dataclass(frozen=True)
class Dashboard:
    """Where jobs are sent, and what a process needs in its environment to send them."""

    url: str
    environment: Mapping[str, str]

    def submit(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """`ray job submit` of `python -m jobs.caption`, waited for."""
        entry = (sys.executable, "-m", "jobs.caption", *map(str, arguments))
        command = [*RAY, "job", "submit", "--address", self.url, "--", *entry]
        return subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )


@pytest.fixture(scope="module")
def dashboard() -> Iterator[Dashboard]:
    """A head node with two cores in a process group of its own, under a folder short enough for Unix sockets."""
    home = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))
    own = {"HOME": str(home), "RAY_TMPDIR": str(home), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    port, dashboard_port, agent_port = _free_ports(3)
    head = ("start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard_port}")
    more = (f"--dashboard-agent-listen-port={agent_port}", "--num-cpus=2")  # its default may be another cluster's
    with (home / "said").open("w") as said:
        process = subprocess.Popen(
            [*RAY, *head, *more], env=environment, stdout=said, stderr=said, start_new_session=True, cwd=home
        )
    try:
        url = f"http://127.0.0.1:{dashboard_port}"
        _wait_until_it_answers(f"{url}/api/jobs/", process, home / "said")
        yield Dashboard(url, environment)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # asked politely it takes half a minute
        process.wait(60)
        shutil.rmtree(home, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], said: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)


def test_a_run_is_a_job(dashboard, tmp_path):
    done = dashboard.submit(SAMPLES, tmp_path / "out", *FAKE, "--limit", "2")
    assert done.returncode == 0, done.stdout
    assert [row["status"] for row in rows(str(tmp_path / "out"), "videos")] == ["ok", "ok"]
    assert all(row["caption"] for row in rows(str(tmp_path / "out"), "clips"))
    assert rows(str(tmp_path / "out"), "segments")
    assert qwen_ray.verify(str(tmp_path / "out")) == []


def test_the_job_fails_where_the_run_does(dashboard, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    done = dashboard.submit(tmp_path / "broken.mp4", tmp_path / "out", *FAKE)
    assert done.returncode == 1, done.stdout
    (video,) = rows(str(tmp_path / "out"), "videos")
    assert (video["status"], video["num_clips"] or 0) == ("failed", 0)
    with urllib.request.urlopen(f"{dashboard.url}/api/jobs/") as answer:
        assert max(json.load(answer), key=lambda job: job["start_time"])["status"] == "FAILED"
