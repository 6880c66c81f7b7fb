"""Ids as 64-bit numbers, for work on very many of them: 8 bytes each, where a text in a hash table takes 100."""

from __future__ import annotations

import hashlib
import string
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_DIGITS = 16
_BATCH = 1 << 20
_HEX = frozenset(string.hexdigits)


def id_keys(ids: pa.Array | pa.ChunkedArray) -> Any:
    """uint64 array: the first 16 hex digits of each id as a number; a hash of what is no such id.

    Equal ids have equal keys. Unequal ids may, very rarely: whoever finds two equal keys compares the ids.
    """
    batches = [_keys(_one(ids.slice(start, _BATCH))) for start in range(0, len(ids), _BATCH)]
    return np.concatenate(batches) if batches else np.zeros(0, np.uint64)


def _keys(ids: pa.Array) -> Any:
    text = _joined(pc.utf8_slice_codeunits(pc.fill_null(ids, ""), 0, _DIGITS))
    if len(text) == _DIGITS * len(ids) and pc.all(pc.greater_equal(pc.utf8_length(ids), _DIGITS)).as_py():
        try:
            return np.frombuffer(bytes.fromhex(text.decode()), dtype=">u8").astype(np.uint64)
        except ValueError:
            pass  # some id is not hexadecimal: one by one, then
    return np.array([_key(text) for text in ids.to_pylist()], np.uint64)


def _joined(texts: pa.Array) -> bytes:
    """All texts one after the other, which is how Arrow holds them."""
    size_bytes = pc.sum(pc.binary_length(texts)).as_py() or 0
    data = texts.buffers()[2]
    return bytes(data[:size_bytes]) if data is not None else b""


def _key(text: str | None) -> int:
    head = (text or "")[:_DIGITS]
    if len(head) == _DIGITS and _HEX.issuperset(head):
        return int(head, 16)
    return int.from_bytes(hashlib.blake2b((text or "").encode(), digest_size=8).digest(), "big")


def _one(ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
