"""The `ffmpeg` command as a decoder: its frames come through a pipe with their times, in order, at their final size.

One process decodes the whole file once. It writes NUT, which carries each frame's time in the stream's own ticks, so
that frames are told apart as in `video`: by exact time, or by counting where times are missing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import IO, TYPE_CHECKING, cast

import av
import av.error
import numpy as np
import numpy.typing as npt

from qwen_ray.media.index import JUMPY, FirstPicture, VideoTrack
from qwen_ray.media.pictures import Turn, is_large
from qwen_ray.media.video import LOOKAHEAD, Picture, Taken

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

    from qwen_ray.media.probe import Examined

SCALE = "flags=bicubic+accurate_rnd+full_chroma_int+bitexact:out_range=pc"
"""As `pictures.Painter` scales."""


class CommandReader:
    """One file through one process. It ends with this one: its next write finds nobody, and whoever kills this process
    kills its group.
    """

    def __init__(
        self, examined: Examined, plan: Sequence[Sequence[int]], *, height: int, width: int, beat: Callable[[], None]
    ) -> None:
        assert examined.index.video is not None
        self._track, self._beat = examined.index.video, beat
        self._plan = [list(ranks) for ranks in plan]
        self._wraps = bool(JUMPY & set(examined.info.container.split(",")))
        self._lead = max(0, -self._track.pts[0])  # NUT has no times before 0, and would have ffmpeg move them all
        self._rank_of = {self._ticks(pts + self._lead): rank for rank, pts in enumerate(self._track.pts)}
        later = ("-output_ts_offset", f"{float(self._lead * self._track.tick_s):.6f}") if self._lead else ()
        scale = f"scale={width}:{height}:{_matrix(examined)}{SCALE}"
        self._process = _Process(examined, self._track, scale, *later)
        self._frames = self._ranked()
        self._ready: dict[int, Picture] = {}
        self._position = -1

    @property
    def num_errors(self) -> int:
        """See `Reader.num_errors`."""
        return self._process.num_complaints()

    def take(self, clip: int) -> Taken:
        """See `Reader.take`. From ffmpeg's first complaint on every frame counts as repaired: it does not say which."""
        wanted = self._plan[clip]
        ahead = frozenset(rank for ranks in self._plan[clip:] for rank in ranks)
        while any(rank not in self._ready for rank in wanted) and self._position < wanted[-1] + LOOKAHEAD:
            step = next(self._frames, None)
            if step is None:
                break
            self._position = max(self._position, step[0])
            if step[0] in ahead:
                picture_HWC = cast("npt.NDArray[np.uint8]", step[1].to_ndarray())
                self._ready[step[0]] = Picture(picture_HWC, self._process.num_complaints() > 0)
        found = [rank for rank in wanted if rank in self._ready]
        pictures = [self._ready[rank] for rank in found]
        last = wanted[-1] if wanted else -1
        self._ready = {rank: picture for rank, picture in self._ready.items() if rank >= last}
        return Taken(found, [p.picture_HWC for p in pictures], [p.suspect for p in pictures])

    def close(self) -> None:
        """See `Reader.close`."""
        self._process.close()

    def _ranked(self) -> Iterator[tuple[int, VideoFrame]]:
        for nth, (frame, _) in enumerate(self._process.frames()):
            self._beat()
            assert frame.pts is not None
            assert frame.time_base is not None
            rank = nth if self._track.by_count else self._rank(round(frame.pts * frame.time_base / self._track.tick_s))
            if rank >= 0:
                yield rank, frame

    def _rank(self, ticks: int) -> int:
        """-1 for a frame that is not shown. The offset of a clock that begins before 0 may be rounded by a tick."""
        near = (ticks, ticks + 1, ticks - 1) if self._lead else (ticks,)
        return next((self._rank_of[t] for t in map(self._ticks, near) if t in self._rank_of), -1)

    def _ticks(self, ticks: int) -> int:
        """Transport and program streams count in 33 bits, and ffmpeg unrolls them otherwise than a demuxer alone."""
        return ticks % (1 << 33) if self._wraps else ticks


class _Process:
    """ffmpeg, decoding one track to RGB in NUT."""

    def __init__(self, examined: Examined, track: VideoTrack, filters: str, *more: str) -> None:
        timing = ["-fps_mode", "passthrough", "-copyts", "-enc_time_base", "-1"]
        command = ["ffmpeg", "-nostdin", "-v", "error", "-threads", "1", "-protocol_whitelist", "file,pipe"]
        command += ["-i", "file:" + examined.path, "-map", f"0:{track.stream_index}", *timing, *more]
        command += ["-vf", filters] if filters else []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [*command, "-pix_fmt", "rgb24", "-c:v", "rawvideo", "-f", "nut", "pipe:1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def frames(self) -> Iterator[tuple[VideoFrame, Fraction]]:
        """All that come, in order of display, with their pixel aspect; none where nothing can be decoded."""
        nut = {"format": "nut", "metadata_errors": "ignore"}
        with contextlib.suppress(av.error.FFmpegError), av.open(self._process.stdout, **nut) as container:
            stream = container.streams.video[0]
            for frame in container.decode(stream):
                yield frame, stream.sample_aspect_ratio or Fraction(1)

    def num_complaints(self) -> int:
        """Lines that ffmpeg has logged so far."""
        size = os.fstat(self._log.fileno()).st_size  # read in place: ffmpeg writes at the position that we would move
        return os.pread(self._log.fileno(), size, 0).count(b"\n")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def seen_by_ffmpeg(examined: Examined) -> Examined | None:
    """With what the command says of a picture that PyAV cannot decode; None where it cannot either."""
    assert examined.index.video is not None
    process = _Process(examined, examined.index.video, "", "-frames:v", "1")
    try:
        frame, sar = next(process.frames(), (None, Fraction(1)))
    finally:
        process.close()
    if frame is None:
        return None
    first, aspect = FirstPicture(None, frame.height, frame.width, Turn()), f"{sar.numerator}:{sar.denominator}"
    info = replace(examined.info, height=first.height, width=first.width, sar=aspect)
    index = replace(examined.index, video=replace(examined.index.video, first=first))
    return replace(examined, info=info, index=index)


def _matrix(examined: Examined) -> str:
    """The option for pictures that name no matrix, as `pictures` assumes it; ffmpeg itself takes BT.601 for all."""
    assert examined.index.video is not None
    named = examined.info.tracks[examined.index.video.stream_index].get("color_matrix")
    large = is_large(examined.info.height, examined.info.width)
    return "in_color_matrix=bt709:" if named is None and large else ""
