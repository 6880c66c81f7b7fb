"""Edits of a file's bytes: display matrices, cuts and damage, each repeatable."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

TS_PACKET = 188
TURNS = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}
"""Display matrices that turn a stored picture clockwise."""


def _boxes(data: bytes, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """(type, start of the body, end) of each MP4 box in data[low:high]."""
    while low + 8 <= high:
        size, kind = struct.unpack(">I4s", data[low : low + 8])
        body = low + 8
        if size == 1:
            size, body = struct.unpack(">Q", data[low + 8 : low + 16])[0], low + 16
        size = size or high - low
        if size < 8:
            return
        yield kind.decode("latin1"), body, low + size
        low += size


def find_box(data: bytes, *path: str) -> tuple[int, int]:
    """(start, end) of the body of the first MP4 box at `path`."""
    low, high = 0, len(data)
    for wanted in path:
        low, high = next((body, end) for kind, body, end in _boxes(data, low, high) if kind == wanted)
    return low, high


def set_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Write a display matrix (a, b, c, d in units) into the first track of an MP4."""
    out = bytearray(data)
    body, _ = find_box(data, "moov", "trak", "tkhd")
    at = body + (52 if data[body] == 1 else 40)
    a, b, c, d = (value << 16 for value in matrix)
    out[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(out)


def join(*parts: bytes) -> bytes:
    """One file behind the other."""
    return b"".join(parts)


def nothing() -> bytes:
    """No bytes at all."""
    return b""


def zeros(count: int) -> bytes:
    """A download that was allotted and never came."""
    return bytes(count)


def noise(count: int) -> bytes:
    """What encrypted or lost data looks like."""
    return np.random.default_rng(6).integers(0, 256, count, np.uint8).tobytes()


def web_page() -> bytes:
    """What a server sends in place of a film that it does not have."""
    return b"<html><body>404 Not Found</body></html>\n" * 40


def keep(data: bytes, percent: int) -> bytes:
    """The first `percent` of a file."""
    return data[: len(data) * percent // 100]


def keep_from(data: bytes, start: int) -> bytes:
    """All from a byte on."""
    return data[start:]


def rename_codec(data: bytes, old: str, new: str) -> bytes:
    """Call the codec by a name that nobody knows."""
    return data.replace(old.encode(), new.encode())


def scribble(data: bytes, low: int, high: int, fill: str) -> bytes:
    """Overwrite from `low` to `high` percent of an MP4's media data, with noise or zeros."""
    out = bytearray(data)
    body, end = find_box(data, "mdat")
    a, b = body + (end - body) * low // 100, body + (end - body) * high // 100
    draw = np.random.default_rng(7).integers(0, 256, b - a, np.uint8).tobytes()
    out[a:b] = draw if fill == "noise" else bytes(b - a)
    return bytes(out)


def flip(data: bytes, count: int) -> bytes:
    """Flip bits of `count` bytes, the first two thousand spared."""
    out = bytearray(data)
    for at in np.random.default_rng(8).integers(2000, len(data) - 2000, count):
        out[at] ^= 0x5A
    return bytes(out)


def lose_packets(data: bytes, percent: int) -> bytes:
    """Drop packets of a transport stream at random, none of its first hundred."""
    packets = [data[k : k + TS_PACKET] for k in range(0, len(data), TS_PACKET)]
    lost = np.random.default_rng(9).random(len(packets)) < percent / 100
    return b"".join(packet for k, packet in enumerate(packets) if k < 100 or not lost[k])


def without_index(data: bytes) -> bytes:
    """An AVI without its index at the end."""
    return data[: data.rindex(b"idx1")]
