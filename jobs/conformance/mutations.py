"""Damaged files: seeded changes to the bytes and to the structure of small videos of many kinds.

A mutant depends on the seed and its number alone, so that a file which shows a fault can be made again. Flipped bytes
mostly hit the pictures; what reads the headers is reached by changing elements: MP4 boxes, Matroska elements, RIFF
chunks, FLV tags, MPEG-TS packets.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MASTERS = {
    bytes.fromhex(code)
    for code in (
        *("18538067", "1F43B675", "1654AE6B", "AE", "E0", "E1", "A0", "1C53BB6B", "BB", "B7", "114D9B74", "4DBB"),
        *("1549A966", "1254C367", "7373", "1A45DFA3"),
    )
}
"""Matroska elements that hold others."""

BOXES = {"moov", "trak", "mdia", "minf", "stbl", "edts", "dinf", "udta", "moof", "traf", "mvex"}
"""MP4 boxes that hold nothing but others."""


# ------------------------------------------------------------------------------------------------- structure
@dataclass(frozen=True, slots=True)
class Element:
    """A piece of a file that says how long it is, at [start, end) with its body from `body` on."""

    start: int
    body: int
    end: int
    size_at: int = 0
    """Where its size stands."""
    size_bytes: int = 0
    """How many bytes that takes; 0 where it states none."""
    parents: tuple[Element, ...] = ()
    is_leaf: bool = True


@dataclass(frozen=True, slots=True)
class Structure:
    """The elements of a file, and how one states its size."""

    elements: list[Element]
    pack: Callable[[Element, int, int], bytes]
    """(element, its whole length, bytes of the field) to the field's bytes."""


def structure(data: bytes) -> Structure:
    """What `data` consists of, by its first bytes; blocks where it is of no known format, or too damaged to tell."""
    found = _known(data)
    return found if found is not None and found.elements else _blocks(data)


def _known(data: bytes) -> Structure | None:
    if data[4:8] in (b"ftyp", b"wide", b"moov", b"mdat"):
        return Structure(list(_mp4(data, 0, len(data), ())), lambda _, size, width: _big(size, width))
    if data[:4] == b"\x1aE\xdf\xa3":
        return Structure(list(_matroska(data, 0, len(data), ())), _vint)
    if data[:4] == b"RIFF":
        return Structure(list(_riff(data, 0, len(data), ())), lambda _, size, width: _big(size - 8, width)[::-1])
    if data[:3] == b"FLV":
        return Structure(list(_flv(data)), lambda _, size, width: _big(size - 15, width))
    return None


def _blocks(data: bytes) -> Structure:
    """Packets of MPEG-TS, or blocks of 64 bytes."""
    step = 188 if data[:1] == b"G" else 64
    blocks = [Element(at, at, min(at + step, len(data))) for at in range(0, len(data), step)]
    return Structure(blocks, lambda _, size, width: _big(size, width))


def _vint(element: Element, size: int, width: int) -> bytes:
    """Matroska's size of an element's body, whose length stands before it in unary."""
    return _big((1 << 7 * width) | (size - (element.body - element.start)), width)


def _big(value: int, width: int) -> bytes:
    return (value & (1 << 8 * width) - 1).to_bytes(width, "big")


def _mp4(data: bytes, low: int, high: int, parents: tuple[Element, ...]) -> Iterator[Element]:
    while low + 8 <= high:
        size, kind = struct.unpack(">I4s", data[low : low + 8])
        if not 8 <= size <= high - low:
            return
        leaf = kind.decode("latin1") not in BOXES
        element = Element(low, low + 8, low + size, low, 4, parents, leaf)
        yield element
        if not leaf:
            yield from _mp4(data, low + 8, low + size, (*parents, element))
        low += size


def _matroska(data: bytes, low: int, high: int, parents: tuple[Element, ...]) -> Iterator[Element]:
    while low + 2 <= high:
        code = data[low : low + _vint_bytes(data[low])]
        at = low + len(code)
        width = _vint_bytes(data[at]) if at < high else 8
        size = int.from_bytes(data[at : at + width], "big") & (1 << 7 * width) - 1
        body = at + width
        end = min(body + size, high)
        element = Element(low, body, end, at, width, parents, code not in MASTERS)
        yield element
        if not element.is_leaf:
            yield from _matroska(data, body, end, (*parents, element))
        low = end


def _vint_bytes(first: int) -> int:
    return 9 - first.bit_length() if first else 8


def _riff(data: bytes, low: int, high: int, parents: tuple[Element, ...]) -> Iterator[Element]:
    while low + 8 <= high:
        kind, size = struct.unpack("<4sI", data[low : low + 8])
        end = min(low + 8 + size, high)
        element = Element(low, low + 8, end, low + 4, 4, parents, kind not in (b"RIFF", b"LIST"))
        yield element
        if not element.is_leaf:
            yield from _riff(data, low + 12, end, (*parents, element))
        low = end + size % 2


def _flv(data: bytes) -> Iterator[Element]:
    low = 13
    while low + 15 <= len(data):
        size = int.from_bytes(data[low + 1 : low + 4], "big")
        yield Element(low, low + 11, min(low + 15 + size, len(data)), low + 1, 3)
        low += 15 + size


# ------------------------------------------------------------------------------------------------- changes
def _flip(share: float) -> Callable[[bytearray, random.Random], None]:
    def flip(data: bytearray, rng: random.Random) -> None:
        for _ in range(max(1, round(share * len(data)))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    return flip


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(1, len(data)) :]


def _cut_out(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 2000)]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.randrange(1, 1000))


def _overwrite(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    length = min(rng.randrange(1, 500), len(data) - at)
    data[at : at + length] = rng.choice([rng.randbytes(length), bytes(length), b"\xff" * length])


def _swap(data: bytearray, rng: random.Random) -> None:
    elements = structure(bytes(data)).elements
    parents = rng.choice(elements).parents
    first, second = sorted(rng.choices([e for e in elements if e.parents == parents], k=2), key=lambda e: e.start)
    if first is not second:
        pieces = (data[second.start : second.end], data[first.end : second.start], data[first.start : first.end])
        data[first.start : second.end] = b"".join(pieces)


def _duplicate(data: bytearray, rng: random.Random) -> None:
    found = structure(bytes(data))
    element = rng.choice(found.elements)
    _splice(
        data, found, element, element.end, bytes(data[element.start : element.end]) * rng.choice([1, 1, 1, 20]), rng
    )


def _delete(data: bytearray, rng: random.Random) -> None:
    found = structure(bytes(data))
    element = rng.choice(found.elements)
    _splice(data, found, element, element.start, b"", rng)


def _splice(data: bytearray, found: Structure, element: Element, at: int, new: bytes, rng: random.Random) -> None:
    """Put `new` at `at`, or take the element out; half the time what it lies in is told."""
    gone = 0 if new else element.end - element.start
    grown = len(new) - gone
    if rng.random() < 0.5:
        for parent in element.parents:
            if parent.size_bytes:
                _write_size(data, found, parent, parent.end - parent.start + grown)
    data[at : at + gone] = new


def _lie(data: bytearray, rng: random.Random) -> None:
    """An element that states a wrong size."""
    found = structure(bytes(data))
    sized = [element for element in found.elements if element.size_bytes]
    if not sized:
        return _extreme(data, rng)
    element = rng.choice(sized)
    size = element.end - element.start
    lies = [0, 1, 7, size - 1, size + 1, size * 2, size + rng.randrange(1 << 16), (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    return _write_size(data, found, element, rng.choice(lies))


def _write_size(data: bytearray, found: Structure, element: Element, size: int) -> None:
    field = found.pack(element, size, element.size_bytes)
    data[element.size_at : element.size_at + element.size_bytes] = field


def _extreme(data: bytearray, rng: random.Random) -> None:
    """A field of a header set to a value that nobody writes."""
    small = [e for e in structure(bytes(data)).elements if e.is_leaf and 0 < e.end - e.body < 4000]
    if not small:
        return
    element, width = rng.choice(small), rng.choice([1, 2, 4, 4, 4, 8])
    at = element.body + rng.randrange(0, max(1, element.end - element.body - width + 1), min(width, 4))
    at = min(at, len(data) - width)
    most = (1 << 8 * width) - 1
    value = rng.choice([0, 1, most, most >> 1, (most >> 1) + 1, most - 1, rng.randrange(most)])
    data[at : at + width] = value.to_bytes(width, rng.choice(["big", "big", "little"]))


def _extremes(data: bytearray, rng: random.Random) -> None:
    for _ in range(8):
        _extreme(data, rng)


CHANGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "flip one": _flip(0.0),
    "flip 0.02 %": _flip(0.0002),
    "flip 0.2 %": _flip(0.002),
    "flip 2 %": _flip(0.02),
    "cut": _cut,
    "cut out": _cut_out,
    "insert": _insert,
    "overwrite": _overwrite,
    "swap": _swap,
    "duplicate": _duplicate,
    "delete": _delete,
    "wrong size": _lie,
    "extreme": _extreme,
    "extremes": _extremes,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged file."""

    number: int
    base: str
    change: str
    data: bytes

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.number:06d}-{self.base}"


def mutant(bases: Mapping[str, bytes], seed: int, number: int) -> Mutant:
    """The damaged file of this seed and number; mostly of one kind of change, at times of two."""
    rng = random.Random(f"{seed}:{number}")
    base = rng.choice(sorted(bases))
    names = rng.choices(sorted(CHANGES), k=rng.choice([1, 1, 1, 2]))
    data = bytearray(bases[base])
    for name in names:
        if len(data) > 64:
            CHANGES[name](data, rng)
    return Mutant(number, base, " + ".join(names), bytes(data))
