"""What is done, and hence what there is to do.

The ledger is the narrow columns of the `videos` table, held as Arrow columns with an index: 10 million rows fit into 2 GiB,
which a Python object per row would not. `plan` is pure: the same sources, ledger and fingerprints give the same plan.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from qwen_ray.errors import RETRYABLE, ConfigError, TransientError
from qwen_ray.io.commits import PartChange
from qwen_ray.io.objects import NotFound, Storage
from qwen_ray.io.parts import list_parts, read_part
from qwen_ray.io.source import Source, belongs
from qwen_ray.schema import VIDEOS, table_of

Reason = Literal["new", "changed", "retry", "stale_caption", "stale_speech", "stale_both"]

_REPEATING = (
    "status", "caption_status", "speech_status", "error_type", "decode_fingerprint", "caption_fingerprint", "speech_fingerprint",
)  # fmt: skip
_COLUMNS = ["video_id", "uri", "version", "attempts", "num_clips", "num_segments", "vanished_at", *_REPEATING]
_THREADS = 16
_TRIES = 4
_BATCH = 262_144


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Of this run's recipe; None for a component that the run is not to make. `decode` belongs to the captions."""

    decode: str
    caption: str | None
    speech: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    """One video to be worked on."""

    source: Source
    reason: Reason
    part: str | None
    """The part that holds its rows; None for a video that has none yet."""
    want_caption: bool
    want_speech: bool
    keep_caption: bool
    """Rows of captions that stand there stay as they are. Not so when the video itself has changed."""
    keep_speech: bool
    attempts: int
    """Runs that have failed at this version with this recipe."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A video of which only the row in `videos` needs a new `vanished_at`."""

    video_id: str
    part: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run has to do."""

    todo: list[Todo]
    """New videos in listing order, then those that exist, part by part."""
    vanished: list[Mark]
    """In the ledger and under the listing's root, but no longer listed."""
    returned: list[Mark]
    """Vanished before, there again with the same version, and nothing else to do."""
    counts: dict[str, int]
    """Sources by reason, and `done`, `failed` (left alone), `missing` (named by a manifest, not there, rows kept),
    `vanished`, `returned`. The last two count rows, not sources."""


class Ledger:
    """One row per video: `rows` has the columns that decide, and `part`."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @classmethod
    def load(cls, storage: Storage) -> Ledger:
        """Read the `videos` parts, many at a time.

        Raises:
            ConfigError: a part is not readable by this version.
            TransientError: the store failed.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            tables = list(pool.map(lambda part: _load_part(storage, part), list_parts(storage, "videos")))
        return cls(_gather(tables))

    def find(self, video_ids: Sequence[str]) -> pa.Array:
        """Row number of each video; null where there is none."""
        return pc.index_in(pa.array(video_ids, pa.string()), value_set=self.rows["video_id"].combine_chunks())


def plan(
    sources: Sequence[Source],
    ledger: Ledger,
    fingerprints: Fingerprints,
    *,
    max_attempts: int,
    root: str | None = None,
) -> Plan:
    """Compare what is listed with what is there.

    A source is `new`; or `changed` (another version); or `retry` (failed or partial for a reason that may pass, in fewer
    than `max_attempts` runs); or stale, where a wanted component was made by another recipe: then only that one is made
    again. A changed recipe also tries again what had failed for good. A component the run is not to make stays as it is.

    Args:
        root: prefix of URIs of which the sources are the complete listing; None marks nothing as vanished.
    """
    rows = ledger.find([source.video_id for source in sources])
    verdicts = _verdicts(sources, rows, ledger, fingerprints, max_attempts)
    new, old, returned = [], [], []
    counts: Counter[str] = Counter()
    for source, row, verdict in zip(sources, rows.to_pylist(), verdicts, strict=True):
        counts[verdict] += 1
        if verdict == "new":
            new.append(_new(source, fingerprints))
        elif verdict in ("done", "failed"):
            if ledger.rows["vanished_at"][row].is_valid:
                returned.append(_mark(ledger, row))
        elif verdict != "missing":
            old.append(_todo(source, verdict, ledger, row, fingerprints))
    old.sort(key=lambda todo: str(todo.part))
    vanished = _vanished(ledger, rows, root)
    counts.update({"vanished": len(vanished), "returned": len(returned)})
    return Plan([*new, *old], vanished, returned, dict(counts))


def read_videos(storage: Storage, part: str, video_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Full rows of some videos of one part, as they are now. Raises NotFound if there is no such part."""
    rows = read_part(storage, "videos", part)
    wanted = pa.array(sorted(video_ids), pa.string())
    found: list[dict[str, Any]] = rows.filter(pc.is_in(rows["video_id"], value_set=wanted)).to_pylist()
    return found


def mark_changes(storage: Storage, plan: Plan, now: datetime.datetime) -> Iterator[PartChange]:
    """The changes that set and clear `vanished_at`, one per part: commit them some parts at a time."""
    when = {**dict.fromkeys(plan.vanished, now), **dict.fromkeys(plan.returned)}
    for part, marks in groupby(sorted(when, key=lambda mark: (mark.part, mark.video_id)), key=lambda mark: mark.part):
        times = {mark.video_id: when[mark] for mark in marks}
        rows = [row | {"vanished_at": times[row["video_id"]]} for row in read_videos(storage, part, times)]
        yield PartChange(part, "videos", list(times), table_of("videos", rows))


def _load_part(storage: Storage, part: str) -> pa.Table:
    rows = _read_narrow(storage, part)
    for name in _REPEATING:
        rows = rows.set_column(rows.schema.get_field_index(name), name, pc.dictionary_encode(rows[name]))
    return rows.append_column("part", pa.DictionaryArray.from_arrays(pa.array([0] * len(rows), pa.int32()), [part]))


def _read_narrow(storage: Storage, part: str) -> pa.Table:
    for attempt in range(_TRIES):
        try:
            return read_part(storage, "videos", part, _COLUMNS)
        except NotFound:  # listed a moment ago; parts are never deleted, but a store may lag behind its own listing
            time.sleep(0.1 * 2**attempt)
    raise TransientError("storage", f"{storage.uri}: part {part} is listed and cannot be read")


def _gather(tables: list[pa.Table]) -> pa.Table:
    """One table of one chunk per column; column by column, so that never more than one exists twice."""
    if not tables:
        return _empty()
    rows = pa.concat_tables(tables).unify_dictionaries()
    tables.clear()
    for index, name in enumerate(rows.column_names):
        rows = rows.set_column(index, name, rows[name].combine_chunks())
    return rows


def _empty() -> pa.Table:
    kinds = {name: VIDEOS.field(name).type for name in _COLUMNS}
    kinds |= dict.fromkeys((*_REPEATING, "part"), pa.dictionary(pa.int32(), pa.string()))
    return pa.schema(list(kinds.items())).empty_table()


def _verdicts(
    sources: Sequence[Source], rows: pa.Array, ledger: Ledger, fingerprints: Fingerprints, max_attempts: int
) -> list[str]:
    """Reason, `done`, `failed` or `missing` for each source; by whole columns, a batch at a time."""
    verdicts: list[str] = []
    for start in range(0, len(sources), _BATCH):
        versions = pa.array([source.version for source in sources[start : start + _BATCH]], pa.string())
        batch = rows.slice(start, _BATCH)
        known = ledger.rows.select(["version", "attempts", *_REPEATING]).take(batch)
        verdicts += _judge(versions, batch, known, fingerprints, max_attempts).to_pylist()
    return verdicts


def _judge(versions: pa.Array, rows: pa.Array, known: pa.Table, fingerprints: Fingerprints, max_attempts: int) -> pa.Array:
    caption = _differs(known["caption_fingerprint"], fingerprints.caption)
    if fingerprints.caption is not None:
        caption = pc.or_(caption, _differs(known["decode_fingerprint"], fingerprints.decode))
    speech = _differs(known["speech_fingerprint"], fingerprints.speech)
    unfinished = pc.not_equal(_text(known["status"]), "ok")
    passing = pc.is_in(_text(known["error_type"]), value_set=pa.array([name for name, may in RETRYABLE.items() if may]))
    cases = {
        "new": pc.is_null(rows),
        "missing": pc.and_(pc.equal(versions, ""), pc.not_equal(known["version"], "")),
        "changed": pc.not_equal(versions, known["version"]),
        "stale_both": pc.and_(caption, speech),
        "retry": pc.and_(pc.and_(unfinished, passing), pc.less(pc.fill_null(known["attempts"], 0), max_attempts)),
        "stale_caption": caption,
        "stale_speech": speech,
        "failed": pc.equal(_text(known["status"]), "failed"),
    }
    conditions = [pc.fill_null(_flat(condition), False) for condition in cases.values()]
    return pc.case_when(pa.StructArray.from_arrays(conditions, names=list(cases)), *cases, "done")


def _differs(column: pa.ChunkedArray, wanted: str | None) -> pa.ChunkedArray:
    """Whether what is recorded (nothing, perhaps) is not what is wanted; false where nothing is wanted."""
    if wanted is None:
        return pa.chunked_array([pa.array([False] * len(column), pa.bool_())])
    return pc.not_equal(pc.fill_null(_text(column), ""), wanted)


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _new(source: Source, fingerprints: Fingerprints) -> Todo:
    return Todo(
        source=source,
        reason="new",
        part=None,
        want_caption=fingerprints.caption is not None,
        want_speech=fingerprints.speech is not None,
        keep_caption=False,
        keep_speech=False,
        attempts=0,
    )


def _todo(source: Source, verdict: Any, ledger: Ledger, row: int, fingerprints: Fingerprints) -> Todo:
    want_caption = fingerprints.caption is not None and verdict != "stale_speech"
    want_speech = fingerprints.speech is not None and verdict != "stale_caption"
    return Todo(
        source=source,
        reason=verdict,
        part=ledger.rows["part"][row].as_py(),
        want_caption=want_caption,
        want_speech=want_speech,
        keep_caption=not want_caption and verdict != "changed",
        keep_speech=not want_speech and verdict != "changed",
        attempts=(ledger.rows["attempts"][row].as_py() or 0) if verdict == "retry" else 0,
    )


def _mark(ledger: Ledger, row: int) -> Mark:
    return Mark(ledger.rows["video_id"][row].as_py(), ledger.rows["part"][row].as_py())


def _vanished(ledger: Ledger, listed: pa.Array, root: str | None) -> list[Mark]:
    """Rows under the root that the listing lacks; not those it would have passed over (a manifest may have named them)."""
    if root is None:
        return []
    present = pc.is_in(pa.array(range(len(ledger)), pa.int32()), value_set=listed.drop_null())
    gone = pc.and_(pc.invert(present), pc.is_null(_flat(ledger.rows["vanished_at"])))
    gone = pc.and_(gone, pc.starts_with(_flat(ledger.rows["uri"]), root))
    marks = []
    for row in pc.indices_nonzero(gone).to_pylist():
        if belongs(ledger.rows["uri"][row].as_py()[len(root) :]):
            marks.append(_mark(ledger, row))
    return marks
