"""Rendered scenes as caption requests, with their truth."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from jobs.assets.shapes import caption, random_scene
from jobs.assets.videos import render_all, write_video
from qwen_ray.config import preset
from qwen_ray.engines.protocol import CaptionRequest, Medium
from qwen_ray.media.decode import decode_clip

PROMPT = "Describe the video."
SIZES = [(320, 240), (320, 180), (240, 240), (240, 320), (180, 320)]


def filmed(folder: Path, count: int, seed: int = 5_000_000, model: str = "tiny") -> list[tuple[CaptionRequest, str]]:
    """Requests from H.264 files of scenes that training left out, decoded as a run decodes them, and the right
    captions; frames are cut as the preset `model` has it.
    """
    return [_filmed(folder, seed + number, SIZES[number % len(SIZES)], model) for number in range(count)]


def _filmed(folder: Path, seed: int, size: tuple[int, int], model: str) -> tuple[CaptionRequest, str]:
    width, height = size
    scene = random_scene(torch.Generator().manual_seed(seed), True, width / height)
    path = folder / f"{seed}.mp4"
    frames_THWC = render_all(scene, 36, height, width)
    write_video(path, frames_THWC, Fraction(12), crf=23, rotation_deg=0, preset="veryfast")
    clip = decode_clip(str(path), 0.0, 3.0, preset(model).decode)
    return request(str(seed), clip.frames_THWC, clip.frame_times_s), caption(scene)


def request(clip_id: str, frames_THWC: np.ndarray, times_s: list[float]) -> CaptionRequest:
    """A request with the prompt of the tiny preset."""
    return CaptionRequest(clip_id, (Medium(np.ascontiguousarray(frames_THWC), tuple(times_s)),), PROMPT)
