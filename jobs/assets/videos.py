"""Rendered scenes as real video files: H.264 of any size, rate, quality and rotation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import torch

from jobs.assets.shapes import Scene, caption, random_scene, render

SIZES = [
    (160, 120), (320, 240), (640, 480), (320, 180), (640, 360), (1280, 720), (854, 480), (240, 240),
    (480, 480), (720, 720), (120, 160), (240, 320), (480, 640), (180, 320), (360, 640), (480, 854),
]  # fmt: skip
"""(width, height) as shown."""
RATES: list[int | Fraction] = [10, 12, 15, 24, 25, Fraction(30_000, 1001), 30, 50, 60]
DURATIONS_S = [2, 3, 4, 5, 6, 8, 10, 12]
ROTATIONS_DEG = [0, 0, 0, 90, 180, 270]
PRESETS = ["ultrafast", "veryfast", "medium"]
MOST_PIXELS = 60_000_000
"""Of one file; a longer one is made at a lower rate."""


@dataclass(frozen=True, slots=True)
class Example:
    """A video file, how it was made, and its one right caption."""

    path: Path
    caption: str
    width: int
    height: int
    fps: float
    duration_s: float
    crf: int
    rotation_deg: int
    preset: str


def write_video(
    path: Path, frames_THWC: npt.NDArray[np.uint8], fps: Fraction, *, crf: int, rotation_deg: int, preset: str
) -> None:
    """Encode upright RGB frames. With a rotation they are stored turned, and metadata tells players to turn them
    back.
    """
    turned = np.rot90(frames_THWC, k=rotation_deg // 90, axes=(1, 2))
    height, width = turned.shape[1:3]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf), "preset": preset})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # the same bytes on every machine
        if rotation_deg:
            stream.set_display_rotation(-rotation_deg)  # it counts against the clock
        for picture in turned:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def render_all(scene: Scene, num_frames: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """All frames of a clip; drawn some at a time, since they are float32 while they are drawn."""
    times = [k / num_frames for k in range(num_frames)]
    parts = [render(scene, times[start : start + 16], height, width).numpy() for start in range(0, num_frames, 16)]
    return np.concatenate(parts)


def write_example(folder: Path, seed: int) -> Example:
    """One file of a scene whose combinations of colour, shape and motion were kept out of training."""
    choose = random.Random(seed)
    width, height = choose.choice(SIZES)
    fps, duration_s = Fraction(choose.choice(RATES)), choose.choice(DURATIONS_S)
    fps = min(fps, max(Fraction(8), Fraction(MOST_PIXELS // (width * height * duration_s))))
    crf, rotation_deg, preset = choose.randint(18, 35), choose.choice(ROTATIONS_DEG), choose.choice(PRESETS)
    num_frames = round(duration_s * fps)
    scene: Scene = random_scene(torch.Generator().manual_seed(seed), True, width / height)
    frames_THWC = render_all(scene, num_frames, height, width)
    path = folder / f"{seed:06d}.mp4"
    write_video(path, frames_THWC, fps, crf=crf, rotation_deg=rotation_deg, preset=preset)
    true_s = float(num_frames / fps)
    return Example(path, caption(scene), width, height, float(fps), true_s, crf, rotation_deg, preset)
