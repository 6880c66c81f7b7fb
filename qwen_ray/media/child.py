"""The decoding process: `python -m qwen_ray.media.child FD [MEMORY_BYTES]`, started by `isolate.Decoder`.

It answers each request that comes over the socket FD with its events, and ends when the other side is gone. Any other
exception ends it with exit code 1 and a traceback, which the other side reports as a bug.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from qwen_ray.errors import ResourceError, RowError
from qwen_ray.media import wire
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import DecodeRequest

BEAT_S = 0.5
"""Seconds between two signs of life; each is the message None."""


def main() -> None:
    """Serve requests until the parent goes away."""
    faulthandler.enable()
    if len(sys.argv) > 2:
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(sock.fileno(),), daemon=True).start()
    beat = _every(BEAT_S, lambda: wire.send(sock, None))
    while True:
        try:
            request = wire.receive(sock)
        except EOFError:
            return
        _answer(sock, request, beat)
        gc.collect()  # PyAV's frame and its side data hold each other, which keeps a decoder's buffers: 10 MB a file


def _answer(sock: socket.socket, request: DecodeRequest, beat: Callable[[], None]) -> None:
    try:
        for event in decode_events(request, beat):
            wire.send(sock, event)
    except RowError as error:
        wire.send(sock, error)
    except MemoryError:
        name = Path(request.path).name
        wire.send(sock, ResourceError("decode_memory", f"{name}: decoding it takes more memory than is allowed"))


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


def _end_with_parent(fd: int) -> None:
    """Exit when the other side closes, even in the middle of a decode.

    PR_SET_PDEATHSIG would be shorter, but it fires when the parent's *thread* that started us ends.
    """
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
