"""Stretches of speech, cut out of a stream of sound: what a recogniser is given, and all it is given.

A recogniser invents words over silence and loses its place over long ones, so sound without speech never reaches it.
The detector is the Silero model that ships with faster-whisper (2 MB, onnxruntime, no torch): half an hour in 4 seconds
on one core.

Legend: N samples at 16 kHz.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from qwen_ray.media.events import SpeechChunk

SAMPLE_RATE_HZ = 16_000
PAD_S = 0.2
"""Left around speech: consonants begin below the detector's threshold."""
MIN_SPEECH_S = 0.1
"""Shorter bursts are clicks."""
MAX_PAUSE_S = 2.0
"""Stretches further apart never share a chunk: over long pauses a recogniser invents words."""
TAIL_S = 1.0
"""Context kept before the next block, so that speech that begins at its edge is not missed."""
CUT_STEP = 160
"""Samples (10 ms) by which a cut is placed."""

Samples = npt.NDArray[np.float32]
Span = tuple[int, int]


def speech_chunks(
    blocks: Iterable[Samples], offset_s: float, *, vad_threshold: float, min_silence_s: float, chunk_s: float
) -> Iterator[SpeechChunk]:
    """Cut a stream into chunks that hold speech, each at most `chunk_s` seconds long.

    Chunks end at pauses; a stretch without one is cut where it is quietest. A stretch that touches the end of a block
    is judged again together with the next block. The same sound in the same blocks gives the same chunks.

    Args:
        blocks: float32 [N], -1..1, 16 kHz, end to end.
        offset_s: Time of the first sample.
        vad_threshold: Speech probability from which a moment counts as speech.
        min_silence_s: Seconds of pause that end a stretch.
        chunk_s: Most seconds of one chunk.
    """
    cutter = _Cutter(offset_s, Detector(vad_threshold, min_silence_s), round(chunk_s * SAMPLE_RATE_HZ))
    for block in blocks:
        yield from cutter.push(block)
    yield from cutter.finish()


class Detector:
    """Silero VAD over one piece of sound."""

    def __init__(self, threshold: float, min_silence_s: float) -> None:
        # imports onnxruntime and ctranslate2 (0.4 s): only where speech is really looked for
        from faster_whisper.vad import VadOptions, get_speech_timestamps

        self._find = get_speech_timestamps
        self._options = VadOptions(
            threshold=threshold,
            min_silence_duration_ms=round(min_silence_s * 1000),
            min_speech_duration_ms=round(MIN_SPEECH_S * 1000),
            speech_pad_ms=round(PAD_S * 1000),
        )

    def spans(self, samples: Samples) -> list[Span]:
        """Speech in float32 [N], as (start, end) in samples, padded, in order, not overlapping."""
        if not samples.any():  # silence that fills a hole may last for hours
            return []
        return [(int(span["start"]), int(span["end"])) for span in self._find(samples, self._options)]


class _Cutter:
    """Holds the sound that is not yet dealt with; positions count samples from the start of the stream."""

    def __init__(self, offset_s: float, detector: Detector, limit: int) -> None:
        self._offset_s, self._detector, self._limit = offset_s, detector, limit
        self._held: Samples = np.zeros(0, np.float32)
        self._held_from = 0
        self._judged = 0  # speech before this position is known
        self._group: Span | None = None  # of the chunk in the making

    def push(self, block: Samples) -> Iterator[SpeechChunk]:
        """Chunks that are complete now that `block` is known."""
        self._held = np.concatenate([self._held, block])
        end = self._held_from + len(self._held)
        open_from = end
        for start, stop in self._new_spans():
            if stop > end - round(TAIL_S * SAMPLE_RATE_HZ):
                open_from = start
                break
            yield from self._add((start, stop))
        rest = yield from self._shorten(open_from, end)
        self._judged = max(self._judged, min(rest, end - round(TAIL_S * SAMPLE_RATE_HZ)))
        yield from self._close_if_before(rest)
        self._forget()

    def finish(self) -> Iterator[SpeechChunk]:
        """The rest."""
        for span in self._new_spans():
            yield from self._add(span)
        yield from self._close()

    def _new_spans(self) -> list[Span]:
        found = self._detector.spans(self._held[self._judged - self._held_from :])
        return [(start + self._judged, stop + self._judged) for start, stop in found]

    def _shorten(self, start: int, end: int) -> Generator[SpeechChunk, None, int]:
        """Give out what is longer than a chunk of a stretch that goes on; returns where the rest begins."""
        while end - start > 2 * self._limit:
            cut = self._quietest(start + self._limit // 2, start + self._limit)
            yield from self._add((start, cut))
            start = cut
        return start

    def _add(self, span: Span) -> Iterator[SpeechChunk]:
        """Put a stretch into the chunk in the making, or begin a new one."""
        start, stop = max(span[0], self._judged), span[1]
        if self._group is not None:
            near = start - self._group[1] <= MAX_PAUSE_S * SAMPLE_RATE_HZ
            if near and stop - self._group[0] <= self._limit:
                self._group, self._judged = (self._group[0], stop), stop
                return
            yield from self._close()
        while stop - start > self._limit:
            cut = self._quietest(start + self._limit // 2, start + self._limit)
            yield self._chunk(start, cut)
            start = cut
        self._group, self._judged = (start, stop), stop

    def _close_if_before(self, position: int) -> Iterator[SpeechChunk]:
        if self._group is not None and position - self._group[1] > MAX_PAUSE_S * SAMPLE_RATE_HZ:
            yield from self._close()

    def _close(self) -> Iterator[SpeechChunk]:
        if self._group is not None:
            yield self._chunk(*self._group)
        self._group = None

    def _quietest(self, low: int, high: int) -> int:
        """The middle of the quietest tenth of a second between two positions."""
        piece = self._held[low - self._held_from : high - self._held_from].astype(np.float64)
        steps = np.square(piece[: len(piece) // CUT_STEP * CUT_STEP]).reshape(-1, CUT_STEP).sum(1)
        width = min(10, len(steps))
        energy = np.convolve(steps, np.ones(width), mode="valid")
        return low + (int(energy.argmin()) + width // 2) * CUT_STEP

    def _chunk(self, start: int, stop: int) -> SpeechChunk:
        samples = self._held[start - self._held_from : stop - self._held_from]
        pcm = np.clip(np.rint(samples * 32767.0), -32768, 32767).astype(np.int16)
        begin = self._offset_s + start / SAMPLE_RATE_HZ
        return SpeechChunk(begin, begin + len(pcm) / SAMPLE_RATE_HZ, pcm)

    def _forget(self) -> None:
        keep = self._group[0] if self._group is not None else self._judged
        self._held = self._held[keep - self._held_from :].copy()
        self._held_from = keep
