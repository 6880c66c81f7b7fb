"""How well cuts are found: precision, recall and F1 on rendered films, hard cuts and gradual transitions apart.

    python -m jobs.bench.shots [--films 24] [--seed 0] [--write]

Each film is a row of shots of moving test pictures (patterns, fractals, noise, colour gradients, slow pans over
stills), joined by hard cuts or by transitions of 0.3 to 1 s (dissolve, fade, wipe, slide, fade through black). A hard
cut is found only at its exact frame; a gradual one by a boundary inside its span. Every other boundary counts as false.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from jobs.bench import record
from jobs.conformance.recipe import ffmpeg
from qwen_ray.config import DecodeConfig
from qwen_ray.media.decode import decode_events
from qwen_ray.media.events import DecodeRequest
from qwen_ray.media.probe import examine
from qwen_ray.media.shots import cut_times_s

SIZE = "480x270"
RATES = ("24000/1001", "25", "30")
SOURCES = (
    "testsrc2=s={size}:r={fps}",
    "mandelbrot=s={size}:r={fps}:start_scale=0.8",
    "life=s={size}:r={fps}:mold=10:life_color=#{a}:death_color=#{b}:seed={seed}",
    "gradients=s={size}:r={fps}:c0=#{a}:c1=#{b}:speed=0.02:seed={seed}",
    "cellauto=s={size}:r={fps}:rule={rule}:seed={seed}",
    "color=#{a}:s={size}:r={fps},noise=alls=20:allf=t:all_seed={seed}",
    "smptehdbars=s=960x540:r={fps},crop=480:270:x='n':y='n/2',hue=h={hue}",
    "rgbtestsrc=s=960x540:r={fps},crop=480:270:x='n*2':y=100,hue=h={hue}",
    "testsrc=s={size}:r={fps},hue=h={hue},noise=alls=8:allf=t",
)
LEAD = 30
"""Frames of a source left out: the first ones of some are a picture of their own."""
TRANSITIONS = ("fade", "dissolve", "wipeleft", "slideup", "fadeblack")


@dataclass(frozen=True, slots=True)
class Film:
    """Its boundaries: (first, last) frame of each, equal for a hard cut, the first frame of the new shot."""

    path: Path
    boundaries: list[tuple[int, int]]


def _sources(draw: random.Random, fps: str, count: int) -> list[str]:
    """Shots, no two of one kind in a row: a jump within the same picture is no cut to another."""
    forms = [draw.choice(SOURCES)]
    while len(forms) < count:
        forms.append(draw.choice([form for form in SOURCES if form != forms[-1]]))
    return [_filled(form, draw, fps) for form in forms]


def _filled(form: str, draw: random.Random, fps: str) -> str:
    a, b = (f"{draw.randrange(1 << 24):06x}" for _ in range(2))
    rule, hue = draw.choice((30, 73, 110)), draw.randrange(360)
    return form.format(size=SIZE, fps=fps, a=a, b=b, seed=draw.randrange(1000), rule=rule, hue=hue)


def render(folder: Path, number: int, seed: int, gradual: bool) -> Film:
    """A film of eight shots of 1 to 4 s."""
    draw = random.Random(f"{seed}/{number}/{gradual}")
    fps = draw.choice(RATES)
    rate = 24 if "/" in fps else int(fps)
    lengths = [draw.randrange(rate + rate // 2, 4 * rate) for _ in range(8)]
    inputs: list[object] = []
    for source, length in zip(_sources(draw, fps, len(lengths)), lengths, strict=True):
        part = f"trim=start_frame={LEAD}:end_frame={LEAD + length},setpts=PTS-STARTPTS"
        inputs += ["-f", "lavfi", "-i", f"{source},{part},setsar=1,format=yuv420p"]
    graph, boundaries = _dissolved(draw, lengths, fps, rate) if gradual else _cut(lengths)
    path = folder / f"{'gradual' if gradual else 'hard'}-{number:03d}.mp4"
    codec = ["-c:v", "libx264", "-preset", "veryfast", "-crf", draw.choice((18, 23, 30)), "-bf", 2, "-g", 250]
    ffmpeg(*inputs, "-filter_complex", graph, "-map", "[v]", *codec, path)
    return Film(path, boundaries)


def _cut(lengths: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths) - 1)]
    graph = "".join(f"[{k}:v]" for k in range(len(lengths))) + f"concat=n={len(lengths)}:v=1:a=0[v]"
    return graph, [(end, end) for end in ends]


def _dissolved(draw: random.Random, lengths: Sequence[int], fps: str, rate: int) -> tuple[str, list[tuple[int, int]]]:
    graph, boundaries, length = f"[0:v]fps={fps}[x0]", [], lengths[0]
    for k in range(1, len(lengths)):
        span = draw.randrange(rate // 3, rate)
        begin = length - span
        second = eval_rate(fps)
        how = f"transition={draw.choice(TRANSITIONS)}:duration={span / second:.6f}:offset={begin / second:.6f}"
        out = "v" if k == len(lengths) - 1 else f"x{k}"
        graph += f";[{k}:v]fps={fps}[y{k}];[x{k - 1}][y{k}]xfade={how}[{out}]"
        boundaries.append((begin, begin + span))
        length += lengths[k] - span
    return graph, boundaries


def eval_rate(fps: str) -> float:
    """Frames a second of a rate such as 24000/1001."""
    numerator, _, denominator = fps.partition("/")
    return float(numerator) / float(denominator or 1)


def score(films: Sequence[Film], found: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Counts and F1."""
    hits = false = missed = 0
    for film, ranks in zip(films, found, strict=True):
        left = list(ranks)
        for first, last in film.boundaries:
            inside = [rank for rank in left if first <= rank <= last]
            hits, missed = hits + bool(inside), missed + (not inside)
            left = [rank for rank in left if rank not in inside[:1]]
        false += len(left)
    precision, recall = hits / max(hits + false, 1), hits / max(hits + missed, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    return {"hits": hits, "false": false, "missed": missed, "precision": precision, "recall": recall, "f1": f1}


def measure(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Both kinds of film, and what finding the cuts costs."""
    result: dict[str, Any] = {}
    minutes = spent_s = plain_s = 0.0
    for gradual in (False, True):
        films = [render(folder, k, seed, gradual) for k in track(range(count), description="rendering")]
        found = []
        for film in track(films, description="finding cuts"):
            examined = examine(str(film.path))
            began = time.monotonic()
            cuts_s = cut_times_s(examined, lambda: None)
            spent_s += time.monotonic() - began
            plain_s += _decode_fixed(film.path)
            minutes += examined.info.video_duration_s / 60
            found.append([examined.frame_times_s.index(cut_s) for cut_s in cuts_s])
        result["gradual" if gradual else "hard"] = score(films, found)
    costs = {"seconds_per_minute": spent_s / minutes, "fixed_seconds_per_minute": plain_s / minutes}
    return result | costs | {"size": SIZE}


def _decode_fixed(path: Path) -> float:
    """Seconds that index and frames of a file take with fixed windows: what the cuts come on top of."""
    began = time.monotonic()
    for _ in decode_events(DecodeRequest(path=str(path), decode=DecodeConfig())):
        pass
    return time.monotonic() - began


def main() -> None:
    """Render, find, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--films", type=int, default=24, help="of each kind, of eight shots each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the result to jobs/bench/results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.films, arguments.seed)
    console, table = Console(), Table("boundaries", "found", "missed", "false", "precision", "recall", "F1")
    for kind in ("hard", "gradual"):
        row = found[kind]
        shares = (f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
        table.add_row(kind, *(str(row[name]) for name in ("hits", "missed", "false")), *shares)
    console.print(table)
    cuts_s, fixed_s = found["seconds_per_minute"], found["fixed_seconds_per_minute"]
    console.print(f"{cuts_s:.1f} s a minute of {SIZE}, on top of {fixed_s:.1f} s for index and frames")
    if arguments.write:
        about = record.about("shot boundaries found on rendered films", "jobs.bench.shots")
        path = record.path_of("shots")
        path.write_text(json.dumps(about | found, indent=1))
        console.print(f"written to {path}")


if __name__ == "__main__":
    main()
