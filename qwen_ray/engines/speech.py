"""What the speech engines say in the same way, whichever library runs the model."""

from __future__ import annotations

MAX_COMPRESSION_RATIO = 2.4
"""Text that zlib shrinks by more than this repeats itself; the value is Whisper's own (`transcribe.py`, OpenAI)."""
MIN_AVG_LOGPROB = -1.0
"""Below this mean log probability a segment is doubtful; Whisper's own value."""
MAX_NO_SPEECH_PROB = 0.6
"""Above it the text may be invented over silence; Whisper's own value."""
SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages written without spaces between words: each character counts as a word there, as in Whisper."""


def doubts(compression_ratio: float, avg_logprob: float, no_speech_prob: float) -> tuple[str, ...]:
    """The flags of a segment."""
    found = {
        "repetition": compression_ratio > MAX_COMPRESSION_RATIO,
        "low_confidence": avg_logprob < MIN_AVG_LOGPROB,
        "no_speech": no_speech_prob > MAX_NO_SPEECH_PROB,
    }
    return tuple(name for name, doubtful in found.items() if doubtful)
