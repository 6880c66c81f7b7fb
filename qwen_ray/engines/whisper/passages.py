"""From Whisper's tokens to passages with times, and from aligned tokens to words. Needs no model.

Whisper writes the time of a passage's start, its text, the time of its end, and the next start beside it. Where its
window ends inside a passage, that passage is left out and heard again from its start (`transcribe.py`, OpenAI).

Legend: N text tokens, L rows of an alignment (one for each text token and one for the end), T frames of 0.02 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qwen_ray.engines.protocol import Word
from qwen_ray.engines.speech import SPACELESS

FRAME_S = 0.02
"""Of the encoder's output, and the step of Whisper's times."""
LONGEST_MEDIAN_S = 0.7
"""Of a word's duration, Whisper's own bound; beside a pause a word may last for twice the median."""
SENTENCE_ENDS = frozenset(".。!！?？")


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage; `token_ids` are of its text alone."""

    start_s: float
    end_s: float
    token_ids: tuple[int, ...]


def passages(token_ids: Sequence[int], first_time_id: int, duration_s: float) -> tuple[list[Passage], float]:
    """The whole passages in an answer, and the time in seconds up to which the sound is dealt with.

    Args:
        token_ids: Text and times as the model wrote them, without prompt and end.
        first_time_id: Token of 0.00 s; all tokens from there on are times, those of the text are smaller.
        duration_s: Length of the sound.
    """
    is_time = [token >= first_time_id for token in token_ids]
    ends = [k for k in range(1, len(token_ids)) if is_time[k - 1] and is_time[k]]
    unfinished = bool(ends) and is_time[-2:] != [False, True]
    if not unfinished:
        ends.append(len(token_ids))
    starts = [0, *ends[:-1]]
    found = [_passage(token_ids[start:end], first_time_id, duration_s) for start, end in zip(starts, ends, strict=True)]
    done_s = found[-1].end_s if unfinished else duration_s
    return [one for one in found if one.token_ids and one.end_s > one.start_s], done_s


def _passage(token_ids: Sequence[int], first_time_id: int, duration_s: float) -> Passage:
    times_s = [min((token - first_time_id) * FRAME_S, duration_s) for token in token_ids if token >= first_time_id]
    start_s = times_s[0] if times_s else 0.0
    end_s = times_s[-1] if len(times_s) > 1 else duration_s
    return Passage(start_s, end_s, tuple(token for token in token_ids if token < first_time_id))


def token_starts_s(likeness_LT: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """When each row begins, in seconds, where rows follow one another and are most like their frames as a whole.

    Dynamic time warping, one antidiagonal at a time: a Python loop over cells takes half a second for a full window.
    """
    cost_LT = -likeness_LT.astype(np.float64)
    num_rows, num_frames = cost_LT.shape
    best = np.full((num_rows + 1, num_frames + 1), np.inf)
    best[0, 0] = 0.0
    for diagonal in range(2, num_rows + num_frames + 1):
        i = np.arange(max(1, diagonal - num_frames), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        before = np.minimum(np.minimum(best[i - 1, j - 1], best[i - 1, j]), best[i, j - 1])
        best[i, j] = cost_LT[i - 1, j - 1] + before
    return _first_frames(best).astype(np.float64) * FRAME_S


def _first_frames(best: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Walk back along the cheapest path; the frame at which it enters each row."""
    i, j = best.shape[0] - 1, best.shape[1] - 1
    first = np.zeros(i, np.int64)
    while i > 0 and j > 0:
        first[i - 1] = j - 1
        steps = [(best[i - 1, j - 1], i - 1, j - 1), (best[i - 1, j], i - 1, j), (best[i, j - 1], i, j - 1)]
        _, i, j = min(steps, key=lambda step: step[0])
    return first


def words(
    passage: Passage,
    decode: Callable[[Sequence[int]], str],
    starts_s: npt.NDArray[np.float64],
    probabilities: npt.NDArray[np.float32],
    language: str,
) -> tuple[Word, ...]:
    """The words of a passage, in order, inside its times.

    A word goes on until a space, so hyphens and apostrophes stay inside. The marks after it count neither for its end,
    since their frames are those of the pause, nor for its probability.

    Args:
        passage: N tokens of text.
        decode: Text of some tokens.
        starts_s: [N + 1] when each token begins, and when the last one ends.
        probabilities: [N].
        language: Its code.
    """
    found: list[Word] = []
    pieces: list[list[float]] = []
    at = 0
    for text, length in _characters(passage.token_ids, decode):
        end_s, here = float(starts_s[at + length]), probabilities[at : at + length].tolist()
        is_mark = not any(character.isalnum() for character in text)
        if not found or text.startswith(" ") or (language in SPACELESS and not is_mark):
            found.append(Word(text, float(starts_s[at]), end_s, 0.0))
            pieces.append(here)
        else:
            last = found.pop()
            found.append(replace(last, word=last.word + text, end_s=last.end_s if is_mark else end_s))
            pieces[-1] += [] if is_mark else here
        at += length
    timed = _shorten_beside_pauses(found)
    return tuple(_inside(word, passage, sum(p) / len(p)) for word, p in zip(timed, pieces, strict=True))


def _characters(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[tuple[str, int]]:
    """Text of the fewest tokens that make whole characters, and their number; some characters are several tokens."""
    found, held = [], 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[held:end])
        if "\ufffd" not in text or end == len(token_ids):
            found.append((text, end - held))
            held = end
    return found


def _shorten_beside_pauses(found: list[Word]) -> list[Word]:
    """Whisper's own remedy for words that have swallowed the pause before or after a sentence."""
    durations_s = [word.end_s - word.start_s for word in found if word.end_s > word.start_s]
    longest_s = 2 * min(LONGEST_MEDIAN_S, float(np.median(durations_s))) if durations_s else 0.0
    shortened, after_pause = [], True
    for word in found:
        ends_sentence = word.word[-1:] in SENTENCE_ENDS
        if after_pause:
            word = replace(word, start_s=max(word.start_s, word.end_s - longest_s))
        elif ends_sentence:
            word = replace(word, end_s=min(word.end_s, word.start_s + longest_s))
        shortened.append(word)
        after_pause = ends_sentence
    return shortened


def _inside(word: Word, passage: Passage, probability: float) -> Word:
    start_s, end_s = (min(max(time_s, passage.start_s), passage.end_s) for time_s in (word.start_s, word.end_s))
    return Word(word.word.strip(), start_s, end_s, probability)
