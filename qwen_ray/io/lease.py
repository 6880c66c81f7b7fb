"""Who may write: one object, `_runs/_lease.json`, that changes hands only by conditional writes.

A lease alone cannot stop a writer that was paused (a suspended laptop, a node out of contact) and goes on after another
has taken over. So a holder announces the number of its next commit record before writing it, and whoever takes over
puts an empty object (the fence) under exactly that name: the late writer's create-only PUT is refused, and it stops.
The alternative, comparing clocks at each commit, leaves a gap between the look at the clock and the write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from qwen_ray.errors import ConfigError, LeaseHeldError, LeaseLostError, TransientError
from qwen_ray.io.objects import Conflict, NotFound, Storage

LEASE = "_runs/_lease.json"
_TRIES = 8


def record_key(epoch: int, seq: int) -> str:
    """Key of a holder's `seq`-th commit record. Keys sort in the order of commits."""
    return f"_commits/{epoch:08d}-{seq:08d}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The content of the lease: who holds the output, since when heard of, and what it may be about to write."""

    epoch: int
    run_id: str
    token: str
    """Tells this holder from any other, for reading back after an answer was lost."""
    host: str
    machine: str
    """Boot and process namespace; process ids mean something only between equal ones. Empty: not known."""
    pid: int
    process_start: str
    heartbeat_at: float
    ttl_s: float = 0.0
    """Silence after which it wants to be taken for dead."""
    next_seq: int = 0
    """The record that may be on its way; 0 for none yet."""
    released: bool = False
    settled: bool = False
    """Whether that record has certainly arrived."""
    fences: tuple[tuple[int, int], ...] = ()
    """Records of earlier holders that this one has still to fence."""

    def describe(self, age_s: float) -> str:
        return f"run {self.run_id} on {self.host} (process {self.pid}, last heartbeat {age_s:.0f} s ago)"


class Lease:
    """The right to write to an output, kept alive by a thread until it is released.

    Lost: another has taken over. Every method that writes then raises LeaseLostError, and `lost` is set.
    """

    def __init__(self, storage: Storage, state: Holder, etag: str, ttl_s: float) -> None:
        self.lost = threading.Event()
        self._storage, self._state, self._etag, self._ttl_s = storage, state, etag, ttl_s
        self._settled = True
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    @classmethod
    def acquire(cls, storage: Storage, run_id: str, ttl_s: float) -> Lease:
        """Take the lease if it is free, given back, or its holder is dead.

        A holder is dead when its heartbeat is older than `ttl_s`, or at once when it ran on this very machine and its
        process is gone.

        Raises:
            LeaseHeldError: another run holds it; says which, where, and when it was last heard of.
        """
        for _ in range(_TRIES):
            try:
                lease = cls._take(storage, run_id, ttl_s)
            except Conflict:  # another was quicker, or the holder is alive after all: look again
                time.sleep(random.uniform(0.01, 0.1))
                continue
            lease._fence()
            lease._thread.start()
            return lease
        raise LeaseHeldError(f"output {storage.uri}: several runs are trying to take it at this moment")

    @classmethod
    def _take(cls, storage: Storage, run_id: str, ttl_s: float) -> Lease:
        found = read_lease(storage)
        if found is None:
            state = _new_holder(run_id, 1, (), ttl_s)
            return cls(storage, state, storage.write_new(LEASE, _encode(state)), ttl_s)
        old, etag = found
        _check_free(storage, old, ttl_s)
        fences = old.fences if old.settled or not old.next_seq else (*old.fences, (old.epoch, old.next_seq))
        state = _new_holder(run_id, old.epoch + 1, fences, ttl_s)
        return cls(storage, state, storage.write_if(LEASE, _encode(state), etag), ttl_s)

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def run_id(self) -> str:
        return self._state.run_id

    def advance(self, next_seq: int) -> None:
        """Announce the record that is going to be written. Raises LeaseLostError."""
        self._settled = False
        self._renew(next_seq=next_seq)

    def settle(self) -> None:
        """The announced record has arrived: should this holder leave now, nothing of it is still on its way."""
        self._settled = True

    def renew(self) -> None:
        """Make sure, now, that this is still the holder. Raises LeaseLostError."""
        self._renew()

    def release(self) -> None:
        """Give the output back. Does nothing when it is lost or given back already."""
        self.stop_heartbeat()
        if not self.lost.is_set() and not self._state.released:
            try:
                self._renew(released=True, settled=self._settled)
            except LeaseLostError:
                return

    def stop_heartbeat(self) -> None:
        """From here on the lease grows old, as if this process had died."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except (TransientError, ConfigError):
            if error is None:
                raise  # else the store failed before, and that error tells more; the lease runs out by itself

    def _beat(self) -> None:
        while not self._stop.wait(self._ttl_s / 4):
            try:
                self._renew()
            except LeaseLostError:
                return
            except (TransientError, ConfigError):
                continue  # the next one may get through; the writer meets the same failure where it can be reported

    def _renew(self, **changes: Any) -> None:
        with self._mutex:
            if self.lost.is_set() or self._state.released:
                raise LeaseLostError(f"output {self._storage.uri}: run {self.run_id} does not hold it any more")
            state = dataclasses.replace(self._state, heartbeat_at=time.time(), **changes)
            try:
                etag = self._storage.write_if(LEASE, _encode(state), self._etag)
            except Conflict:
                etag = self._write_over_own(state)
            self._state, self._etag = state, etag

    def _write_over_own(self, state: Holder) -> str:
        """The lease is not as we know it: an own write whose answer was lost, or another holder."""
        found = read_lease(self._storage)
        if found is not None and found[0].token == state.token:
            try:
                return self._storage.write_if(LEASE, _encode(state), found[1])
            except Conflict:
                found = read_lease(self._storage)
        self.lost.set()
        by = f"run {found[0].run_id} on {found[0].host}" if found else "somebody who deleted the lease"
        raise LeaseLostError(f"output {self._storage.uri}: run {self.run_id} lost it to {by}")

    def _fence(self) -> None:
        """Shut out the holders before. The list outlives a death halfway: the next holder inherits it."""
        if not self._state.fences:
            return
        for epoch, seq in self._state.fences:
            try:
                self._storage.write_new(record_key(epoch, seq), b"")
            except Conflict:
                continue  # the record arrived (and is replayed), or it is fenced already
        self._renew(fences=())


def read_lease(storage: Storage) -> tuple[Holder, str] | None:
    """The lease as it stands, with its etag; None where no run ever was. Raises ConfigError if it is not a lease."""
    try:
        found = storage.read(LEASE)
    except NotFound:
        return None
    try:
        values = json.loads(found.data)
        fences = tuple((int(epoch), int(seq)) for epoch, seq in values.pop("fences"))
        return Holder(**values, fences=fences), found.etag
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{storage.uri}/{LEASE} is not a lease: {error}; if no run is active, delete it") from error


def _check_free(storage: Storage, holder: Holder, ttl_s: float) -> None:
    if holder.released or _is_gone(holder):
        return
    try:
        age_s = storage.age_s(LEASE)
    except NotFound:
        raise Conflict(LEASE) from None
    patience_s = max(ttl_s, holder.ttl_s)  # a newcomer in a hurry must not call a holder dead that beats more slowly
    if age_s <= patience_s:
        raise LeaseHeldError(
            f"output {storage.uri} is held by {holder.describe(age_s)}; it counts as dead after {patience_s:.0f} s"
        )


def _encode(state: Holder) -> bytes:
    return json.dumps(dataclasses.asdict(state), indent=1).encode()


def _new_holder(run_id: str, epoch: int, fences: tuple[tuple[int, int], ...], ttl_s: float) -> Holder:
    return Holder(
        epoch=epoch,
        run_id=run_id,
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        heartbeat_at=time.time(),
        ttl_s=ttl_s,
        fences=fences,
    )


def _is_gone(holder: Holder) -> bool:
    """Whether the holder's process is provably dead: same boot, same process namespace, and no such process."""
    if not holder.machine or (holder.host, holder.machine) != (socket.gethostname(), _machine()):
        return False
    return _process_start(holder.pid) != holder.process_start


def _machine() -> str:
    """Two containers may share host name and boot; their process ids are still each their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
