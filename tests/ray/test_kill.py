"""`kill -9` of the driver with rows in flight, again and again, then the same command: the undisturbed run's tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import qwen_ray
from qwen_ray.config import StorageConfig
from qwen_ray.errors import QwenRayError
from qwen_ray.io.storage import open_storage
from tests.media import encode, x264
from tests.s3 import S3Server, s3_server  # noqa: F401
from tests.tables import content, duplicates, rows

NUM_VIDEOS, NUM_CLIPS = 40, 6
NUM_KILLS = 10
SETTINGS = ("caption.engine=fake", "speech=null", "decode.window_s=0.5", "commit.every_s=0.3", "commit.lease_ttl_s=5")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small videos of six clips each, every clip different from every other."""
    folder = tmp_path_factory.mktemp("videos")
    for number in range(NUM_VIDEOS):
        size = (160, 120)
        encode(folder / f"{number:02d}.mp4", num_frames=90, size=size, video=x264(), first=100 * number)
    return folder


class Driver:
    """`qwen-ray run` in a process group of its own."""

    def __init__(self, source: str, output: str, address: str, endpoint_url: str) -> None:
        command = [sys.executable, "-m", "qwen_ray", "run", source, output, "--preset", "tiny"]
        for setting in SETTINGS:
            command += ["--set", setting]
        command += ["--address", address] if address else []
        command += ["--endpoint-url", endpoint_url] if endpoint_url else []
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def wait(self, timeout_s: float = 120) -> int:
        """Exit code of a run that is left alone."""
        _, said = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0, said[-2000:]
        return self._process.returncode

    def kill_when(self, moment: Callable[[], bool], timeout_s: float = 120) -> bool:
        """SIGKILL the whole group at a moment; False if the run was over before it came."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            if moment():
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.communicate()
                return True
            time.sleep(0.01)
        assert self._process.poll() is not None, "the moment never came"
        self._process.communicate()
        return False


@contextmanager
def _watched(output: str, endpoint_url: str) -> Iterator[list[dict[str, int]]]:
    """Read all three tables without pause, as a reader would, and keep every look that saw an id twice."""
    bad: list[dict[str, int]] = []
    looks, over = [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            with suppress(QwenRayError):  # a moto server drops a connection now and then under this load
                found = duplicates(output, endpoint_url)
                looks[0] += 1
                if any(found.values()):
                    bad.append(found)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield bad
    finally:
        over.set()
        thread.join()
    assert looks[0] > 50


def _num_videos(output: str, endpoint_url: str) -> int:
    return len(rows(output, "videos", endpoint_url))


def _num_saved(output: str, endpoint_url: str) -> int:
    """Bytes of finished rows that wait beside the log for the rest of their video."""
    storage = open_storage(output, StorageConfig(endpoint_url=endpoint_url))
    return sum(entry.size_bytes for entry in storage.list("_commits/"))


def _survives(source: str, output: str, calm: str, address: str, endpoint_url: str = "") -> None:
    Driver(source, calm, address, endpoint_url).wait()
    kills = 0
    with _watched(output, endpoint_url) as bad:
        for attempt in range(4 * NUM_KILLS):
            start = _num_videos(output, endpoint_url)
            if kills == NUM_KILLS or start == NUM_VIDEOS:
                break
            driver = Driver(source, output, address, endpoint_url)
            more = attempt % 4  # kill before, right after, and some commits after the first one of this driver

            def moment(start: int = start, more: int = more) -> bool:
                if more == 0:
                    return _num_saved(output, endpoint_url) > 0
                return _num_videos(output, endpoint_url) >= start + more

            killed = driver.kill_when(moment)
            kills += killed and _num_videos(output, endpoint_url) < NUM_VIDEOS
        Driver(source, output, address, endpoint_url).wait()
    assert bad == []
    assert kills >= NUM_KILLS
    expected = content(calm, endpoint_url)
    assert content(output, endpoint_url) == expected
    assert (len(expected["videos"]), len(expected["clips"])) == (NUM_VIDEOS, NUM_VIDEOS * NUM_CLIPS)
    assert qwen_ray.verify(output, endpoint_url=endpoint_url) == []


@pytest.mark.timeout(600)
def test_ten_kills_on_local_disk(ray_address, videos, tmp_path):
    _survives(str(videos), str(tmp_path / "out"), str(tmp_path / "calm"), ray_address)


@pytest.mark.timeout(600)
def test_ten_kills_on_s3(ray_address, videos, s3_server: S3Server):  # noqa: F811
    import boto3

    bucket = s3_server.new_bucket()
    client = boto3.client("s3", endpoint_url=s3_server.url)
    for path in videos.iterdir():
        client.upload_file(str(path), bucket, f"in/{path.name}")
    root = f"s3://{bucket}"
    _survives(f"{root}/in/", f"{root}/out", f"{root}/calm", ray_address, s3_server.url)
