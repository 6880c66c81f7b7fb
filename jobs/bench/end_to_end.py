"""How fast a whole run is on one GPU: captions and speech through Ray on one card, and where the time goes.

    python -m jobs.bench.end_to_end --preset qwen2.5-vl-7b --model FOLDER --speech-model FOLDER --videos 40 [--write]

It renders distinct videos (640x360, 30 fps, 60 s, five clips each, with real synthetic speech as sound), measures the
caption engine alone on frames of the same shape, then runs `qwen_ray.run` and compares. Checkpoints may have random
weights (`jobs.bench.random_model`): every answer then has all its tokens, which the result says.

The share of time in which kernels run comes from the profiler, for some seconds (`qwen_ray.engines.trace`); power from
NVML, ten times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.filter import Graph
from rich.console import Console
from rich.table import Table

import qwen_ray
from jobs.bench import record
from qwen_ray.api import SAMPLES
from qwen_ray.config import to_dict
from qwen_ray.engines.trace import VARIABLE
from qwen_ray.runner import Progress

FPS, SECONDS, WIDTH, HEIGHT = 30, 60, 640, 360
SAMPLE_RATE_HZ = 16_000


def speech_pcm() -> np.ndarray[Any, np.dtype[np.int16]]:
    """The sound of a sample video, int16 mono, over and over for `SECONDS`."""
    resampler = av.AudioResampler("s16", "mono", SAMPLE_RATE_HZ)
    with av.open(str(SAMPLES / "two-scenes.mp4")) as container:
        parts = [out.to_ndarray()[0] for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    return np.resize(np.concatenate(parts), SECONDS * SAMPLE_RATE_HZ).astype(np.int16)


def write_video(path: Path, number: int) -> None:
    """A moving test picture with noise of its own, and speech."""
    graph = Graph()
    source = graph.add("testsrc2", f"size={WIDTH}x{HEIGHT}:rate={FPS}:duration={SECONDS}")
    noise = graph.add("noise", f"alls=12:allf=t:all_seed={number + 1}")
    hue = graph.add("hue", f"h={number * 37 % 360}")
    form, sink = graph.add("format", "yuv420p"), graph.add("buffersink")
    for one, next_one in ((source, noise), (noise, hue), (hue, form), (form, sink)):
        one.link_to(next_one)
    graph.configure()
    with av.open(str(path), "w") as container:
        picture = container.add_stream("libx264", rate=FPS, options={"preset": "superfast", "crf": "26"})
        picture.width, picture.height, picture.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        picture.codec_context.thread_count = 1
        sound = container.add_stream("aac", rate=SAMPLE_RATE_HZ, layout="mono")
        for index in range(FPS * SECONDS):
            frame = graph.pull()
            assert isinstance(frame, av.VideoFrame)
            frame.pts, frame.time_base = index, Fraction(1, FPS)
            container.mux(picture.encode(frame))
        container.mux(picture.encode(None))
        samples = av.AudioFrame.from_ndarray(speech_pcm()[None], format="s16", layout="mono")
        samples.sample_rate, samples.pts = SAMPLE_RATE_HZ, 0
        container.mux(sound.encode(samples))
        container.mux(sound.encode(None))


def make_videos(folder: Path, count: int) -> None:
    """`count` files, side by side on all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_video, [folder / f"{k:04d}.mp4" for k in range(count)], range(count)))


@contextmanager
def power(samples: list[tuple[float, float]]) -> Iterator[None]:
    """Append (unix time, watts) of the first GPU ten times a second; nothing where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # noqa: BLE001  no library, no driver, or no card: the figure is then missing
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            samples.append((time.time(), pynvml.nvmlDeviceGetPowerUsage(card) / 1000))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def engine_alone(job: qwen_ray.JobConfig) -> dict[str, Any]:
    """The caption engine without anything around it, in a process of its own: its speed."""
    facts = {"job": to_dict(job), "height": HEIGHT, "width": WIDTH}
    command = [sys.executable, "-m", "jobs.bench.engine_alone", json.dumps(facts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the engine alone failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(job: qwen_ray.JobConfig, trace: Path) -> tuple[dict[str, float], list[tuple[float, float]], dict[str, Any]]:
    """Seconds by phase, power samples, and the run's report."""
    os.environ[VARIABLE] = str(trace)
    phases: list[tuple[str, float]] = [("listing", time.time())]

    def note(progress: Progress) -> None:
        if progress.phase != phases[-1][0]:
            phases.append((progress.phase, time.time()))
            step(progress.phase)

    watts: list[tuple[float, float]] = []
    with power(watts):
        report = qwen_ray.run(job, on_progress=note)
    phases.append(("end", time.time()))
    seconds: dict[str, float] = {}
    for (name, began), (_, ended) in pairwise(phases):
        seconds[name] = round(seconds.get(name, 0.0) + ended - began, 2)
    return seconds, watts, report.to_dict()


def read_trace(folder: Path, engine: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The batches of all engines of a kind in order, and the profile of one."""
    lines = [json.loads(line) for path in folder.glob(f"{engine}-*.jsonl") for line in path.read_text().splitlines()]
    batches = sorted((line for line in lines if line["event"] == "work"), key=lambda line: float(line["began"]))
    return batches, next((line for line in lines if line["event"] == "kernels"), None)


def steady(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """From the first answer to the last: answers a second, share of time at work, rows of a piece of work."""
    first = next((k for k, batch in enumerate(batches) if batch["answered"]), len(batches))
    later = batches[first + 1 :]
    if not later:
        return {"batches": len(batches)}
    began, ended = batches[first]["ended"], batches[-1]["ended"]
    busy_s = sum(batch["ended"] - batch["began"] for batch in later)
    return {
        "batches": len(batches),
        "from_to": [began, ended],
        "seconds": ended - began,
        "rows_per_s": sum(batch["answered"] for batch in later) / (ended - began),
        "busy_share": busy_s / (ended - began),
        "mean_batch": statistics.mean(batch["rows"] for batch in later),
    }


def step(words: str) -> None:
    """A line of progress with the time of day."""
    print(f"{datetime.now(UTC):%H:%M:%S} {words}", flush=True)


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All figures of one model."""
    settings = [*arguments.set, *([f"caption.model={arguments.model}"] if arguments.model else [])]
    settings += [f"speech.model={arguments.speech_model}"] if arguments.speech_model else []
    videos, trace = scratch / "videos", scratch / "trace"
    trace.mkdir(parents=True)
    step(f"rendering {arguments.videos} videos")
    make_videos(videos, arguments.videos)
    job = qwen_ray.configure(str(videos), str(scratch / "out"), preset=arguments.preset, set=settings)
    step("the engine alone" if arguments.alone else "the run")
    alone = engine_alone(job) if arguments.alone else None
    started = time.time()
    phases, watts, report = run(job, trace)
    elapsed_s = time.time() - started
    clips = qwen_ray.read_table(str(scratch / "out"), "clips", ["status", "num_output_tokens", "num_prompt_tokens"])
    segments = qwen_ray.read_table(str(scratch / "out"), "segments", ["status"]).num_rows
    captions, kernels = read_trace(trace, "qwen-vl")
    speech, speech_kernels = read_trace(trace, "whisper")
    at_work = steady(captions)
    began, ended = at_work.get("from_to", (started, started + elapsed_s))
    return {
        "clips": clips.num_rows,
        "segments": segments,
        "tokens": {name: sum(clips[name].to_pylist()) for name in ("num_prompt_tokens", "num_output_tokens")},
        "elapsed_s": elapsed_s,
        "clips_per_s_with_start": clips.num_rows / elapsed_s,
        "phases_s": phases,
        "engine_alone": alone,
        "captions": at_work,
        "of_engine_alone": alone and at_work.get("rows_per_s", 0.0) / alone["clips_per_s"],
        "speech": steady(speech),
        "audio_s_per_s": arguments.videos * SECONDS / elapsed_s,
        "kernels": {"captions": _share(kernels), "speech": _share(speech_kernels)},
        "power_w": statistics.mean([w for at, w in watts if began <= at <= ended] or [0.0]) or None,
        "report": {name: report[name] for name in ("videos", "clips", "errors")},
        "config": to_dict(job),
    }


def _share(kernels: dict[str, Any] | None) -> dict[str, Any] | None:
    return kernels and kernels | {"share": kernels["kernel_s"] / kernels["window_s"]}


def show(console: Console, found: dict[str, Any]) -> None:
    """The figures for people."""
    table = Table("figure", "value", title="end to end", title_justify="left")
    alone, captions = found["engine_alone"], found["captions"]
    rows = {
        "clips": found["clips"],
        "clips/s, start to end": f"{found['clips_per_s_with_start']:.2f}",
        "clips/s in the steady part": f"{captions.get('rows_per_s', 0):.2f}",
        "clips/s of the engine alone": f"{alone['clips_per_s']:.2f}" if alone else "not measured",
        "share of the engine alone": f"{found['of_engine_alone']:.1%}" if alone else "not measured",
        "caption engine at work": f"{captions.get('busy_share', 0):.1%}",
        "clips a batch": f"{captions.get('mean_batch', 0):.1f}",
        "speech engine at work": f"{found['speech'].get('busy_share', 0):.1%}",
        "audio s/s, start to end": f"{found['audio_s_per_s']:.1f}",
        "mean power": f"{found['power_w']:.0f} W" if found["power_w"] else "not measured",
    }
    for name, kernels in found["kernels"].items():
        rows[f"kernel time, {name}"] = f"{kernels['share']:.1%}" if kernels else "not measured"
    for name, seconds in found["phases_s"].items():
        rows[f"phase: {name}"] = f"{seconds:.1f} s"
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="qwen2.5-vl-7b")
    parser.add_argument("--model", default="", help="checkpoint instead of the preset's")
    parser.add_argument("--speech-model", default="", help="checkpoint instead of the preset's")
    parser.add_argument("--videos", type=int, default=40)
    parser.add_argument("--no-alone", dest="alone", action="store_false", help="leave the engine alone out")
    parser.add_argument("--random", action="store_true", help="say in the result that the weights are random")
    parser.add_argument("--commit", default="", help="of the code, where it is no git checkout")
    parser.add_argument("--set", action="append", default=[], help="configuration, path=value")
    parser.add_argument("--write", type=Path, nargs="?", const=record.RESULTS, help="write the result to this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(arguments, Path(scratch))
    console = Console()
    show(console, found)
    if arguments.write:
        what = "a whole run on one machine, captions and speech on one card"
        what += ", random weights: every caption has all its tokens" if arguments.random else ""
        about = record.about(what, "jobs.bench.end_to_end", arguments.commit)
        path = record.path_of(f"end-to-end-{arguments.preset}", arguments.write)
        path.write_text(json.dumps(about | found, indent=1))
        console.print(f"written to {path}")


if __name__ == "__main__":
    main()
