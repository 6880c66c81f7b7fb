"""How many captions are exactly right, through the whole product: render, H.264, decode, engine, tables.

    python -m jobs.bench.accuracy --scenes 600 [--preset tiny-qwen3] [--keep FOLDER] [--write]

Scenes show only combinations of colour, shape and motion that the embedded model was never trained on; files differ in
size, aspect, rate, duration, quality and rotation metadata. With `--write` the result goes to jobs/bench/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import qwen_ray
from jobs.assets.videos import Example, write_example
from jobs.bench import record
from qwen_ray.io.storage import file_name


def make_examples(folder: Path, count: int, seed: int) -> list[Example]:
    """`count` video files, side by side on all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        made = pool.map(write_example, [folder] * count, range(seed, seed + count), chunksize=4)
        return list(track(made, total=count, description="rendering"))


def caption_all(
    folder: Path, output: Path, preset: str, settings: list[str]
) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Captions by file name through an ordinary run, and the run's report."""
    report = qwen_ray.run(qwen_ray.configure(str(folder), str(output), preset=preset, set=["speech=null", *settings]))
    clips = qwen_ray.read_table(str(output), "clips", ["video_id", "caption", "clip_index"]).to_pylist()
    videos = qwen_ray.read_table(str(output), "videos", ["video_id", "uri", "num_clips"]).to_pylist()
    several = [video["uri"] for video in videos if video["num_clips"] != 1]
    if several:
        raise SystemExit(f"expected one clip each: {several[:3]}")
    by_id = {clip["video_id"]: clip["caption"] for clip in clips}
    named = {file_name(video["uri"]): by_id[video["video_id"]] for video in videos}
    return named, report.to_dict()


def right_by(examples: list[Example], captions: dict[str, str | None], field: str) -> dict[str, tuple[int, int]]:
    """Exactly right and all captions, by a property of the files."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for example in examples:
        value = getattr(example, field)
        name = f"{value // 6 * 6}-{value // 6 * 6 + 5}" if field == "crf" else f"{value:g}"
        counts[name][0] += captions[example.path.name] == example.caption
        counts[name][1] += 1
    return {name: (right, total) for name, (right, total) in sorted(counts.items())}


def show(console: Console, examples: list[Example], captions: dict[str, str | None]) -> None:
    """The figure, where it is lower, and every wrong caption."""
    wrong = [example for example in examples if captions[example.path.name] != example.caption]
    for example in wrong:
        facts = f"{example.width}x{example.height} {example.fps:g} fps crf {example.crf} turned {example.rotation_deg}"
        console.print(f"{example.path.name} {facts}", highlight=False)
        console.print(f"  truth   {example.caption}\n  caption {captions[example.path.name]}", highlight=False)
    table = Table("property", "value", "right", "of", title="exactly right captions", title_justify="left")
    for field in ("crf", "fps", "rotation_deg", "duration_s", "width"):
        for value, (right, total) in right_by(examples, captions, field).items():
            table.add_row(field, value, str(right), str(total))
    console.print(table)
    right = len(examples) - len(wrong)
    console.print(f"{right} of {len(examples)} captions exactly right: {right / len(examples):.2%}")


def result(examples: list[Example], captions: dict[str, str | None], report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a measurement."""
    right = sum(captions[example.path.name] == example.caption for example in examples)
    what = "exactly right captions on unseen combinations, through the whole product"
    return record.about(what, "jobs.bench.accuracy") | {
        "right": right,
        "scenes": len(examples),
        "fraction": right / len(examples),
        "by": {f: right_by(examples, captions, f) for f in ("crf", "fps", "rotation_deg", "duration_s", "width")},
        "wrong": [
            {**dataclasses.asdict(e), "path": e.path.name, "got": captions[e.path.name]}
            for e in examples
            if captions[e.path.name] != e.caption
        ],
        "run": {name: report[name] for name in ("planned", "videos", "clips", "elapsed_s")},
    }


def main() -> None:
    """Render, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--preset", choices=("tiny", "tiny-qwen3"), default="tiny")
    parser.add_argument("--keep", type=Path, help="folder for the videos and tables; by default they are removed")
    parser.add_argument("--write", action="store_true", help="write the result to jobs/bench/results/")
    parser.add_argument("--set", action="append", default=[], help="configuration, path=value")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        examples = make_examples(folder / "videos", arguments.scenes, arguments.seed)
        started = time.monotonic()
        captions, report = caption_all(folder / "videos", folder / "out", arguments.preset, arguments.set)
        console.print(f"run: {time.monotonic() - started:.1f} s")
        show(console, examples, captions)
        if arguments.write:
            path = record.path_of(f"accuracy-{arguments.preset}")
            path.write_text(json.dumps(result(examples, captions, report), indent=1))
            console.print(f"written to {path}")


if __name__ == "__main__":
    main()
