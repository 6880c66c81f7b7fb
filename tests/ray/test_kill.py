"""`kill -9` of the driver with rows in flight, again and again, then the same command: the undisturbed run's tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import qwen_ray
from jobs.conformance.assets import x264
from jobs.conformance.recipe import render
from qwen_ray.config import StorageConfig
from qwen_ray.errors import QwenRayError
from qwen_ray.io.storage import open_storage
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
        render(folder / f"{number:02d}.mp4", num_frames=90, size=size, video=x264(), first=100 * number)
    return folder


class Driver:
    """`qwen-ray run` in a process group of its own."""

    def __init__(
        self, source: str, output: str, address: str, endpoint_url: str = "", settings: Sequence[str] = SETTINGS
    ) -> None:
        command = [sys.executable, "-m", "qwen_ray", "run", source, output, "--preset", "tiny", "--address", address]
        for setting in settings:
            command += ["--set", setting]
        command += ["--endpoint-url", endpoint_url] if endpoint_url else []
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=self._said, text=True
        )

    @property
    def said(self) -> str:
        """What it has written to standard error so far."""
        return os.pread(self._said.fileno(), 1 << 20, 0).decode()

    def wait(self, timeout_s: float = 120) -> int:
        """Exit code of a run that is left alone, or has been told to stop."""
        return self._process.wait(timeout_s)

    def kill_when(self, moment: Callable[[], bool]) -> bool:
        """SIGKILL the whole group at a moment; False if the run was over before it came."""
        if not self._reaches(moment):
            return False
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return True

    def stop_when(self, moment: Callable[[], bool], how: signal.Signals) -> int:
        """Send a signal to the driver alone at a moment; its exit code."""
        assert self._reaches(moment), "over before the moment came"
        self._process.send_signal(how)
        return self.wait()

    def _reaches(self, moment: Callable[[], bool], timeout_s: float = 120) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if moment():
                return True
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return False


@contextmanager
def _watched(output: str, endpoint_url: str) -> Iterator[list[dict[str, int]]]:
    """Read all three tables all the time, as readers would, and keep every look that saw an id twice."""
    bad: list[dict[str, int]] = []
    looks, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):  # Ray's workers run at a low priority: a reader without pause would starve them
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
    return len(rows(output, "videos", endpoint_url, ["video_id"]))


def _num_saved(output: str, endpoint_url: str) -> int:
    """Bytes of finished rows that wait beside the log for the rest of their video."""
    storage = open_storage(output, StorageConfig(endpoint_url=endpoint_url))
    return sum(entry.size_bytes for entry in storage.list("_commits/"))


def _survives(source: str, output: str, calm: str, address: str, endpoint_url: str = "") -> None:
    assert Driver(source, calm, address, endpoint_url).wait() == 0
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
        assert Driver(source, output, address, endpoint_url).wait() == 0
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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_commits_what_is_finished(ray_address, videos, tmp_path, how):
    source, output = str(videos), str(tmp_path / "out")
    patient = ("commit.every_s=600", *(setting for setting in SETTINGS if "every_s" not in setting))
    driver = Driver(source, output, ray_address, settings=patient)  # commits nothing by itself before it is done
    assert driver.stop_when(lambda: "running" in driver.said, how) == 130, driver.said
    assert "Traceback" not in driver.said
    assert "same command" in driver.said
    committed = _num_videos(output, "")
    assert committed + _num_saved(output, "") > 0
    assert committed < NUM_VIDEOS
    assert Driver(source, output, ray_address).wait() == 0
    assert _num_videos(output, "") == NUM_VIDEOS
    assert qwen_ray.verify(output) == []
