"""Which requests an engine is working on, in memory that its process shares and that outlives it.

One `pwrite` replaces the whole record: what it wrote is in the kernel, whatever ends the process in the next instant.
The record holds two steps: a GPU is still at one when the next is sent off, and then fails of the earlier.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Sequence

HEAD = struct.Struct("!II")
"""Bytes of the record, their CRC-32."""


class Journal:
    """Writes the record; used by the engine's process. Called from the engine's thread and from the one that reads."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self._steps: list[str] = []
        self._last_step: list[str] = []
        self._arriving: list[str] = []
        self._at_s = 0.0
        self._closed = False

    def step(self, keys: Sequence[str]) -> None:
        """The engine is about to work on the requests of these keys, perhaps still on those of the step before."""
        with self._lock:
            self._steps, self._last_step = [*self._last_step, *keys], list(keys)
            self._at_s = time.monotonic()
            self._write()

    def arriving(self, *keys: str) -> None:
        """The request of this key is being handed to the engine; without one, none is."""
        with self._lock:
            self._arriving = list(keys)
            self._write()

    def close(self) -> None:
        """Leave the record as it is: the engine is broken, and what it does from now on tells nothing."""
        with self._lock:
            self._closed = True

    def _write(self) -> None:
        if self._closed:
            return
        body = json.dumps([self._at_s, self._steps + self._arriving]).encode()
        os.pwrite(self._fd, HEAD.pack(len(body), zlib.crc32(body)) + body, 0)


def read(fd: int) -> tuple[float, frozenset[str]]:
    """When the last step began, by `time.monotonic`, and the keys in work; 0 and none where no record is whole."""
    for _ in range(3):  # a record that is being written is whole the next time
        record = os.pread(fd, os.fstat(fd).st_size, 0)
        size, checksum = HEAD.unpack(record[: HEAD.size].ljust(HEAD.size, b"\0"))
        body = record[HEAD.size : HEAD.size + size]
        if body and zlib.crc32(body) == checksum:
            at_s, keys = json.loads(body)
            return at_s, frozenset(keys)
    return 0.0, frozenset()
