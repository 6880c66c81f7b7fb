"""No file may hang, crash or bloat a decode worker: thousands of damaged files through the decode stage or whole runs.

    python -m jobs.conformance.fuzz --files 20000 --seed 0 [--through-ray] [--keep FOLDER] [--write]

A fault is a file that shows a bug of our own, takes longer than its deadline, gives other rows than one `video` and one
of each clip that it lists, or ends the process that holds the stage. `--first` starts at a later number, so that
`--first N --files 1 --keep FOLDER` makes one file again. Batches are made on the fly in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import track
from rich.table import Table

import qwen_ray
from jobs.bench import record
from jobs.conformance import bases
from jobs.conformance.mutations import Mutant, mutant
from qwen_ray.config import CaptionConfig, DecodeConfig, JobConfig, SpeechConfig
from qwen_ray.io.storage import canonical_uri
from qwen_ray.records import caption_status, speech_status, status_of
from qwen_ray.schema import video_id_of
from qwen_ray.stages.decode import TODO, DecodeStage
from qwen_ray.stages.rows import Row, read_rows

BATCH = 100
"""Files of one batch in a process; of a run through Ray, twenty times as many."""

START_S = 5.0
"""Allowed on top of a file's deadline, for ending one decoding process and starting the next."""

CONFIG = JobConfig(
    decode=DecodeConfig(
        window_s=0.5, num_frames=4, min_pixels=4 * 28**2, max_pixels=8 * 28**2, deadline_s=10, file_deadline_s=15,
        memory_gb=1,
    ),
    caption=CaptionConfig(engine="fake"), speech=SpeechConfig(engine="fake"), max_failed_fraction=1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one file."""

    number: int
    base: str
    change: str
    status: str
    error_type: str
    """Of the file, else of its sound, else of its first failed clip; empty for none."""
    message: str
    has_frames: bool
    took_s: float
    restarted: bool
    """Whether the decoding process had to be replaced."""
    fault: str
    """What is wrong with how it was dealt with; empty for nothing."""


@dataclass(slots=True)
class Totals:
    """Sums over all outcomes."""

    files: int = 0
    with_frames: int = 0
    restarts: int = 0
    longest: Outcome | None = None
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ended: list[Outcome] = field(default_factory=list)
    """Files that ended their decoding process."""
    faults: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one file."""
        self.files += 1
        self.with_frames += outcome.has_frames
        self.restarts += outcome.restarted
        self.outcomes[outcome.status, outcome.error_type] += 1
        if self.longest is None or outcome.took_s > self.longest.took_s:
            self.longest = outcome
        if outcome.restarted:
            self.ended.append(outcome)
        if outcome.fault:
            self.faults.append(outcome)


# ------------------------------------------------------------------------------------------------- the stage
class Tester:
    """Puts damaged files through one decode stage."""

    def __init__(self, folder: Path, config: JobConfig = CONFIG) -> None:
        self._folder, self._config = folder, config
        self._stage = DecodeStage(config)

    def close(self) -> None:
        """End the stage's decoding process."""
        self._stage.close()

    def check(self, made: Mutant) -> Outcome:
        """The outcome of one file; every third is listened to as well."""
        path = self._folder / made.name
        path.write_bytes(made.data)
        before, began = self._stage.decoder_pid, time.monotonic()
        want_speech = made.number % 3 == 0
        try:
            rows = [row for table in self._stage(todo_of(path, want_speech=want_speech)) for row in read_rows(table)]
        finally:
            path.unlink()
        took_s = time.monotonic() - began
        restarted = before is not None and self._stage.decoder_pid != before
        fault = _fault(rows, took_s, self._config.decode.file_deadline_s)
        return _outcome(made, rows, want_speech, took_s, restarted, fault)


def todo_of(path: Path, *, want_speech: bool) -> pa.Table:
    """A file as a row for the stage."""
    uri = canonical_uri(str(path))
    values = {"video_id": video_id_of(uri), "uri": uri, "version": "", "want_caption": True, "want_speech": want_speech}
    more = {"done_clips": [], "done_chunks": [], "metadata": "{}"}
    return pa.Table.from_pylist([values | more], schema=TODO)


def _fault(rows: Sequence[Row], took_s: float, deadline_s: float) -> str:
    """What a file's rows must not be."""
    if [row.kind for row in rows].count("video") != 1 or rows[-1].kind != "video":
        return "not exactly one video row at the end"
    body = rows[-1].body
    came = Counter(row.item_id for row in rows[:-1])
    if came != Counter(item_id for name in ("clips", "chunks") for item_id, _, _ in body[name]):
        return "other rows than it lists"
    if took_s > deadline_s + START_S:
        return f"took {took_s:.1f} s"
    if body["error"] and "bug in the decoding code" in body["error"][1]:
        return "bug"
    try:
        json.dumps([row.body for row in rows], allow_nan=False)
    except ValueError:
        return "a number that is none"
    return ""


def _outcome(
    made: Mutant, rows: Sequence[Row], want_speech: bool, took_s: float, restarted: bool, fault: str
) -> Outcome:
    body = rows[-1].body
    clips = [row.body for row in rows if row.kind == "clip"]
    chunks = [row for row in rows if row.kind == "speech"]
    error = body["error"] or body["audio_error"]
    failed = [(clip["error_type"], clip["error_message"]) for clip in clips if clip["status"] == "failed"]
    error_type, message = next(iter([error] if error else failed), ("", ""))
    info = body["info"] or {}
    caption = caption_status(True, info, clips)
    speech = speech_status(want_speech, info, error, chunks, [{"status": "ok"}] * len(chunks))
    status = status_of(caption, speech, damaged=body["damaged"] or body["error"] is not None)
    has_frames = any(clip["status"] == "ok" for clip in clips)
    return Outcome(
        made.number, made.base, made.change, status, error_type, message, has_frames, took_s, restarted, fault
    )


def _batch(folder: Path, seed: int, keep: Path | None, numbers: Sequence[int]) -> list[Outcome]:
    """One batch in a process of the pool."""
    sound = {name: (folder / name).read_bytes() for name in bases.BASES}
    with tempfile.TemporaryDirectory() as scratch:
        tester = Tester(Path(scratch))
        try:
            outcomes = []
            for number in numbers:
                made = mutant(sound, seed, number)
                outcomes.append(tester.check(made))
                if keep is not None and (outcomes[-1].fault or len(numbers) == 1):
                    (keep / made.name).write_bytes(made.data)
            return outcomes
        finally:
            tester.close()


def through_stage(folder: Path, seed: int, numbers: range, workers: int, keep: Path | None) -> Iterator[Outcome]:
    """Outcomes of the stage, in `workers` processes, as they come. Raises BrokenProcessPool where one of these dies."""
    batches = [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for outcomes in pool.map(partial(_batch, folder, seed, keep), batches):
            yield from outcomes


# ------------------------------------------------------------------------------------------------- through Ray
@dataclass(slots=True)
class RayTotals:
    """Sums over the rows of whole runs."""

    files: int = 0
    rows: int = 0
    inputs: int = 0
    """Different inputs among the rows."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """What `verify` found."""


def through_ray(sound: Mapping[str, bytes], seed: int, numbers: range) -> RayTotals:
    """The files as folders through `qwen_ray.run`, with engines that answer at once."""
    totals = RayTotals()
    for at in range(0, len(numbers), 20 * BATCH):
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "in"
            source.mkdir()
            for number in numbers[at : at + 20 * BATCH]:
                made = mutant(sound, seed, number)
                (source / made.name).write_bytes(made.data)
                totals.files += 1
            job = replace(CONFIG, input=str(source), output=str(Path(scratch) / "out"))
            qwen_ray.run(job)
            totals.problems += [str(problem) for problem in qwen_ray.verify(job.output)]
            _count_rows(job.output, totals)
    return totals


def _count_rows(output: str, totals: RayTotals) -> None:
    videos = qwen_ray.read_table(output, "videos", ["video_id", "status", "error_type"]).to_pylist()
    totals.rows += len(videos)
    totals.inputs += len({video["video_id"] for video in videos})
    totals.outcomes.update((video["status"], video["error_type"] or "") for video in videos)


# ------------------------------------------------------------------------------------------------- results
def show(console: Console, outcomes: Mapping[tuple[str, str], int], title: str) -> None:
    """Counts by status and error type."""
    table = Table("status", "error_type", "files", title=title, title_justify="left")
    for (status, error_type), count in sorted(outcomes.items(), key=lambda item: -item[1]):
        table.add_row(status, error_type or "-", str(count))
    console.print(table)


def show_stage(console: Console, totals: Totals) -> None:
    """What the stage made of the files."""
    show(console, totals.outcomes, "damaged files through the decode stage")
    console.print(f"{totals.files} files = rows; frames from {totals.with_frames / totals.files:.1%}")
    if totals.longest is not None:
        console.print(f"longest {totals.longest.took_s:.2f} s: {totals.longest.number:06d} {totals.longest.base}")
    console.print(f"decoding process replaced {totals.restarts} times")
    for outcome in totals.ended[:20]:
        console.print(f"  {outcome.number:06d} {outcome.change}: {outcome.message}", highlight=False)
    for outcome in totals.faults:
        console.print(f"FAULT {outcome.number:06d} {outcome.base} {outcome.change}: {outcome.fault}; {outcome.message}")


def stage_result(totals: Totals, seed: int, took_s: float) -> dict[str, Any]:
    """What is kept of a measurement."""
    assert totals.longest is not None
    return record.about("damaged files through the decode stage", "jobs.conformance.fuzz") | {
        "seed": seed,
        "files": totals.files,
        "rows": totals.files,
        "took_s": round(took_s, 1),
        "share_with_frames": totals.with_frames / totals.files,
        "longest_s": round(totals.longest.took_s, 2),
        "restarts": totals.restarts,
        "faults": len(totals.faults),
        "outcomes": _plain(totals.outcomes),
    }


def _plain(outcomes: Mapping[tuple[str, str], int]) -> dict[str, int]:
    return {f"{status} {error_type}".strip(): count for (status, error_type), count in sorted(outcomes.items())}


def _run_ray(console: Console, sound: Mapping[str, bytes], seed: int, numbers: range, write: bool) -> bool:
    began = time.monotonic()
    totals = through_ray(sound, seed, numbers)
    took_s = time.monotonic() - began
    show(console, totals.outcomes, "damaged files through whole runs")
    console.print(f"{totals.files} files, {totals.rows} rows of {totals.inputs} inputs, {took_s:.0f} s")
    for problem in totals.problems:
        console.print(f"FAULT {problem}")
    counts = {"files": totals.files, "rows": totals.rows, "inputs": totals.inputs, "problems": totals.problems}
    about = record.about("damaged files through whole runs with fake engines", "jobs.conformance.fuzz")
    _write(console, "fuzz-ray", about | {"seed": seed, "took_s": round(took_s, 1)} | counts, totals.outcomes, write)
    return totals.files == totals.rows == totals.inputs and not totals.problems


def _run_stage(console: Console, outcomes: Iterable[Outcome], num_files: int, seed: int, write: bool) -> bool:
    began, totals = time.monotonic(), Totals()
    for outcome in track(outcomes, total=num_files, description="decoding", disable=not console.is_terminal):
        totals.add(outcome)
    took_s = time.monotonic() - began
    show_stage(console, totals)
    console.print(f"{took_s:.0f} s")
    _write(console, "fuzz", stage_result(totals, seed, took_s), totals.outcomes, write)
    return totals.files == num_files and not totals.faults


def _write(
    console: Console, name: str, result: dict[str, Any], outcomes: Mapping[tuple[str, str], int], write: bool
) -> None:
    if write:
        path = record.path_of(name)
        path.write_text(json.dumps(result | {"outcomes": _plain(outcomes)}, indent=1) + "\n")
        console.print(f"written to {path}")


def main() -> int:
    """Damage, decode, count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="stages side by side")
    parser.add_argument("--through-ray", action="store_true", help="whole runs, with engines that answer at once")
    parser.add_argument("--keep", type=Path, help="folder for files that show a fault, and for a single file")
    parser.add_argument("--write", action="store_true", help="write the result to jobs/bench/results/")
    arguments = parser.parse_args()
    console, numbers = Console(), range(arguments.first, arguments.first + arguments.files)
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sound = bases.render(Path(scratch))
        if arguments.through_ray:
            return int(not _run_ray(console, sound, arguments.seed, numbers, arguments.write))
        outcomes = through_stage(Path(scratch), arguments.seed, numbers, arguments.workers, arguments.keep)
        return int(not _run_stage(console, outcomes, len(numbers), arguments.seed, arguments.write))


if __name__ == "__main__":
    sys.exit(main())
