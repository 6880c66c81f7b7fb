"""A sound track as 16 kHz mono, at true times: sample k is heard at audio_offset_s + k / 16000 on the video's axis.

Decoders hand out what a track holds, end to end, and so lose its holes: after a pause in a recording every word would
be early. Here the timestamps decide; holes become silence, overlaps are dropped.

Legend: N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, cast

import av
import av.error
import numpy as np
import numpy.typing as npt

from qwen_ray.errors import InputError
from qwen_ray.media.container import PacketReader, complaints, open_input
from qwen_ray.media.index import AudioTrack, is_break

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.resampler import AudioResampler
    from av.audio.stream import AudioStream
    from av.packet import Packet
    from av.stream import Stream

SAMPLE_RATE_HZ = 16_000
"""What Whisper, Qwen3-ASR and Silero take."""

MAX_HOLE_S = 24 * 3600
"""Most silence put into the holes of a track: a clock that leaps further is damaged, and a year of it takes an hour."""

TOLERANCE_S = 0.05
"""Timestamps off by less are rounding (Matroska keeps milliseconds); above, something is missing."""

Samples = npt.NDArray[np.float32]


class AudioReader:
    """Decodes the selected sound track of a file, block by block, in bounded memory."""

    def __init__(self, path: str, track: AudioTrack, beat: Callable[[], None] = lambda: None) -> None:
        self._path, self._track, self._beat = path, track, beat
        self.num_errors = 0
        """Packets so far that could not be read or decoded."""
        self.cut_short: tuple[str, str] | None = None
        """(error_type, message) where the sound was given up before its end."""

    def blocks(self, block_s: float = 120.0) -> Iterator[Samples]:
        """Yield float32 [N] in -1..1, each of `block_s` seconds, the last one shorter.

        Raises:
            InputError: `no_samples` where nothing decodes, `unsupported_codec` where nothing could.
        """
        size, held, parts = round(block_s * SAMPLE_RATE_HZ), 0, list[Samples]()
        for samples in self._samples():
            while held + len(samples) >= size:
                parts.append(samples[: size - held])
                samples = samples[size - held :]
                yield np.concatenate(parts)
                held, parts = 0, []
            held += len(samples)
            parts.append(samples)
        if held:
            yield np.concatenate(parts)

    def _samples(self) -> Iterator[Samples]:
        """All samples, in small pieces, at most a second of silence each."""
        line = _Line(self._track)
        for frame in self._frames():
            for samples in line.add(frame):
                self._beat()
                yield samples
            if line.lost:
                where = f"holes of more than {MAX_HOLE_S // 3600} h after {line.written / SAMPLE_RATE_HZ:.1f} s"
                self.cut_short = "unreadable", f"{Path(self._path).name}: its sound has {where}; the rest is left out"
                break
        yield from line.finish()
        self.num_errors += line.num_errors
        if not line.heard:
            raise InputError("no_samples", f"{Path(self._path).name}: no sound could be decoded")

    def _frames(self) -> Iterator[AudioFrame]:
        with open_input(self._path) as container:
            stream = cast("AudioStream", container.streams[self._track.stream_index])
            if stream.codec_context is None:
                raise InputError("unsupported_codec", f"{Path(self._path).name}: no decoder for its sound")
            stream.codec_context.thread_count = 1
            reader, failed = PacketReader(container, cast("Stream", stream)), 0
            for packet in reader:
                self._beat()
                frames, ok = _decode(stream, cast("Packet[AudioStream]", packet))
                failed += not ok
                self.num_errors = reader.num_errors + failed
                yield from frames
            yield from _decode(stream, None)[0]
            self.num_errors = reader.num_errors + failed


def _decode(stream: AudioStream, packet: Packet[AudioStream] | None) -> tuple[list[AudioFrame], bool]:
    with complaints():
        try:
            return list(stream.codec_context.decode(packet)), True
        except MemoryError:
            raise
        except av.error.EOFError:
            return [], True
        except av.error.FFmpegError:
            return [], False


class _Line:
    """Lays frames on one line of samples, by their timestamps."""

    def __init__(self, track: AudioTrack) -> None:
        self._tick_s = track.tick_s
        self._zero = track.first
        self._jumpy = track.jumpy
        self._shift_s = Fraction(0)
        self._expected_s: Fraction | None = None
        self._resampler: AudioResampler | None = None
        self._format: tuple[str, str, int] | None = None
        self._surplus = 0  # samples still to be dropped, having been heard before
        self._silence_s = Fraction(0)
        self.num_errors = 0
        """Frames that decoded and could not be used."""
        self.written = 0
        self.heard = False
        """Whether any sound came, and not only the silence of holes."""
        self.lost = False
        """Whether the clock leapt too far ahead to be followed."""

    def add(self, frame: AudioFrame) -> Iterator[Samples]:
        """What can be written once `frame` is known."""
        time_s = self._time_s(frame)
        self.lost = self._silence_s + time_s - Fraction(self.written, SAMPLE_RATE_HZ) > MAX_HOLE_S
        if self.lost:
            return
        if not self._goes_on(frame, time_s):
            yield from self._drain()
            yield from self._move_to(time_s)
            self._begin(frame)
        elif self._expected_s is not None:
            time_s = self._expected_s
        yield from self._write(self._resample(frame))
        self._expected_s = time_s + Fraction(frame.samples, frame.sample_rate) if self._resampler is not None else None

    def finish(self) -> Iterator[Samples]:
        """What the resampler still holds."""
        return self._drain()

    def _time_s(self, frame: AudioFrame) -> Fraction:
        """Seconds from the first sample; where the file's clock starts again, the sound goes straight on."""
        if self._zero is None:
            self._zero = frame.pts or 0
        if frame.pts is None:
            return self._expected_s or Fraction(0)
        time_s = (frame.pts - self._zero) * self._tick_s + self._shift_s
        if self._expected_s is not None and is_break(time_s - self._expected_s, self._jumpy):
            self._shift_s += self._expected_s - time_s
            return self._expected_s
        return time_s

    def _goes_on(self, frame: AudioFrame, time_s: Fraction) -> bool:
        """Whether a frame follows the one before it, in time and in format."""
        if self._resampler is None or self._expected_s is None:
            return False
        same = self._format == (frame.format.name, frame.layout.name, frame.sample_rate)
        return same and abs(time_s - self._expected_s) <= TOLERANCE_S

    def _begin(self, frame: AudioFrame) -> None:
        self._format = (frame.format.name, frame.layout.name, frame.sample_rate)
        self._resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE_HZ)

    def _drain(self) -> Iterator[Samples]:
        if self._resampler is not None:
            yield from self._write(self._resample(None))
        self._resampler = None

    def _resample(self, frame: AudioFrame | None) -> list[AudioFrame]:
        """What comes of a frame; nothing of one that cannot be mixed down, such as one of 46 channels."""
        assert self._resampler is not None
        try:
            return self._resampler.resample(frame)
        except MemoryError:
            raise
        except av.error.FFmpegError:
            self.num_errors += 1
            self._resampler = None
            return []

    def _move_to(self, time_s: Fraction) -> Iterator[Samples]:
        missing = round(time_s * SAMPLE_RATE_HZ) - self.written
        self._surplus = max(-missing, 0)
        self._silence_s += Fraction(max(missing, 0), SAMPLE_RATE_HZ)
        while missing > 0:
            silence = np.zeros(min(missing, SAMPLE_RATE_HZ), np.float32)
            missing -= len(silence)
            self.written += len(silence)
            yield silence

    def _write(self, frames: list[AudioFrame]) -> Iterator[Samples]:
        for frame in frames:
            samples = cast(Samples, frame.to_ndarray()).reshape(-1)
            dropped = min(self._surplus, len(samples))
            self._surplus -= dropped
            self.heard = self.heard or len(samples) > 0
            if dropped < len(samples):
                self.written += len(samples) - dropped
                yield samples[dropped:]
