"""Memory of a decode worker stays flat: its peak after thousands of clips beside its peak after a hundred.

    python -m jobs.conformance.memory --clips 2000 [--write]

Files of several codecs and sizes go through one decode stage, again and again, each listened to as well. Peaks are
those of the stage's process and of its decoding process; the first hundred clips see every file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jobs.bench import record
from jobs.conformance.bases import find_ffmpeg
from jobs.conformance.fuzz import todo_of
from qwen_ray.api import SAMPLES
from qwen_ray.config import DecodeConfig, JobConfig, SpeechConfig
from qwen_ray.stages.decode import DecodeStage
from qwen_ray.stages.rows import read_rows

EARLY = 100
"""Clips after which the first peak is taken."""

MOST_GROWTH = 0.1
"""By how much the last peak may lie above the first, as a share of it."""

SIZES = ("160x120", "640x360", "1280x720", "1920x1080")
CODECS = {
    "h264.mp4": ["-c:v", "libx264", "-preset", "veryfast", "-c:a", "aac"],
    "hevc.mkv": ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none", "-c:a", "libmp3lame"],
    "vp9.webm": ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-c:a", "libopus"],
    "mpeg4.avi": ["-c:v", "mpeg4", "-q:v", "8", "-c:a", "pcm_s16le"],
    "av1.mp4": ["-c:v", "libsvtav1", "-preset", "12", "-c:a", "aac"],
}
"""How the files are written: 2 s each, four clips."""

CONFIG = JobConfig(decode=DecodeConfig(window_s=0.5, num_frames=8), speech=SpeechConfig(engine="fake"))


@dataclass(frozen=True, slots=True)
class Reading:
    """Peaks of resident memory so far, in units of 2**20 bytes."""

    clips: int
    stage_mb: float
    decoder_mb: float


def render(folder: Path) -> list[Path]:
    """One file of each codec and size."""
    paths = []
    for size, (name, options) in itertools.product(SIZES, CODECS.items()):
        paths.append(folder / f"{size}-{name}")
        picture = ["-vf", f"scale={size.replace('x', ':')}:force_original_aspect_ratio=disable,format=yuv420p"]
        source = ["-ss", "1", "-t", "2", "-i", str(SAMPLES / "two-scenes.mp4")]
        command = [find_ffmpeg(), "-v", "error", "-y", *source, *picture, *options, str(paths[-1])]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return paths


def readings(paths: Sequence[Path], num_clips: int) -> Iterator[Reading]:
    """Peaks after every hundred clips of one stage."""
    stage, clips, due = DecodeStage(CONFIG), 0, EARLY
    first = None
    for path in itertools.cycle(paths):
        for table in stage(todo_of(path, want_speech=True)):
            clips += sum(row.kind == "clip" and row.body["status"] == "ok" for row in read_rows(table))
        assert stage.decoder_pid is not None
        first = first or stage.decoder_pid
        assert stage.decoder_pid == first, "the decoding process was replaced: its peak is not that of all clips"
        if clips >= due:
            due += EARLY
            yield Reading(clips, _peak_mb(os.getpid()), _peak_mb(stage.decoder_pid))
        if clips >= num_clips:
            stage.close()
            return


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def growth(taken: Sequence[Reading]) -> float:
    """By how much both processes together grew from the first reading to the last, as a share of the first."""
    first, last = (reading.stage_mb + reading.decoder_mb for reading in (taken[0], taken[-1]))
    return last / first - 1


def show(console: Console, taken: Sequence[Reading]) -> None:
    """The curve."""
    table = Table("clips", "stage, MiB", "decoder, MiB", title="peak resident memory", title_justify="left")
    for reading in taken:
        table.add_row(str(reading.clips), f"{reading.stage_mb:.0f}", f"{reading.decoder_mb:.0f}")
    console.print(table)
    console.print(f"growth from {taken[0].clips} to {taken[-1].clips} clips: {growth(taken):+.1%}")


def main() -> int:
    """Render, decode, read the peaks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="write the result to jobs/bench/results/")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        taken = list(readings(render(Path(scratch)), arguments.clips))
    show(console, taken)
    if arguments.write:
        about = record.about("peak resident memory of a decode worker, MiB", "jobs.conformance.memory")
        curve = [[reading.clips, round(reading.stage_mb, 1), round(reading.decoder_mb, 1)] for reading in taken]
        path = record.path_of("decode-memory")
        path.write_text(json.dumps(about | {"growth": round(growth(taken), 4), "curve": curve}, indent=1) + "\n")
        console.print(f"written to {path}")
    return int(growth(taken) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
