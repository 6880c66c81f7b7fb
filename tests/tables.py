"""Reading an output as its users do, and comparing two outputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from qwen_ray.config import StorageConfig
from qwen_ray.io.objects import NotFound
from qwen_ray.io.parts import list_parts, read_part
from qwen_ray.io.storage import open_storage

IDS = {"videos": "video_id", "clips": "clip_id", "segments": "segment_id"}
CONTENT = {
    "videos": ("video_id", "uri", "version", "status", "caption_status", "speech_status", "error_type", "transcript"),
    "clips": ("clip_id", "video_id", "clip_index", "start_s", "end_s", "status", "caption"),
    "segments": ("segment_id", "video_id", "segment_index", "start_s", "end_s", "status", "text"),
}


def rows(output: str, table: str, endpoint_url: str = "", columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Rows of all parts that are listed now."""
    storage = open_storage(output, StorageConfig(endpoint_url=endpoint_url))
    found: list[dict[str, Any]] = []
    for part in list_parts(storage, table):
        found += read_part(storage, table, part, columns).to_pylist()
    return found


def content(output: str, endpoint_url: str = "") -> dict[str, list[tuple[Any, ...]]]:
    """What two runs over the same input must agree on, in one order."""
    return {
        table: sorted(tuple(row[name] for name in names) for row in rows(output, table, endpoint_url))
        for table, names in CONTENT.items()
    }


def duplicates(output: str, endpoint_url: str = "") -> dict[str, int]:
    """Ids that stand more than once, per table."""
    twice: dict[str, int] = {}
    for table, name in IDS.items():
        try:
            counts = Counter(row[name] for row in rows(output, table, endpoint_url, [name]))
        except NotFound:
            continue
        twice[table] = sum(count > 1 for count in counts.values())
    return twice
