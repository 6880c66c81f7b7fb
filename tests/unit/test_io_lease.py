"""Who may write: takeovers, heartbeats, and what becomes of those who come too late."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qwen_ray.config import StorageConfig
from qwen_ray.errors import ConfigError, LeaseHeldError, LeaseLostError, TransientError
from qwen_ray.io import lease as lease_module
from qwen_ray.io.lease import LEASE, Lease, read_lease, record_key
from qwen_ray.io.storage import Conflict, Storage, open_storage

if TYPE_CHECKING:
    from tests.s3 import S3Server

pytest_plugins = ("tests.s3",)
LONG = 3600.0


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "out"), StorageConfig())
    server: S3Server = request.getfixturevalue("s3_server")
    return open_storage(f"s3://{server.new_bucket()}/out", server.config)


@pytest.fixture
def disk(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"), StorageConfig())


def _fences(storage: Storage) -> list[str]:
    return [entry.key for entry in storage.list("_commits/") if not entry.size_bytes]


def test_one_after_the_other(storage: Storage) -> None:
    for epoch in (1, 2, 3):
        with Lease.acquire(storage, f"run-{epoch}", LONG) as lease:
            assert lease.epoch == epoch
            lease.advance(1)
            lease.settle()
    assert _fences(storage) == []
    found = read_lease(storage)
    assert found
    assert found[0].released


def test_a_living_holder_is_named(storage: Storage) -> None:
    with Lease.acquire(storage, "run-a", LONG), pytest.raises(LeaseHeldError) as caught:
        Lease.acquire(storage, "run-b", LONG)
    for part in ("run-a", f"process {os.getpid()}", "heartbeat", "s ago", storage.uri):
        assert part in str(caught.value)


def test_a_newcomer_in_a_hurry_waits_as_long_as_the_holder_asks(disk: Storage) -> None:
    with Lease.acquire(disk, "patient", LONG) as lease:
        lease.stop_heartbeat()
        time.sleep(0.3)
        with pytest.raises(LeaseHeldError, match="patient"):
            Lease.acquire(disk, "hasty", 0.1)


def test_many_at_once(storage: Storage) -> None:
    barrier = threading.Barrier(5)

    def attempt(index: int) -> Lease | None:
        barrier.wait()
        try:
            return Lease.acquire(storage, f"run-{index}", LONG)
        except LeaseHeldError:
            return None

    with ThreadPoolExecutor(5) as pool:
        leases = [lease for lease in pool.map(attempt, range(5)) if lease]
    assert len(leases) == 1
    leases[0].release()


def test_heartbeat_keeps_it_and_silence_loses_it(storage: Storage) -> None:
    ttl_s = 2.0 if storage.uri.startswith("s3:") else 0.6  # S3 tells times in whole seconds
    first = Lease.acquire(storage, "first", ttl_s)
    deadline = time.monotonic() + 1.5 * ttl_s
    while time.monotonic() < deadline:
        with pytest.raises(LeaseHeldError):
            Lease.acquire(storage, "second", ttl_s)
        time.sleep(0.1)
    first.advance(7)
    first.stop_heartbeat()
    time.sleep(ttl_s + (1.1 if storage.uri.startswith("s3:") else 0.1))
    second = Lease.acquire(storage, "second", ttl_s)
    assert second.epoch == 2
    assert _fences(storage) == [record_key(1, 7)]
    for act in (first.renew, lambda: first.advance(8)):
        with pytest.raises(LeaseLostError, match=r"second|does not hold"):
            act()
    assert first.lost.is_set()
    first.release()
    assert not second.lost.is_set()
    second.release()


def test_the_heartbeat_itself_notices(disk: Storage) -> None:
    lease = Lease.acquire(disk, "first", 0.2)
    found = read_lease(disk)
    assert found
    stolen = json.dumps(dataclasses.asdict(dataclasses.replace(found[0], token="x", run_id="thief"))).encode()
    disk.write(LEASE, stolen)
    assert lease.lost.wait(5)
    lease.release()
    assert disk.read(LEASE).data == stolen


def test_a_holder_that_never_wrote_needs_no_fence(disk: Storage) -> None:
    first = Lease.acquire(disk, "first", LONG)
    first.stop_heartbeat()
    second = Lease.acquire(_aged(disk), "second", LONG)
    assert _fences(disk) == []
    second.release()


def test_a_record_on_its_way_is_fenced_even_after_release(disk: Storage) -> None:
    """The PUT of a commit was not answered, the run gave up and left: the PUT may still arrive."""
    first = Lease.acquire(disk, "first", LONG)
    first.advance(3)
    first.release()
    Lease.acquire(disk, "second", LONG).release()
    with pytest.raises(Conflict):
        disk.write_new(record_key(1, 3), b"late")


def test_fences_are_inherited(disk: Storage) -> None:
    """Two holders die in a row, the second before it has fenced off the first."""
    first = Lease.acquire(disk, "first", LONG)
    first.advance(5)
    first.stop_heartbeat()

    class DiesAtFence:
        def __getattr__(self, name: str) -> object:
            return getattr(_aged(disk), name)

        def write_new(self, key: str, data: bytes) -> str:
            raise TransientError("storage", "dead")

    with pytest.raises(TransientError):
        Lease.acquire(DiesAtFence(), "second", LONG)  # type: ignore[arg-type]
    assert _fences(disk) == []
    third = Lease.acquire(_aged(disk), "third", LONG)
    assert third.epoch == 3
    assert _fences(disk) == [record_key(1, 5)]
    found = read_lease(disk)
    assert found
    assert found[0].fences == ()
    third.release()


def test_a_lost_answer_does_not_lose_the_lease(disk: Storage) -> None:
    class LosesAnswers:
        broken = False

        def __getattr__(self, name: str) -> object:
            return getattr(disk, name)

        def write_if(self, key: str, data: bytes, etag: str) -> str:
            written = disk.write_if(key, data, etag)
            if self.broken:
                self.broken = False
                raise TransientError("storage", "no answer")
            return written

    storage = LosesAnswers()
    lease = Lease.acquire(storage, "first", LONG)  # type: ignore[arg-type]
    storage.broken = True
    with pytest.raises(TransientError):
        lease.advance(1)
    lease.advance(1)
    assert not lease.lost.is_set()
    lease.release()


def test_deleted_lease_is_lost(disk: Storage) -> None:
    lease = Lease.acquire(disk, "first", LONG)
    disk.delete(LEASE)
    with pytest.raises(LeaseLostError, match="deleted"):
        lease.renew()
    lease.release()


def test_an_exception_gives_it_back(disk: Storage) -> None:
    with pytest.raises(ZeroDivisionError), Lease.acquire(disk, "first", LONG):
        _ = 1 / 0
    Lease.acquire(disk, "second", LONG).release()


def test_release_twice_and_write_after(disk: Storage) -> None:
    lease = Lease.acquire(disk, "first", LONG)
    lease.release()
    lease.release()
    with pytest.raises(LeaseLostError):
        lease.advance(1)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"fences": 3}'])
def test_what_is_no_lease(disk: Storage, content: bytes) -> None:
    disk.write(LEASE, content)
    with pytest.raises(ConfigError, match="not a lease"):
        Lease.acquire(disk, "first", LONG)


HOLD = """
import sys, time
from qwen_ray.config import StorageConfig
from qwen_ray.io.lease import Lease
from qwen_ray.io.storage import open_storage
lease = Lease.acquire(open_storage(sys.argv[1], StorageConfig()), "child", 3600.0)
lease.advance(2)
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_process_on_this_machine_is_dead_at_once(disk: Storage) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD, disk.uri], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LeaseHeldError, match=f"process {child.pid}"):
            Lease.acquire(disk, "second", LONG)
        os.kill(child.pid, signal.SIGSTOP)  # stopped is not dead
        with pytest.raises(LeaseHeldError):
            Lease.acquire(disk, "second", LONG)
        os.kill(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while lease_module._process_start(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        with Lease.acquire(
            disk, "second", LONG
        ) as lease:  # before anyone has waited for the child: remains are no life
            assert lease.epoch == 2
            assert _fences(disk) == [record_key(1, 2)]
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"machine": "another boot"}, {"machine": ""}])
def test_a_process_elsewhere_is_given_its_time(disk: Storage, change: dict[str, str]) -> None:
    Lease.acquire(disk, "first", LONG).stop_heartbeat()
    found = read_lease(disk)
    assert found
    dead = dataclasses.replace(found[0], pid=2**22 + 1, **change)  # type: ignore[arg-type]
    disk.write(LEASE, json.dumps(dataclasses.asdict(dead)).encode())
    with pytest.raises(LeaseHeldError):
        Lease.acquire(disk, "second", LONG)


def test_a_reused_process_id_is_another_process(disk: Storage) -> None:
    Lease.acquire(disk, "first", LONG).stop_heartbeat()
    found = read_lease(disk)
    assert found
    disk.write(LEASE, json.dumps(dataclasses.asdict(dataclasses.replace(found[0], process_start="1"))).encode())
    Lease.acquire(disk, "second", LONG).release()


class _Aged:
    """A store in which every object is very old, so that every holder counts as dead."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def age_s(self, key: str) -> float:
        return 1e9


def _aged(storage: Storage) -> Storage:
    return _Aged(storage)  # type: ignore[return-value]
