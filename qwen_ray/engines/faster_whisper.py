"""Whisper through faster-whisper (CTranslate2): int8 on CPU, float16 on CUDA 12.

The voice-activity detector has already cut the sound into chunks of at most Whisper's own 30 s window, so no chunk is
conditioned on the text of the one before: a repetition loop cannot spread, and chunks may be transcribed in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_ray.config import SpeechConfig
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import Segment, Word
from qwen_ray.engines.speech import SPACELESS, doubts
from qwen_ray.errors import EngineError, RequestError, ResourceError


class FasterWhisperEngine:
    """One Whisper model in one process."""

    def __init__(self, config: SpeechConfig, model: Model, *, cuda: bool) -> None:
        from faster_whisper import WhisperModel

        self._config = config
        self.precision = "float16" if cuda else "int8"
        self._model = WhisperModel(
            model.location,
            device="cuda" if cuda else "cpu",
            compute_type=self.precision,
            cpu_threads=0 if cuda else max(1, round(config.num_cpus)),
        )

    def transcribe(self, pcm: npt.NDArray[np.int16]) -> list[Segment]:
        """See `SpeechEngine.transcribe`."""
        try:
            segments, info = self._model.transcribe(
                pcm.astype(np.float32) / 32768.0,
                language=self._config.language or None,
                beam_size=self._config.beam_size,
                max_new_tokens=self._config.max_new_tokens or None,
                word_timestamps=True,
                vad_filter=False,
                condition_on_previous_text=False,
                # No fallback to sampling: CTranslate2's seed does not reach its worker threads, and the same chunk
                # must give the same text when it is done again. Doubtful segments are flagged instead.
                temperature=0.0,
            )
            return [_segment(found, info.language) for found in segments]
        except (RuntimeError, ValueError) as error:  # CTranslate2 raises nothing more precise
            if "out of memory" in str(error):
                raise ResourceError("out_of_memory", f"Whisper: {error}") from error
            if "CUDA" in str(error) or "cuBLAS" in str(error):
                raise EngineError(f"Whisper's process has lost its GPU: {error}") from error
            what = f"Whisper failed on a chunk of {len(pcm) / 16_000:.1f} s: {error}"
            raise RequestError("engine_crashed", what) from error

    def close(self) -> None:
        """Free the model."""
        del self._model


def _segment(found: Any, language: str) -> Segment:
    words = _words(found.words or (), language)
    return Segment(
        text=found.text.strip(),
        start_s=words[0].start_s if words else float(found.start),
        end_s=words[-1].end_s if words else float(found.end),
        language=language,
        avg_logprob=float(found.avg_logprob),
        no_speech_prob=float(found.no_speech_prob),
        words=words,
        flags=doubts(found.compression_ratio, found.avg_logprob, found.no_speech_prob),
    )


def _words(found: Iterable[Any], language: str) -> tuple[Word, ...]:
    """Whole words: faster-whisper splits at hyphens, and a piece that begins without a space goes on from the last
    one, except in languages without spaces.
    """
    words: list[Word] = []
    for piece in found:
        if words and not piece.word.startswith(" ") and language not in SPACELESS:
            first = words.pop()
            least = min(first.probability, float(piece.probability))
            words.append(Word(first.word + piece.word.strip(), first.start_s, float(piece.end), least))
        else:
            words.append(Word(piece.word.strip(), float(piece.start), float(piece.end), float(piece.probability)))
    return tuple(words)
