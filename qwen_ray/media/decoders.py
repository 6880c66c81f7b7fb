"""Which decoder takes a file's pictures: chosen once for each file, recorded with each clip.

PyAV, read by exact display times (`video.FrameReader`), is the default because it is the only one that was right on
every file of the conformance suite (docs/conformance.md), and because it decodes what any of the others does. The
`ffmpeg` command follows where PyAV has no decoder for a picture, or its decoder makes nothing of it: a machine's own
build may. torchcodec and decord are there for who asks for them: they name frames by index, and where their count of
frames is not the file's, the file fails instead of showing other moments.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from qwen_ray.config import DecodeConfig
from qwen_ray.errors import ConfigError

if TYPE_CHECKING:
    from qwen_ray.media.probe import Examined
    from qwen_ray.media.video import Taken

Name = Literal["pyav", "ffmpeg", "torchcodec", "decord"]


class Reader(Protocol):
    """Takes clip after clip out of one file."""

    @property
    def num_errors(self) -> int:
        """Pieces of data so far that could not be read or decoded."""

    def take(self, clip: int) -> Taken:
        """The frames of `clip`; call for ascending clips."""

    def close(self) -> None:
        """Let go of the file."""


def check_installed(decode: DecodeConfig) -> None:
    """Raise ConfigError where this machine lacks what the configuration asks for."""
    if decode.windows == "shots" and importlib.util.find_spec("scenedetect") is None:
        raise ConfigError("decode.windows = 'shots': PySceneDetect is missing; pip install 'qwen-ray[shots]'")
    if decode.decoder == "ffmpeg" and shutil.which("ffmpeg") is None:
        raise ConfigError("decode.decoder = 'ffmpeg': there is no ffmpeg command on the PATH; install ffmpeg")
    if decode.decoder in ("torchcodec", "decord"):
        _check_library(decode.decoder)


def _check_library(name: str) -> None:
    """By importing it: both may be installed and fail to load, which would make every file an unreadable one."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"decode.decoder = {name!r}: it is not installed; pip install {name}")
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"decode.decoder = {name!r}: it is installed and cannot be loaded ({said}); install a version of it that "
            "fits this machine's torch and FFmpeg, or leave decode.decoder at auto"
        ) from None


def choose(decode: DecodeConfig, examined: Examined) -> tuple[Name, Examined]:
    """The decoder of one file, and the file as that sees it."""
    video = examined.index.video
    if video is not None and video.first is None and decode.decoder in ("auto", "ffmpeg") and shutil.which("ffmpeg"):
        from qwen_ray.media.command import seen_by_ffmpeg

        seen = seen_by_ffmpeg(examined)
        if seen is not None:
            return "ffmpeg", seen
    return ("pyav" if decode.decoder == "auto" else decode.decoder), examined


def open_reader(
    name: Name,
    examined: Examined,
    plan: Sequence[Sequence[int]],
    *,
    height: int,
    width: int,
    beat: Callable[[], None],
) -> Reader:
    """A reader that will take the frames of `plan` (frames by rank of display, per clip, ascending).

    Raises:
        InputError: `unreadable` where the decoder cannot open the file or counts its frames otherwise.
    """
    match name:
        case "pyav":
            from qwen_ray.media.video import FrameReader

            return FrameReader(examined, plan, height=height, width=width, beat=beat)
        case "ffmpeg":
            from qwen_ray.media.command import CommandReader

            return CommandReader(examined, plan, height=height, width=width, beat=beat)
        case _:
            from qwen_ray.media.libraries import LibraryReader

            return LibraryReader(name, examined, plan, height=height, width=width, beat=beat)
