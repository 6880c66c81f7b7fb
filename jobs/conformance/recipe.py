"""How files are made: each recipe is a value, which runs, and which prints as the command that it is.

Made with ffmpeg: $FFMPEG, or the PATH's (5.1 or later). A recipe names the files that it is made from as `@NAME`.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jobs.conformance.burn import CELLS_WIDTH, beeps, level, strips

Find = Callable[[str], Path]
"""Where a file lies, by name; made first if need be."""


@functools.cache
def find_ffmpeg() -> str:
    """Where ffmpeg is. Raises FileNotFoundError."""
    found = os.environ.get("FFMPEG") or shutil.which("ffmpeg")
    if not found:
        raise FileNotFoundError("ffmpeg: not on the PATH, and $FFMPEG is not set")
    return found


def ffmpeg(*args: object, stdin: bytes | None = None) -> None:
    """Run ffmpeg, overwriting its output. Raises RuntimeError with its last words."""
    command = [find_ffmpeg(), "-hide_banner", "-loglevel", "error", "-y", *map(str, args)]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr.decode()[-1500:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Render:
    """Numbered, clocked frames over a moving test picture, and beeps if `audio` says how they are encoded."""

    video: tuple[str, ...]
    """Options of the output."""
    num_frames: int = 240
    size: tuple[int, int] = (320, 240)
    fps: str = "30"
    filters: str = ""
    """On the finished picture."""
    audio: tuple[str, ...] = ()
    first: int = 0
    """Number of the first frame."""
    times_s: tuple[Fraction, ...] = ()
    """What the clocks say, where that is not number / fps."""
    levels: bool = False
    """Grey levels instead of strips."""
    fields: bool = False
    """Two fields a frame: the test picture moves on between them, the number does not."""

    def args(self) -> list[str]:
        """ffmpeg's, but for the output's name; the strips come on standard input."""
        strip = ["-f", "rawvideo", "-pix_fmt", "gray", "-framerate", self.fps]
        if self.levels:
            width, height = self.size
            args = [*strip, "-video_size", "1x1", "-i", "-"]
            graph = f"[0:v]scale={width}:{height}:flags=neighbor"
        else:
            args, graph = self._over_test_picture(strip)
        graph += (f",{self.filters}" if self.filters else "") + "[v]"
        if self.audio:
            args += ["-f", "lavfi", "-i", beeps(self.num_frames / Fraction(self.fps))]
        args += ["-filter_complex", graph, "-map", "[v]"]
        if self.audio:
            args += ["-map", f"{1 if self.levels else 2}:a", *self.audio]
        return [*args, *self.video]

    def _over_test_picture(self, strip: list[str]) -> tuple[list[str], str]:
        width, height = self.size
        even_w, even_h = width + width % 2, height + height % 2  # testsrc2 likes even sizes; cropped afterwards
        rate = f"{self.fps}*2" if self.fields else self.fps
        args = ["-f", "lavfi", "-i", f"testsrc2=size={even_w}x{even_h}:rate={rate}"]
        args += [*strip, "-video_size", f"{CELLS_WIDTH}x2", "-i", "-"]
        graph = (
            f"[1:v]scale={even_w}:{max(even_h // 6, 4) * 2}:flags=neighbor[s];"
            f"[0:v][s]overlay=0:0:shortest=1:format=auto,crop={width}:{height}:0:0:exact=1"
        )
        return args, graph + (",tinterlace=interleave_top,fieldorder=tff" if self.fields else "")

    def run(self, out: Path, find: Find) -> None:
        """Make the file."""
        del find
        times = self.times_s or [k / Fraction(self.fps) for k in range(self.num_frames)]
        numbers = range(self.first, self.first + self.num_frames)
        draw = (
            [level(n) for n in numbers] if self.levels else [strips(n, t) for n, t in zip(numbers, times, strict=True)]
        )
        ffmpeg(*self.args(), out, stdin=b"".join(draw))

    def __str__(self) -> str:
        return f"strips | {shlex.join(['ffmpeg', *self.args()])} OUT"


def render(path: Path, num_frames: int = 240, **how: Any) -> None:
    """Make one file, out of any kitchen: see `Render`."""
    Render(num_frames=num_frames, **how).run(path, lambda name: path.with_name(name))


@dataclass(frozen=True, slots=True)
class Run:
    """ffmpeg on other files: `@NAME` stands for the path of one."""

    args: tuple[str, ...]

    def run(self, out: Path, find: Find) -> None:
        """Make the file."""
        ffmpeg(*[str(find(a[1:])) if a.startswith("@") else a for a in self.args], out)

    def __str__(self) -> str:
        return f"{shlex.join(['ffmpeg', *self.args])} OUT"


@dataclass(frozen=True, slots=True)
class Edit:
    """The bytes of other files, put together or damaged by a function of this package."""

    how: Callable[..., bytes]
    sources: tuple[str, ...] = ()
    args: tuple[object, ...] = ()

    def run(self, out: Path, find: Find) -> None:
        """Make the file."""
        out.write_bytes(self.how(*[find(name).read_bytes() for name in self.sources], *self.args))

    def __str__(self) -> str:
        return f"{self.how.__name__}({', '.join([*('@' + s for s in self.sources), *map(repr, self.args)])})"


Recipe = Render | Run | Edit


def run(*args: object) -> Run:
    """`Run`, as it is written."""
    return Run(tuple(map(str, args)))


def copy(source: str, *more: object) -> Run:
    """The streams of a file in another container or with other times."""
    return run("-i", f"@{source}", *more, "-c", "copy")


class Kitchen:
    """Makes files of a cookbook into a folder, each once, with what they are made from."""

    def __init__(self, folder: Path, cookbook: dict[str, Recipe]) -> None:
        self._folder, self._cookbook = folder, cookbook
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, name: str) -> Path:
        """The file called `name`, made now if it is not there."""
        path = self._folder / name
        if not path.exists():
            draft = path.with_name(f"draft-{os.getpid()}-{name}")  # others may make it too
            self._cookbook[name].run(draft, self.find)
            draft.replace(path)
        return path

    def make(self, names: Sequence[str]) -> None:
        """All of these."""
        for name in names:
            self.find(name)
