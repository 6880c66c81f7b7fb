"""Small sound files of many kinds, to be damaged: 1.2 s, 160x120, 10 frames a second, most with speech."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from qwen_ray.api import SAMPLES

H264 = ["-c:v", "libx264", "-preset", "veryfast", "-g", "6", "-bf", "2"]
AAC = ["-c:a", "aac", "-b:a", "24k"]
PICTURE = ["-vf", "scale=160:120,fps=10,format=yuv420p"]
BASES: dict[str, list[str]] = {
    "h264.mp4": [*H264, *AAC],
    "faststart.mp4": [*H264, *AAC, "-movflags", "+faststart"],
    "fragmented.mp4": [*H264, *AAC, "-movflags", "frag_keyframe+empty_moov+default_base_moof"],
    "h264.mkv": [*H264, "-c:a", "libmp3lame", "-b:a", "32k"],
    "h264.ts": [*H264, *AAC],
    "h264.flv": [*H264, *AAC],
    "h264.avi": [*H264, "-c:a", "libmp3lame", "-b:a", "32k"],
    "hevc.mp4": ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none:keyint=6", *AAC],
    "vp9.webm": ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8", "-b:v", "60k", "-c:a", "libopus"],
    "av1.mp4": ["-c:v", "libsvtav1", "-preset", "12", "-svtav1-params", "lp=1", "-an"],
    "mpeg2.mpg": ["-c:v", "mpeg2video", "-g", "6", "-r", "25", "-b:v", "100k", "-c:a", "mp2", "-b:a", "64k"],
    "mpeg4.avi": ["-c:v", "mpeg4", "-g", "6", "-b:v", "80k", "-c:a", "pcm_s16le"],
    "mjpeg.mov": ["-c:v", "mjpeg", "-q:v", "20", "-pix_fmt", "yuvj420p", "-c:a", "pcm_s16le"],
    "anim.gif": ["-an", "-r", "5"],
}
"""How ffmpeg writes each file: from a sample with speech in it."""


@functools.cache
def find_ffmpeg() -> str:
    """$FFMPEG, the PATH's, or that of the package imageio-ffmpeg."""
    found = os.environ.get("FFMPEG") or shutil.which("ffmpeg")
    if found:
        return found
    import imageio_ffmpeg  # type: ignore[import-untyped]

    return str(imageio_ffmpeg.get_ffmpeg_exe())


def render(folder: Path) -> dict[str, bytes]:
    """The undamaged files, by name."""
    source = ["-ss", "0.8", "-t", "1.2", "-i", SAMPLES / "two-scenes.mp4", "-threads", "1"]
    for name, options in BASES.items():
        command = [find_ffmpeg(), "-v", "error", "-y", *source, *PICTURE, "-ac", "1", *options, folder / name]
        subprocess.run([str(part) for part in command], check=True, stderr=subprocess.DEVNULL)
    return {name: (folder / name).read_bytes() for name in BASES}
