"""torchcodec and decord, which name frames by their index in order of display."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import numpy.typing as npt

from qwen_ray.errors import InputError
from qwen_ray.media.pictures import Painter, Turn
from qwen_ray.media.video import Taken

if TYPE_CHECKING:
    from qwen_ray.media.probe import Examined

AT_ONCE = 16
"""Pictures asked for in one call, 100 MB at 1080p."""

GetFrames = Callable[[list[int]], npt.NDArray[np.uint8]]
"""From indices to upright pictures [T, H, W, C] as stored."""


class LibraryReader:
    """One file through one of the libraries. They turn pictures upright themselves, and tell nothing of damage."""

    num_errors = 0

    def __init__(
        self,
        library: str,
        examined: Examined,
        plan: Sequence[Sequence[int]],
        *,
        height: int,
        width: int,
        beat: Callable[[], None],
    ) -> None:
        assert examined.index.video is not None
        self._library, self._name = library, Path(examined.path).name
        self._plan, self._painter, self._beat = [list(ranks) for ranks in plan], Painter(height, width), beat
        open_file = _torchcodec if library == "torchcodec" else _decord
        count, self._get = self._mapped(lambda: open_file(examined.path, examined.index.video.stream_index))  # type: ignore[union-attr]
        if count != examined.info.num_frames:
            raise InputError(
                "unreadable",
                f"{self._name}: {library} counts {count} frames where the file shows {examined.info.num_frames}, "
                "so its indices name other moments; decode.decoder=auto reads it",
            )

    def take(self, clip: int) -> Taken:
        """See `Reader.take`."""
        ranks = self._plan[clip]
        pictures = []
        for part in (ranks[k : k + AT_ONCE] for k in range(0, len(ranks), AT_ONCE)):
            self._beat()
            for stored_HWC in self._mapped(functools.partial(self._get, part)):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(stored_HWC), format="rgb24")
                pictures.append(self._painter.paint(frame, Turn()))
        return Taken(ranks, pictures, [False] * len(ranks))

    def close(self) -> None:
        """See `Reader.close`."""
        del self._get

    def _mapped(self, act: Callable[[], Any]) -> Any:
        """What `act` gives; whatever the library raises is about the file."""
        try:
            return act()
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  neither says what it may raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError("unreadable", f"{self._name}: {self._library}: {said}") from None


def _torchcodec(path: str, stream_index: int) -> tuple[int, GetFrames]:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, stream_index=stream_index, dimension_order="NHWC", num_ffmpeg_threads=1)
    return len(decoder), lambda ranks: decoder.get_frames_at(ranks).data.numpy()


def _decord(path: str, stream_index: int) -> tuple[int, GetFrames]:
    import decord

    del stream_index  # it cannot be told which; where it takes another, the count mostly differs
    reader = decord.VideoReader(path, num_threads=1)
    return len(reader), lambda ranks: reader.get_batch(ranks).asnumpy()
