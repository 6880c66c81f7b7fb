"""Messages over a socket between two of our own processes: a pickled head, then its arrays as raw bytes.

Not multiprocessing.connection: it cannot give up in the middle of a message, and a process that hangs may well do so
there. Pickle protocol 5 keeps the arrays out of the pickle, so that frames are copied only into and out of the socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

HEAD = struct.Struct("!II")
"""Bytes of the pickle, number of arrays."""
SIZE = struct.Struct("!Q")


def pack(message: object) -> list[bytes | memoryview]:
    """What goes over the socket for a message, in order: its arrays as they lie in memory, not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = b"".join(SIZE.pack(view.nbytes) for view in views)
    return [HEAD.pack(len(head), len(views)) + sizes + head, *views]


def send(sock: socket.socket, message: object) -> None:
    """Send one message. Raises OSError when the other side is gone."""
    for part in pack(message):
        sock.sendall(part)


def receive(sock: socket.socket, timeout_s: float | None = None) -> Any:
    """Receive one message, all of it within `timeout_s` seconds.

    Raises:
        TimeoutError: It did not come in time.
        EOFError: The other side closed, or died, even if in the middle of the message.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    head_size, num_buffers = HEAD.unpack(_exactly(sock, HEAD.size, deadline))
    sizes = [SIZE.unpack(_exactly(sock, SIZE.size, deadline))[0] for _ in range(num_buffers)]
    head = _exactly(sock, head_size, deadline)
    return pickle.loads(head, buffers=[_exactly(sock, size, deadline) for size in sizes])


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            sock.settimeout(left_s)
        count = sock.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
    return data
