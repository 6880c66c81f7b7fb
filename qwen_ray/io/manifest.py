"""Rows of a manifest, whatever its format, as dicts of plain JSON values."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen_ray.errors import ConfigError


def read_rows(name: str, data: bytes) -> Iterator[dict[str, Any]]:
    """Rows of a manifest; its format follows from the extension of `name`.

    Raises:
        ConfigError: the content is not of that format; says where.
    """
    reader = READERS[f".{name.rpartition('.')[2].lower()}"]
    for row in reader(name, data):
        yield {_sound(str(key)): plain(value) for key, value in row.items()}


def plain(value: Any) -> Any:
    """The nearest JSON value: text, number, true, false, null, list or object. NaN is null, bytes are base64."""
    if isinstance(value, str):
        return _sound(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {_sound(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _sound(text: str) -> str:
    """Text that can be written: half a surrogate pair, which JSON may spell, becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _read_csv(name: str, data: bytes) -> Iterator[dict[str, Any]]:
    text = _text(name, data)
    delimiter = "\t" if name.lower().endswith(".tsv") else ","
    try:
        for number, row in enumerate(
            csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 1
        ):
            if None in row:
                raise ConfigError(f"manifest {name}: row {number} has more values than there are columns")
            yield row
    except csv.Error as error:
        raise ConfigError(f"manifest {name}: not CSV: {error}") from error


def _read_jsonl(name: str, data: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(name, data).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"manifest {name}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"manifest {name}: line {number} is not an object with a 'uri'")
        yield row


def _read_parquet(name: str, data: bytes) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ConfigError(f"manifest {name}: not Parquet: {error}") from error


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"manifest {name}: not UTF-8: {error}") from error


READERS: dict[str, Callable[[str, bytes], Iterator[dict[str, Any]]]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
