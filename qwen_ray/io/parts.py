"""Parquet parts: the names under which the three tables lie, and how a part becomes bytes and rows again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa

from qwen_ray.errors import ConfigError
from qwen_ray.io.objects import Storage
from qwen_ray.schema import SCHEMA_VERSION, TABLES

T = TypeVar("T")
R = TypeVar("R")

_COMPRESSION = "zstd"
_ROW_GROUP = 16_384
"""Rows; at 2 KB each some 32 MB, of which a reader skips what its filter excludes."""


def part_key(table: str, part: str) -> str:
    """Where a part of a table lies."""
    return f"{table}/{part}.parquet"


def list_parts(storage: Storage, table: str) -> list[str]:
    """Names of a table's parts, sorted."""
    prefix, suffix = f"{table}/part-", ".parquet"
    keys = (entry.key for entry in storage.list(prefix))
    return [key[len(table) + 1 : -len(suffix)] for key in keys if key.endswith(suffix)]


def encode_part(rows: pa.Table) -> bytes:
    """Parquet bytes. Equal rows give equal bytes: so a repeated projection sees that there is nothing to do."""
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression=_COMPRESSION, row_group_size=_ROW_GROUP)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_part(data: bytes, table: str, name: str = "", columns: list[str] | None = None) -> pa.Table:
    """Rows of a part with today's columns; a column that an older version did not have is null.

    Raises:
        ConfigError: not a part of this table, or written by a newer version of this package.
    """
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        check_version(file.schema_arrow, name or table)
        wanted = columns if columns is None else [c for c in columns if c in file.schema_arrow.names]
        return conform(file.read(columns=wanted), table, columns)
    except pa.ArrowException as error:
        raise ConfigError(f"{name or table}: not a readable part: {error}") from error


def read_part(storage: Storage, table: str, part: str, columns: list[str] | None = None) -> pa.Table:
    """Rows of a part, all of one moment. Raises NotFound, ConfigError."""
    key = part_key(table, part)
    return decode_part(storage.read(key).data, table, f"{storage.uri}/{key}", columns)


def conform(rows: pa.Table, table: str, columns: Iterable[str] | None = None) -> pa.Table:
    """Rows with exactly the table's columns (or those of them that are named), in its order and types."""
    schema = TABLES[table]
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
    present = set(rows.column_names)
    arrays = [
        rows[field.name].cast(field.type) if field.name in present else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def check_version(schema: pa.Schema, name: str) -> None:
    """Raises ConfigError unless this package knows the schema version in a part's footer."""
    found = (schema.metadata or {}).get(b"qwen_ray.schema_version", b"").decode()
    if not found.isdigit() or int(found) > int(SCHEMA_VERSION):
        raise ConfigError(f"{name}: schema version {found or 'missing'}, this package reads up to {SCHEMA_VERSION}")


def in_parallel(act: Callable[[T], R], items: Sequence[T], num_threads: int) -> list[R]:
    """Results of `act` for each item, in their order; few items start few threads, and one starts none."""
    if len(items) < 2 or num_threads < 2:
        return [act(item) for item in items]
    with ThreadPoolExecutor(min(num_threads, len(items))) as pool:
        return list(pool.map(act, items))
