"""Where every frame of a video lies, from reading all its packets once without decoding more than the first picture.

Headers cannot be trusted for this: counts and durations are missing or wrong in WebM, ASF, GIF and cut MP4, and the
start is wrong in anything with an edit list. Reading packets costs 1 % of decoding them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import av.error

from qwen_ray.media.container import PacketReader, choose, complaints
from qwen_ray.media.pictures import PictureDecoder, Turn

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

INDEXED = {"mov", "matroska"}
"""Formats (mp4 and webm are among them) with an index and true display times. The others are believed only where their
times go to and fro as reordered frames must: AVI, ASF and bare streams store none, and FFmpeg's guesses are wrong."""

RESTART_S = 1.0
"""Decode times that fall back by more than this: the file was joined from two, and its clock starts again."""

JUMP_S = 10.0
"""In formats whose clocks may jump, decode times that leap ahead by more than this: likewise. FFmpeg's own bound."""

JUMPY = {"mpegts", "mpeg"}
"""These formats."""

CUT = ("partial file", "File ended prematurely")
"""What FFmpeg says of a file that is shorter than its own index."""

MAX_FIRST_PACKETS = 1500
"""Packets to try before giving up on a first picture: more than the longest usual group of pictures."""


@dataclass(slots=True)
class Clock:
    """Ticks of one track, unrolled where the file's clock starts again."""

    tick_s: Fraction
    jumpy: bool
    shift: int = 0
    last_dts: int | None = None
    end: int | None = None

    def see(self, packet: Packet[Stream]) -> int:
        """The shift to add to `packet`'s times; call in file order."""
        duration = packet.duration or 0
        dts = packet.dts if packet.dts is not None else packet.pts
        if dts is not None:
            if self.last_dts is not None and is_break((dts - self.last_dts) * self.tick_s, self.jumpy):
                begin = packet.pts if packet.pts is not None else dts
                self.shift = (self.end or 0) - begin
            self.last_dts = dts
        if packet.pts is not None or dts is not None:
            begin = packet.pts if packet.pts is not None else cast(int, dts)
            self.end = max(begin + self.shift + duration, self.end if self.end is not None else begin + self.shift)
        return self.shift


def is_break(step_s: Fraction, jumpy: bool) -> bool:
    """Whether a clock that moves on by `step_s` seconds from one packet to the next has been set anew."""
    return step_s < -RESTART_S or (jumpy and step_s > JUMP_S)


@dataclass(frozen=True, slots=True)
class FirstPicture:
    """What the first picture that decodes says of all; the frame itself is not kept (3 MB at 1080p)."""

    pts: int | None
    height: int
    width: int
    turn: Turn

    @classmethod
    def of(cls, frame: VideoFrame) -> FirstPicture:
        return cls(frame.pts, frame.height, frame.width, Turn.of(frame))


@dataclass(slots=True)
class VideoTrack:
    """The selected video track: its packets in file order, its frames in order of display, times in ticks."""

    stream_index: int
    tick_s: Fraction
    by_count: bool = False
    """Whether frames are told apart by counting the decoder's output, for want of unique times of their own."""
    pts: list[int] = field(default_factory=list)
    """Display time of each frame, ascending, in ticks."""
    packet_pts: array[int] = field(default_factory=lambda: array("q"))
    """Display time of each packet, in file order from the first key frame on; hidden ones too."""
    key_packets: array[int] = field(default_factory=lambda: array("q"))
    """Ordinals, among the packets, of the key frames."""
    end: int = 0
    """When the last frame ends."""
    first: FirstPicture | None = None
    """The first picture that decodes."""

    def key_ranks(self) -> list[int]:
        """Which frames, in order of display, are key frames; ascending."""
        times = {self.packet_pts[key] for key in self.key_packets}
        ranks = {bisect_left(self.pts, time): time for time in times}
        return sorted(rank for rank, time in ranks.items() if rank < len(self.pts) and self.pts[rank] == time)


@dataclass(slots=True)
class AudioTrack:
    """The selected sound track."""

    stream_index: int
    tick_s: Fraction
    num_packets: int = 0
    first: int | None = None
    """When the first sample that decodes is heard, in ticks."""
    end: int = 0
    """When the last packet ends, in ticks."""
    jumpy: bool = False
    """Whether its clock may jump."""


@dataclass(slots=True)
class Index:
    """All of it."""

    video: VideoTrack | None
    audio: AudioTrack | None
    num_errors: int = 0
    cut: bool = False
    """Whether the file ends before its own index does."""


def build(container: InputContainer, beat: Callable[[], None]) -> Index:
    """Read every packet of the selected tracks of a freshly opened file."""
    video, audio = choose(container, "video"), choose(container, "audio")
    formats = set(container.format.name.split(","))
    pictures = _VideoScan(cast("VideoStream", video), formats) if video is not None else None
    sounds = _AudioScan(cast("AudioStream", audio), formats) if audio is not None else None
    selected = [stream for stream in (video, audio) if stream is not None]
    if not selected:
        return Index(None, None)
    reader = PacketReader(container, *selected)
    with complaints() as logged:
        for packet in reader:
            beat()
            if pictures is not None and packet.stream_index == pictures.track.stream_index:
                pictures.see(cast("Packet[VideoStream]", packet))
            elif sounds is not None:
                sounds.see(cast("Packet[AudioStream]", packet))
    return Index(
        pictures.finish() if pictures is not None else None,
        sounds.track if sounds is not None else None,
        reader.num_errors,
        any(words in message for message in logged for words in CUT),
    )


class _AudioScan:
    def __init__(self, stream: AudioStream, formats: set[str]) -> None:
        self.track = AudioTrack(stream.index, cast(Fraction, stream.time_base), jumpy=bool(JUMPY & formats))
        self._context = stream.codec_context
        self._clock = Clock(self.track.tick_s, self.track.jumpy)

    def see(self, packet: Packet[AudioStream]) -> None:
        self.track.num_packets += 1
        self._clock.see(cast("Packet[Stream]", packet))
        self.track.end = self._clock.end or 0
        if self.track.first is None and self._context is not None:
            self.track.first = self._first(packet)

    def _first(self, packet: Packet[AudioStream]) -> int | None:
        """The time of the first sample decoded: encoders put silence before it, which a decoder drops."""
        with complaints():
            try:
                frames = self._context.decode(packet)
            except MemoryError:
                raise
            except av.error.FFmpegError:
                return None
        return next((f.pts if f.pts is not None else packet.pts or 0 for f in frames), None)


class _VideoScan:
    def __init__(self, stream: VideoStream, formats: set[str]) -> None:
        self.track = VideoTrack(stream.index, cast(Fraction, stream.time_base))
        self._stream = stream
        self._decoder = PictureDecoder(stream) if stream.codec_context is not None else None
        self._clock = Clock(self.track.tick_s, bool(JUMPY & formats))
        self._trusted = bool(INDEXED & formats)
        self._untimed = self._to_and_fro = False
        self._shown, self._durations = array("q"), array("q")
        self._seen_key = False
        self._timed = False
        self._next = 0  # end of the last packet, as far as known

    def see(self, packet: Packet[VideoStream]) -> None:
        self._seen_key = self._seen_key or packet.is_keyframe
        if not self._seen_key or _is_hidden(packet, self._stream):
            return
        pts = self._time(packet) + self._clock.see(cast("Packet[Stream]", packet))
        if packet.is_keyframe:
            self.track.key_packets.append(len(self.track.packet_pts))
        elif pts < self.track.packet_pts[-1]:
            self._to_and_fro = True
        self.track.packet_pts.append(pts)
        if not packet.is_discard:
            self._shown.append(pts)
            self._durations.append(packet.duration or 0)
        if self.track.first is None and self._decoder is not None and len(self.track.packet_pts) <= MAX_FIRST_PACKETS:
            self._decode_first(packet)

    def _time(self, packet: Packet[VideoStream]) -> int:
        """Display time, else decode time, else where the packets before it end."""
        if packet.pts is None and packet.dts is not None:
            self._untimed = True
            return packet.dts
        rate = self._stream.average_rate or Fraction(25)
        duration = packet.duration or round(1 / (rate * self.track.tick_s))
        if packet.pts is None:
            guess = self._next
            self._untimed, self._next = True, guess + duration
            return guess
        if not self._timed:
            self._end_lead_at(packet.pts)
        self._next = max(self._next, packet.pts + duration)
        return packet.pts

    def _end_lead_at(self, pts: int) -> None:
        """Packets without times before the first that has one end where that begins."""
        self._timed, shift = True, pts - self._next
        for times in (self._shown, self.track.packet_pts):
            for k in range(len(times)):
                times[k] += shift
        self._next = pts

    def _decode_first(self, packet: Packet[VideoStream]) -> None:
        assert self._decoder is not None
        found = self._decoder.decode(packet)
        if found:
            self.track.first = FirstPicture.of(found[0].frame)

    def finish(self) -> VideoTrack:
        track = self.track
        if track.first is None and self._decoder is not None:
            found = self._decoder.flush()
            track.first = FirstPicture.of(found[0].frame) if found else None
        track.by_count = self._must_count()
        order = sorted(range(len(self._shown)), key=self._shown.__getitem__)
        track.pts = [self._shown[i] for i in order]
        if track.pts:
            track.end = track.pts[-1] + (self._durations[order[-1]] or self._typical_gap())
        self._drop_undecodable_start()
        return track

    def _must_count(self) -> bool:
        if self._untimed or self._clock.shift or len(set(self._shown)) < len(self._shown):
            return True
        reorders = self._decoder is not None and bool(self._stream.codec_context.has_b_frames)
        return reorders and not self._to_and_fro and not self._trusted

    def _typical_gap(self) -> int:
        pts = self.track.pts
        if len(pts) > 1:
            return (pts[-1] - pts[0]) // (len(pts) - 1)
        return round(1 / (self._stream.average_rate * self.track.tick_s)) if self._stream.average_rate else 0

    def _drop_undecodable_start(self) -> None:
        """A recording cut out of a broadcast may begin with frames whose references lie before the cut."""
        track, first = self.track, self.track.first
        sound = self._decoder is not None and self._decoder.num_errors == 0
        if track.by_count or first is None or first.pts is None or not sound:
            return
        if track.key_packets and track.pts and track.pts[0] < first.pts <= track.packet_pts[track.key_packets[0]]:
            track.pts = [pts for pts in track.pts if pts >= first.pts]


def _is_hidden(packet: Packet[VideoStream], stream: VideoStream) -> bool:
    """Whether a VP8 packet only serves as reference: WebM stores these like any other, with a time of their own."""
    return stream.codec_context is not None and stream.codec_context.name == "vp8" and not memoryview(packet)[0] & 0x10
