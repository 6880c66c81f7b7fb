"""The frames of a video that are wanted, and no others: never the picture of another moment in a frame's place.

A frame is taken only when its time EQUALS the wanted one, which was read from the packets beforehand. Seeking by time
and taking what comes, as most readers do, was silently wrong on MPEG-TS, MPEG-PS, AVI and trimmed MP4. Where times are
missing or repeat, the decoder's output is counted instead.

Legend: T frames, H rows, W columns, C the three colours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import numpy.typing as npt

from qwen_ray.media.container import PacketReader, open_input
from qwen_ray.media.index import INDEXED
from qwen_ray.media.pictures import Decoded, Painter, PictureDecoder
from qwen_ray.media.probe import Examined

if TYPE_CHECKING:
    from av.packet import Packet
    from av.stream import Stream
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

SEEK_PACKETS = 12
"""Packets that a seek must save: it costs about as much as decoding a few small frames."""

LOOKAHEAD = 16
"""Frames past a wanted one after which it is given up: more than any decoder reorders."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One frame, converted."""

    picture_HWC: npt.NDArray[np.uint8]
    suspect: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The frames of one clip that could be had."""

    ranks: list[int]
    """Which frames, in order of display."""
    pictures_HWC: list[npt.NDArray[np.uint8]]
    """Their pictures."""
    suspect: list[bool]
    """Whether damaged data went into each."""

    @property
    def num_repaired(self) -> int:
        """How many of them damaged data went into."""
        return sum(self.suspect)

    def only(self, chosen: Sequence[int]) -> Taken:
        """Some of them, by position."""
        columns = (self.ranks, self.pictures_HWC, self.suspect)
        return Taken(*([column[k] for k in chosen] for column in columns))  # type: ignore[arg-type]


class FrameReader:
    """Walks once through a video and takes clip after clip out of it.

    Between wanted frames it passes over frames that no other needs and seeks where the next wanted frame's key frame
    lies well ahead. If a frame fails to turn up in spite of sound data, these shortcuts are given up for this file and
    it is read again in order.
    """

    def __init__(
        self, examined: Examined, plan: Sequence[Sequence[int]], *, height: int, width: int, beat: Callable[[], None]
    ) -> None:
        """Prepare to take the frames of `plan` (frames by rank of display, per clip, ascending) at the given size."""
        assert examined.index.video is not None
        assert examined.index.video.first is not None
        self._examined, self._track = examined, examined.index.video
        self._turn = examined.index.video.first.turn
        self._plan = [list(ranks) for ranks in plan]
        self._painter = Painter(height, width)
        self._beat = beat
        self._shortcuts = not self._track.by_count
        self._past_errors = 0
        self._ready: dict[int, Picture] = {}
        self._walk = self._new_walk(0)
        self._frames = self._walk.frames()
        self._position = -1

    @property
    def num_errors(self) -> int:
        """Packets so far that could not be read or decoded."""
        return self._past_errors + self._walk.num_errors

    def take(self, clip: int) -> Taken:
        """The frames of `clip`; call for ascending clips."""
        wanted = self._plan[clip]
        errors = self.num_errors
        self._collect(wanted)
        lost = any(rank not in self._ready for rank in wanted)
        if lost and self._shortcuts and self._walk.took_shortcut and self.num_errors == errors:
            self._shortcuts = False
            self._restart(clip)
            self._collect(wanted)
        return self._hand_over(wanted)

    def close(self) -> None:
        """Close the file."""
        self._walk.close()

    def _restart(self, clip: int) -> None:
        self._past_errors += self._walk.num_errors
        self._walk.close()
        self._walk = self._new_walk(clip)
        self._frames = self._walk.frames()
        self._position = -1

    def _new_walk(self, clip: int) -> _Walk:
        ahead = sorted({rank for ranks in self._plan[clip:] for rank in ranks} - self._ready.keys())
        return _Walk(self._examined, ahead, self._shortcuts, self._beat)

    def _collect(self, wanted: list[int]) -> None:
        """Decode on until every wanted frame is there or cannot come any more."""
        if not wanted:
            return
        while any(rank not in self._ready for rank in wanted) and self._position < wanted[-1] + LOOKAHEAD:
            step = next(self._frames, None)
            if step is None:
                return
            rank, decoded = step
            self._position = max(self._position, rank)
            if self._walk.is_wanted(rank) and rank not in self._ready:
                picture = self._painter.paint(decoded.frame, self._turn)
                self._ready[rank] = Picture(picture, decoded.suspect)

    def _hand_over(self, wanted: list[int]) -> Taken:
        found = [rank for rank in wanted if rank in self._ready]
        pictures = [self._ready[rank] for rank in found]
        last = wanted[-1] if wanted else -1
        # the last one may stay on screen into the next clip
        self._ready = {rank: picture for rank, picture in self._ready.items() if rank >= last}
        return Taken(found, [p.picture_HWC for p in pictures], [p.suspect for p in pictures])


def every_frame(examined: Examined, beat: Callable[[], None]) -> Iterator[tuple[int, VideoFrame]]:
    """(rank of display, frame) of all frames that decode, in order, in one pass."""
    walk = _Walk(examined, [], shortcuts=False, beat=beat)
    try:
        for rank, decoded in walk.frames():
            yield rank, decoded.frame
    finally:
        walk.close()


class _Walk:
    """Frames with their ranks, from the start of the file onwards, jumping ahead where that is allowed and pays.

    It must not hold its own generator: the cycle would keep a decoder's buffers (30 MB at 1080p) until some later
    garbage collection, which does not see them.
    """

    def __init__(self, examined: Examined, ahead: list[int], shortcuts: bool, beat: Callable[[], None]) -> None:
        assert examined.index.video is not None
        self._track = examined.index.video
        self._ahead, self._wanted, self._beat = ahead, frozenset(ahead), beat
        self._container = open_input(examined.path)
        self._stream = cast("VideoStream", self._container.streams[self._track.stream_index])
        self._decoder = PictureDecoder(self._stream)
        self._skips = shortcuts
        self._keys_alone = shortcuts and self._wanted <= set(self._track.key_ranks())
        self._seeks = shortcuts and bool(INDEXED & set(self._container.format.name.split(",")))
        self._rank_of = {} if self._track.by_count else {pts: rank for rank, pts in enumerate(self._track.pts)}
        self._ordinal_of = {pts: n for n, pts in enumerate(self._track.packet_pts)} if self._seeks else {}
        self._at = -1  # ordinal of the last packet read, from the first key frame on
        self._jumped_to = 0
        self._passed = -1  # highest rank that came out
        self._counted = 0
        self._read_errors = 0
        self._reader = self._open_reader()
        self.took_shortcut = False

    @property
    def num_errors(self) -> int:
        return self._read_errors + self._reader.num_errors + self._decoder.num_errors

    def is_wanted(self, rank: int) -> bool:
        return rank in self._wanted

    def close(self) -> None:
        self._container.close()

    def _open_reader(self) -> PacketReader:
        return PacketReader(self._container, cast("Stream", self._stream))

    def frames(self) -> Iterator[tuple[int, Decoded]]:
        """(rank, frame) of all that comes out of the decoder; to be called once."""
        jumped = True
        while jumped:
            jumped = False
            for packet in self._reader:
                self._beat()
                if not self._locate(packet):
                    continue
                yield from self._ranked(self._decode(cast("Packet[VideoStream]", packet)))
                if self._jump():
                    jumped = True
                    break
        yield from self._ranked(self._decoder.flush())

    def _locate(self, packet: Packet[Stream]) -> bool:
        """Update the position; False for packets before the first key frame, which cannot be decoded."""
        if self._at < 0 and not packet.is_keyframe:
            return False
        self._at = self._ordinal_of.get(cast(int, packet.pts), self._at + 1)
        return True

    def _decode(self, packet: Packet[VideoStream]) -> list[Decoded]:
        if self._skips:
            idle = self._at > 0 and self._rank_of.get(cast(int, packet.pts), -1) not in self._wanted
            passed_over: Literal["NONREF", "NONKEY"] = "NONKEY" if self._keys_alone else "NONREF"
            self._decoder.skip(passed_over if idle else "DEFAULT")
            self.took_shortcut = self.took_shortcut or idle
        return self._decoder.decode(packet)

    def _ranked(self, frames: list[Decoded]) -> Iterator[tuple[int, Decoded]]:
        for decoded in frames:
            if self._track.by_count:
                rank = self._counted + decoded.num_errors  # a packet that failed took its frame with it
                self._counted += 1
            else:
                rank = self._rank_of.get(cast(int, decoded.frame.pts), -1)
            if rank >= 0:
                self._passed = max(self._passed, rank)
                yield rank, decoded

    def _jump(self) -> bool:
        """Seek to the key frame of the next wanted frame, if it lies well ahead. Returns whether it did."""
        target = self._next_key_packet() if self._seeks else None
        if target is None or target <= self._jumped_to or target - self._at < SEEK_PACKETS:
            return False
        self.took_shortcut, self._jumped_to = True, target
        self._read_errors += self._reader.num_errors
        self._container.seek(self._track.packet_pts[target], stream=cast("Stream", self._stream), backward=True)
        self._reader = self._open_reader()
        return True

    def _next_key_packet(self) -> int | None:
        """Ordinal of the key frame from which the next wanted frame can be decoded."""
        following = bisect_right(self._ahead, self._passed)
        if following == len(self._ahead):
            return None
        pts, keys = self._track.pts[self._ahead[following]], self._track.key_packets
        nth = bisect_right(keys, self._ordinal_of[pts]) - 1
        if nth > 0 and pts < self._track.packet_pts[keys[nth]]:
            nth -= 1  # shown before the key frame that it follows in the file: it leans on the group before
        return keys[nth]
