"""The decoding process: `python -m qwen_ray.media.child FD MEMORY_BYTES`, started by `isolate.Decoder`.

It answers each request that comes over the socket FD with its events, and ends when the other side is gone. Any other
exception ends it with exit code 1 and a traceback, which the other side reports as a bug.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qwen_ray import children, wire, work
from qwen_ray.errors import RowError
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import DecodeRequest
from qwen_ray.media.isolate import out_of_memory

BEAT_S = 0.5
"""Seconds between two signs of life; each is the message None."""

LOG_BYTES = 16 << 20
"""Most that libraries may write to the log, beside its stacks the only file that this process writes."""


def main() -> None:
    """Serve requests until the parent goes away."""
    faulthandler.enable()
    work.show_stacks()
    memory_bytes = int(sys.argv[2])
    _bound_ourselves(memory_bytes)
    sock = socket.socket(fileno=int(sys.argv[1]))
    children.end_with_parent(sock.fileno())  # even in the middle of a decode, and with an ffmpeg started for it
    beat = _every(BEAT_S, lambda: wire.send(sock, None))
    while True:
        try:
            request = wire.receive(sock)
        except EOFError:
            return
        _answer(sock, request, beat, memory_bytes)
        gc.collect()  # PyAV's frame and its side data hold each other, which keeps a decoder's buffers: 10 MB a file


def _bound_ourselves(memory_bytes: int) -> None:
    """What this process may take, so that a file can exhaust neither the machine's memory nor its disk.

    Memory is bounded by RLIMIT_DATA: all private writable memory, native decoders' included. Measured from 160x120 to
    8K (H.264, HEVC 10 bit, AV1) it lies 40 to 85 MB above what is resident of it, 110 MB at rest and 1.0 GB at most.
    RLIMIT_AS counts 325 MB of mapped libraries on top, which grow with every library and cost nothing.
    """
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))
    with contextlib.suppress(OSError):  # the first to go when the machine runs out of memory
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer(sock: socket.socket, request: DecodeRequest, beat: Callable[[], None], memory_bytes: int) -> None:
    try:
        for event in decode_events(request, beat):
            wire.send(sock, event)
    except RowError as error:
        wire.send(sock, error)
    except MemoryError:
        wire.send(sock, out_of_memory(Path(request.path).name, memory_bytes))


def _every(period_s: float, act: Callable[[], None]) -> Callable[[], None]:
    """`act`, but at most once per `period_s`."""
    last = time.monotonic()

    def maybe() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= period_s:
            last = now
            act()

    return maybe


if __name__ == "__main__":
    main()
