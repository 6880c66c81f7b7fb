"""What the command line shows to people: tables and live progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from qwen_ray import api
from qwen_ray.engines.models import Model
from qwen_ray.io.storage import file_name
from qwen_ray.report import RunReport
from qwen_ray.runner import FETCHING
from qwen_ray.runner import Progress as Counts

_REASONS = {
    "done": "done before",
    "failed": "failed before, left alone",
    "vanished": "gone from the input",
    "returned": "back in the input",
    "missing": "named by the manifest, not there",
}
LINE_EVERY_S = 30.0
"""Where there is no terminal to draw on, progress is one plain line this often."""


@contextmanager
def live_progress() -> Iterator[Callable[[Counts], None]]:
    """A progress bar by kind of row, on a terminal; plain lines now and then elsewhere. On standard error."""
    # A handle of its own: Ray's start-up is kept from writing to the other.
    with os.fdopen(os.dup(2), "w") as terminal, _progress_on(Console(file=terminal)) as show:
        yield show


@contextmanager
def _progress_on(console: Console) -> Iterator[Callable[[Counts], None]]:
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("listing", total=None, counts="")

        noted = _notes(console)

        def show(counts: Counts) -> None:
            noted(counts)
            done, total = counts.videos, counts.videos_planned
            if counts.phase == FETCHING:
                done, total = counts.bytes_ready, counts.bytes_wanted
            bar.update(task, description=counts.phase, total=total or None, completed=done, counts=_line(counts))

        yield show


def _plain_lines(console: Console) -> Callable[[Counts], None]:
    last: dict[str, Any] = {"phase": None, "at": 0.0}
    noted = _notes(console)

    def show(counts: Counts) -> None:
        noted(counts)
        if counts.phase == last["phase"] and time.monotonic() - last["at"] < LINE_EVERY_S:
            return
        last.update(phase=counts.phase, at=time.monotonic())
        console.print(f"{counts.phase}: {_line(counts)}", highlight=False)

    return show


def _notes(console: Console) -> Callable[[Counts], None]:
    """Prints each note of a run once."""
    num_told = 0

    def show(counts: Counts) -> None:
        nonlocal num_told
        for note in counts.notes[num_told:]:
            console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False, soft_wrap=True)
        num_told = len(counts.notes)

    return show


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes while one thing is downloaded, on standard error and only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_model(console: Console, model: Model) -> None:
    """Where a model is and what it is."""
    facts = f"{len(model.files)} files, {model.size_bytes / 1e9:.3g} GB, revision {model.revision}"
    console.print(f"verified: {escape(facts)}", highlight=False, soft_wrap=True)
    console.print(model.location, highlight=False, soft_wrap=True, markup=False)


def _line(counts: Counts) -> str:
    if counts.phase == FETCHING:
        return f"{counts.bytes_ready / 1e9:.1f}/{counts.bytes_wanted / 1e9:.1f} GB"
    summaries = f"summaries {counts.summaries}  " if counts.summaries else ""
    return (
        f"videos {counts.videos}/{counts.videos_planned}  clips {counts.clips}  "
        f"speech {counts.speech}  {summaries}failed {counts.failed}"
    )


def show_plan(console: Console, planned: Mapping[str, Any]) -> None:
    """The plan as a table."""
    table = _table("plan", "what", "videos")
    table.add_row("listed", str(planned["num_inputs"]))
    table.add_row("duplicates left out", str(planned["num_duplicates"]))
    for reason, count in sorted(planned["planned"].items()):
        table.add_row(_REASONS.get(reason, reason.replace("_", " ")), str(count))
    table.add_row("[bold]to do[/bold]", f"[bold]{planned['num_todo']}[/bold]")
    console.print(table)
    if planned["config"]["caption"] is not None:
        console.print(f"frames of a clip: at most {planned['max_video_tokens']} tokens", highlight=False)


def show_report(console: Console, report: RunReport) -> None:
    """What a run did."""
    if not report.videos and not report.stopped:
        console.print(f"nothing to do: {_nothing(report)}", highlight=False, soft_wrap=True)
        return
    table = _table("this run", "rows", "count")
    for name, counts in (("videos", report.videos), ("clips", report.clips)):
        for status, count in sorted(counts.items()):
            table.add_row(f"{name} {status}", str(count))
    table.add_row("segments", str(report.num_segments))
    for error_type, count in sorted(report.errors.items()):
        table.add_row(f"[red]{error_type}[/red]", str(count))
    console.print(table)
    took = f"run {report.run_id}: {report.elapsed_s:.1f} s; tables in {escape(report.output)}"
    console.print(took, highlight=False, soft_wrap=True)
    if report.cost:
        console.print(f"cost {report.cost:.2f}, {report.gpu_hours:.2f} GPU hours", highlight=False)
    if report.stopped:
        console.print(f"[yellow]{report.stopped}; the same command goes on from there[/yellow]", highlight=False)
    if report.exit_code == 1:
        console.print(
            f"[red]{report.failed_fraction:.0%} of the videos failed, more than max_failed_fraction allows "
            f"({report.max_failed_fraction:.0%}); see _runs/{report.run_id}/dead_letters.jsonl[/red]",
            highlight=False,
        )


def _nothing(report: RunReport) -> str:
    """Why there was nothing to do, and what else there is to say."""
    facts = [f"all {report.num_inputs} inputs are in {escape(report.output)}"]
    failed = report.planned.get("failed", 0)
    if failed:
        facts.append(f"{failed} of them failed before, `qwen-ray retry {escape(report.output)}` tries again")
    if report.num_vanished:
        facts.append(f"{report.num_vanished} gone from the input, their rows are marked")
    if report.num_returned:
        facts.append(f"{report.num_returned} back in the input")
    return "; ".join(facts)


def show_status(console: Console, found: Mapping[str, Any]) -> None:
    """What an output holds."""
    table = _table(str(found["output"]), "what", "count")
    for name in ("num_videos", "num_clips", "num_segments", "num_vanished"):
        table.add_row(name.removeprefix("num_"), str(found[name]))
    for column in ("status", "caption_status", "speech_status", "error_type"):
        for value, count in sorted(found[column].items()):
            table.add_row(f"{column} {value}", str(count))
    console.print(table)
    holder = found["holder"]
    console.print(f"written to by {holder}" if holder else "no run is writing here", highlight=False)


def show_info(console: Console, file: str, info: Mapping[str, Any]) -> None:
    """Facts of one video."""
    table = _table(escape(file), "fact", "value")
    for name, value in info.items():
        if name != "tracks":
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    for track in info["tracks"]:
        facts = ", ".join(f"{k} {v}" for k, v in track.items() if k not in ("index", "kind", "selected") and v)
        mark = "*" if track.get("selected") else " "
        table.add_row(f"track {track['index']} {mark}", f"{track['kind']}: {escape(facts)}")
    console.print(table)


def show_clips(console: Console, output: str) -> None:
    """Every clip with its caption and the words spoken during it."""
    videos = api.read_table(output, "videos", ["video_id", "uri"]).to_pylist()
    names = {video["video_id"]: file_name(video["uri"]) for video in videos}
    clips = api.read_table(output, "clips").to_pylist()
    segments = api.read_table(output, "segments").to_pylist()
    table = _table("clips", "video", "from", "to", "caption", "words")
    for clip in sorted(clips, key=lambda clip: (names[clip["video_id"]], clip["start_s"])):
        words = [
            word["word"]
            for segment in sorted(segments, key=lambda segment: segment["start_s"])
            if segment["video_id"] == clip["video_id"]
            for word in segment["words"] or ()
            if clip["start_s"] <= word["start_s"] < clip["end_s"]
        ]
        caption = clip["caption"] if clip["caption"] is not None else f"[{clip['error_type']}]"
        times = (f"{clip['start_s']:.1f}", f"{clip['end_s']:.1f}")
        table.add_row(escape(names[clip["video_id"]]), *times, escape(caption), escape(" ".join(words)))
    console.print(table)


def show_paths(console: Console, tables: Path, subtitles: Sequence[Path]) -> None:
    """Where the files are."""
    for table in ("videos", "clips", "segments"):
        for path in sorted((tables / table).glob("part-*.parquet")):
            console.print(str(path), highlight=False, soft_wrap=True)
    for path in subtitles:
        console.print(str(path), highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
