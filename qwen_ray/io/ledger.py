"""What is done, and hence what there is to do.

The ledger is the narrow columns of the `videos` table, held as Arrow columns: 10 million rows fit into 2 GiB, which a
Python object per row would not. `plan` is pure: the same sources, ledger and fingerprints give the same plan.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_ray.errors import RETRYABLE, TransientError
from qwen_ray.io.commits import PartChange
from qwen_ray.io.ids import id_keys
from qwen_ray.io.objects import NotFound, Storage
from qwen_ray.io.parts import in_parallel, list_parts, read_part
from qwen_ray.io.source import Source, belongs
from qwen_ray.schema import VIDEOS, table_of

Reason = Literal["new", "changed", "retry", "stale_caption", "stale_speech", "stale_both"]

_REPEATING = (
    "status", "caption_status", "speech_status", "error_type",
    "decode_fingerprint", "caption_fingerprint", "speech_fingerprint",
)  # fmt: skip
_COLUMNS = ["video_id", "uri", "version", "attempts", "num_clips", "num_segments", "vanished_at", *_REPEATING]
_TROUBLED = pa.array(["failed", "partial"])
_PASSING = pa.array([name for name, passes in RETRYABLE.items() if passes])
_THREADS = 16
_TRIES = 4
_BATCH = 262_144


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Of this run's recipe; None for a component that the run is not to make. `decode` belongs to the captions."""

    decode: str
    caption: str | None
    speech: str | None
    metadata: tuple[str, ...] = ()
    """Columns of the manifest that the captions depend on, because a prompt shows them to the model."""

    def of_caption(self, source: Source) -> str | None:
        """The captions' fingerprint of one video: the recipe's, and what it takes from this video's metadata."""
        if self.caption is None or not self.metadata:
            return self.caption
        values = json.dumps([source.metadata.get(name) for name in self.metadata], ensure_ascii=False)
        return f"{self.caption}-{hashlib.blake2b(values.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"


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
    """Rows of captions that stand there stay as they are; not so when the video itself has changed."""
    keep_speech: bool
    attempts: int
    """Runs that have failed at this version with this recipe."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A video of which only the row in `videos` changes: its `vanished_at` is set or cleared."""

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
    """Sources by reason, and `done`, `failed` (left alone), `missing` (named by a manifest, not there, rows kept);
    and, of rows, `vanished` and `returned`."""


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
        names = list_parts(storage, "videos")
        tables = in_parallel(lambda part: _load_part(storage, part), names, _THREADS)
        return cls(_gather(tables))

    def mark(self, row: int) -> Mark:
        """Id and part of a row."""
        return Mark(self.rows["video_id"][row].as_py(), self.rows["part"][row].as_py())

    def find(self, video_ids: Sequence[str]) -> pa.Array:
        """Row number of each video; null where there is none."""
        wanted = pa.array(video_ids, pa.string())
        rows = self._candidates(id_keys(wanted))
        same = pc.equal(wanted, _flat(self.rows["video_id"]).take(rows))
        if pc.all(pc.fill_null(same, True)).as_py():
            return rows
        return pc.index_in(wanted, value_set=_flat(self.rows["video_id"]))  # unequal ids with equal keys

    def _candidates(self, keys: Any) -> pa.Array:
        """Row with the same key, or null. 12 bytes a row for as long as it is looked for; a hash table takes 150."""
        known = id_keys(self.rows["video_id"])
        order = np.argsort(known).astype(np.int32)
        known.sort()
        at = np.minimum(np.searchsorted(known, keys), max(len(known) - 1, 0))
        found = known[at] == keys if len(known) else np.zeros(len(keys), bool)
        return pa.array(order[at] if len(known) else np.zeros(len(keys), np.int32), mask=~found)


def plan(
    sources: Sequence[Source],
    ledger: Ledger,
    fingerprints: Fingerprints,
    *,
    max_attempts: int,
    root: str | None = None,
    retry_all: bool = False,
) -> Plan:
    """Compare what is listed with what is there.

    A source is `new`; or `changed` (another version); or `retry` (failed or partial for a reason that may pass, in
    fewer than `max_attempts` runs: what failed is made again); or stale, where a wanted component was made by another
    recipe: only that one is made again. A changed recipe also tries again what had failed for good.

    Args:
        root: prefix of URIs of which the sources are the complete listing; None marks nothing as vanished.
        retry_all: try again everything that failed, whatever the reason and the number of attempts.
    """
    rows = ledger.find([source.video_id for source in sources])
    new, old, returned = [], [], []
    counts: Counter[str] = Counter()
    verdicts = _verdicts(sources, rows, ledger, fingerprints, max_attempts, retry_all)
    for source, row, verdict in zip(sources, rows.to_pylist(), verdicts, strict=True):
        counts[verdict.reason] += 1
        if verdict.reason == "new":
            new.append(_todo(source, verdict, None, 0))
        elif verdict.reason in ("done", "failed"):
            if ledger.rows["vanished_at"][row].is_valid:
                returned.append(ledger.mark(row))
        elif verdict.reason != "missing":
            old.append(_todo(source, verdict, ledger.mark(row).part, ledger.rows["attempts"][row].as_py() or 0))
    old.sort(key=lambda todo: str(todo.part))
    vanished = _vanished(ledger, rows, root)
    counts["vanished"], counts["returned"] = len(vanished), len(returned)
    return Plan([*new, *old], vanished, returned, dict(counts))


def read_videos(storage: Storage, part: str, video_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Full rows of some videos of one part, as they are now. Raises NotFound if there is no such part."""
    rows = read_part(storage, "videos", part)
    wanted = pa.array(sorted(video_ids), pa.string())
    found: list[dict[str, Any]] = rows.filter(pc.is_in(rows["video_id"], value_set=wanted)).to_pylist()
    return found


def mark_changes(storage: Storage, plan: Plan, now: datetime.datetime) -> Iterator[PartChange]:
    """The changes that set and clear `vanished_at`, one per part."""
    when = {**dict.fromkeys(plan.vanished, now), **dict.fromkeys(plan.returned)}
    for part, marks in groupby(sorted(when, key=lambda mark: (mark.part, mark.video_id)), key=lambda mark: mark.part):
        times = {mark.video_id: when[mark] for mark in marks}
        rows = [row | {"vanished_at": times[row["video_id"]]} for row in read_videos(storage, part, times)]
        yield PartChange(part, "videos", list(times), table_of("videos", rows))


def _load_part(storage: Storage, part: str) -> pa.Table:
    return _narrowed(_read_narrow(storage, part), part)


def _narrowed(rows: pa.Table, part: str) -> pa.Table:
    """Rows with a number instead of a text for values of which there are only a few kinds."""
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


class _Verdict(NamedTuple):
    reason: str
    """A `Reason`, or `done`, `failed`, `missing`."""
    want_caption: bool
    want_speech: bool


def _verdicts(
    sources: Sequence[Source],
    rows: pa.Array,
    ledger: Ledger,
    fingerprints: Fingerprints,
    max_attempts: int,
    retry_all: bool,
) -> Iterator[_Verdict]:
    """One for each source; by whole columns, a batch at a time."""
    for start in range(0, len(sources), _BATCH):
        these = sources[start : start + _BATCH]
        versions = pa.array([source.version for source in these], pa.string())
        batch = rows.slice(start, _BATCH)
        held = ledger.rows.select(["version", "attempts", *_REPEATING]).take(batch)
        known = _Known(held, fingerprints, _of_captions(these, fingerprints))
        reasons = _reasons(versions, batch, known, known.may_retry(max_attempts, retry_all))
        wants = (_wants(reasons, *component) for component in known.components())
        yield from map(_Verdict, reasons.to_pylist(), *(want.to_pylist() for want in wants))


def _of_captions(sources: Sequence[Source], fingerprints: Fingerprints) -> str | pa.Array | None:
    """The wanted fingerprint of the captions: one for all, unless it depends on each video's metadata."""
    if not fingerprints.metadata:
        return fingerprints.caption
    return pa.array([fingerprints.of_caption(source) for source in sources], pa.string())


def _reasons(versions: pa.Array, rows: pa.Array, known: _Known, retry: pa.Array) -> pa.Array:
    """The first of these that holds."""
    cases = {
        "new": pc.is_null(rows),
        "missing": pc.and_(pc.equal(versions, ""), pc.not_equal(known.text("version"), "")),
        "changed": pc.not_equal(versions, known.text("version")),
        "stale_both": pc.and_(known.caption_stale, known.speech_stale),
        "retry": retry,
        "stale_caption": known.caption_stale,
        "stale_speech": known.speech_stale,
        "failed": pc.equal(known.text("status"), "failed"),
    }
    return pc.case_when(pa.StructArray.from_arrays(list(cases.values()), names=list(cases)), *cases, "done")


def _wants(reasons: pa.Array, wanted: bool, stale: pa.Array, again: pa.Array) -> pa.Array:
    """Whether a component is to be made: all of a new or changed video, else what is stale, or has failed."""
    whole = pc.is_in(reasons, value_set=pa.array(["new", "changed"]))
    retried = pc.and_(pc.equal(reasons, "retry"), again)
    return pc.and_(pc.or_(whole, pc.or_(retried, stale)), pa.scalar(wanted))


class _Known:
    """What the ledger says about a batch of sources, column by column; empty text where it says nothing."""

    def __init__(self, rows: pa.Table, fingerprints: Fingerprints, caption: str | pa.Array | None) -> None:
        self._rows, self._fingerprints = rows, fingerprints
        stale = self._differs("caption_fingerprint", caption)
        decode = None if fingerprints.caption is None else fingerprints.decode
        self.caption_stale = pc.or_(stale, self._differs("decode_fingerprint", decode))
        self.speech_stale = self._differs("speech_fingerprint", fingerprints.speech)
        self._unfinished = pc.is_in(self.text("status"), value_set=_TROUBLED)
        caption, speech = (pc.is_in(self.text(f"{c}_status"), value_set=_TROUBLED) for c in ("caption", "speech"))
        neither = pc.invert(pc.or_(caption, speech))  # the file itself was in trouble
        self._caption_again = pc.or_(self.caption_stale, pc.and_(self._unfinished, pc.or_(caption, neither)))
        self._speech_again = pc.or_(self.speech_stale, pc.and_(self._unfinished, pc.or_(speech, neither)))

    def text(self, name: str) -> pa.Array:
        return pc.fill_null(_flat(self._rows[name]).cast(pa.string()), "")

    def may_retry(self, max_attempts: int, everything: bool) -> pa.Array:
        """Whether something that is wanted has failed, and trying again is in order."""
        (caption, _, caption_again), (speech, _, speech_again) = self.components()
        concerns_us = pc.or_(pc.and_(caption_again, pa.scalar(caption)), pc.and_(speech_again, pa.scalar(speech)))
        troubled = pc.and_(self._unfinished, concerns_us)
        if everything:
            return troubled
        left = pc.less(pc.fill_null(_flat(self._rows["attempts"]), 0), max_attempts)
        return pc.and_(troubled, pc.and_(left, pc.is_in(self.text("error_type"), value_set=_PASSING)))

    def components(self) -> list[tuple[bool, pa.Array, pa.Array]]:
        """For captions and for speech: whether the run makes it, whether it is stale, and whether that or failed."""
        wanted = self._fingerprints
        return [
            (wanted.caption is not None, self.caption_stale, self._caption_again),
            (wanted.speech is not None, self.speech_stale, self._speech_again),
        ]

    def _differs(self, name: str, wanted: str | pa.Array | None) -> pa.Array:
        """Whether what is recorded is not what is wanted; false where nothing is wanted."""
        if wanted is None:
            return pa.array([False] * self._rows.num_rows)
        return pc.not_equal(self.text(name), wanted)


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array; combining what is in one piece already would copy it."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _todo(source: Source, verdict: _Verdict, part: str | None, attempts: int) -> Todo:
    stands = verdict.reason not in ("new", "changed")
    return Todo(
        source=source,
        reason=cast(Reason, verdict.reason),
        part=part,
        want_caption=verdict.want_caption,
        want_speech=verdict.want_speech,
        keep_caption=stands and not verdict.want_caption,
        keep_speech=stands and not verdict.want_speech,
        attempts=attempts if verdict.reason == "retry" else 0,
    )


def _vanished(ledger: Ledger, listed: pa.Array, root: str | None) -> list[Mark]:
    """Rows under the root that the listing lacks; not those it would have passed over, which a manifest had named."""
    if root is None:
        return []
    present = pc.is_in(pa.array(range(len(ledger)), pa.int32()), value_set=listed.drop_null())
    gone = pc.and_(pc.invert(present), pc.is_null(_flat(ledger.rows["vanished_at"])))
    gone = pc.and_(gone, pc.starts_with(_flat(ledger.rows["uri"]), root))
    rows = pc.indices_nonzero(gone).to_pylist()
    return [ledger.mark(row) for row in rows if belongs(ledger.rows["uri"][row].as_py()[len(root) :])]
