"""Reading the output tables as they stand, on local disk or in object storage."""

from __future__ import annotations

import pyarrow as pa

from qwen_ray.errors import ConfigError
from qwen_ray.io.parts import list_parts, read_part
from qwen_ray.io.storage import Storage
from qwen_ray.schema import TABLES


def read_table(storage: Storage, table: str, columns: list[str] | None = None) -> pa.Table:
    """A whole table, or some of its columns, in memory. Raises ConfigError when there is no such table or column."""
    if table not in TABLES:
        raise ConfigError(f"table {table!r}: allowed is {', '.join(TABLES)}")
    schema = TABLES[table]
    unknown = [name for name in columns or () if name not in schema.names]
    if unknown:
        raise ConfigError(f"{table} has no column {', '.join(unknown)}; columns: {', '.join(schema.names)}")
    parts = [read_part(storage, table, part, columns) for part in list_parts(storage, table)]
    if parts:
        return pa.concat_tables(parts)
    return schema.empty_table() if columns is None else schema.empty_table().select(columns)
