"""What is suspicious about a caption, as flags on its row. Nothing is ever changed or dropped: the reader decides.

Rules instead of a model, because they cost nothing, and because a rule can be read when one disagrees with a flag.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

REFUSALS = (
    r"(i'?m|i am) (really |very |so )?(sorry|afraid|unable)\b",
    r"(sorry|apologi[sz]e|unfortunately),? (but )?i\b",
    r"i (can ?not|can'?t|could ?not|couldn'?t|am not able to|do not have|don'?t have) "
    r"(see|view|watch|access|process|assist|help|provide|describe|analy[sz]e|the ability|any video)",
    r"as an (ai|artificial)\b",
    r"(there is|there's|i see) no video\b",
    r"(please )?(upload|provide|share) (the|a|your) video\b",
    r"(很?抱歉|对不起|我无法|我不能|作为一个)",
    r"(lo siento|je suis désolé|es tut mir leid|申し訳)",
)
"""How assistants begin when they do not answer; looked for at the start only, since a film may quote it."""
_REFUSAL = re.compile("|".join(REFUSALS), re.IGNORECASE)
LEAST_LOOP_WORDS = 8
"""A loop is a phrase said four times or more in a row that is at least so many words (or characters, in scripts without
spaces) long altogether: `no, no, no, no` is none.
"""
LEAST_LOOP_TURNS = 4
LONGEST_PHRASE = 40
FOREIGN_SHARE = 0.3
"""Share of letters in other scripts from which a caption is in the wrong one; names and signs stay below."""
_SCRIPTS = {"cjk": "cjk", "hiragana": "cjk", "katakana": "cjk", "ideographic": "cjk", "fullwidth": "latin"}


def caption_flags(caption: str, prompt: str, script: str = "") -> list[str]:
    """Flags of one caption, in the order `empty`, `refusal`, `repetition`, `wrong_script`.

    Args:
        caption: what the model answered.
        prompt: what it was asked; its script is what the answer should be in.
        script: the script that the answer should be in instead, or `any`.
    """
    if not any(unicodedata.category(character)[0] in "LN" for character in caption):
        return ["empty"]
    doubts = {
        "refusal": _REFUSAL.match(caption.lstrip(" \"'*").replace("’", "'")) is not None,
        "repetition": is_loop(caption),
        "wrong_script": script != "any" and _is_foreign(caption, script or main_script(prompt)),
    }
    return [name for name, doubtful in doubts.items() if doubtful]


def is_loop(text: str) -> bool:
    """Whether a phrase of up to `LONGEST_PHRASE` words is said over and over, anywhere in the text."""
    words = _words(text)
    return any(_longest_run(words, period) for period in range(1, min(LONGEST_PHRASE, len(words) // 2) + 1))


def _longest_run(words: Sequence[str], period: int) -> bool:
    """Whether the text is equal to itself `period` words on for long enough."""
    least = max(LEAST_LOOP_WORDS, LEAST_LOOP_TURNS * period) - period
    run = 0
    for now, later in zip(words, words[period:], strict=False):
        run = run + 1 if now == later else 0
        if run >= least:
            return True
    return False


def _words(text: str) -> list[str]:
    """Words in lower case without punctuation; single characters where the script has no spaces."""
    if main_script(text) in ("cjk", "thai"):
        return [character for character in text if character.isalnum()]
    return re.findall(r"\w+", text.lower())


def main_script(text: str) -> str:
    """The script of most letters, such as `latin`; empty when there are none."""
    counts = _scripts(text)
    return counts.most_common(1)[0][0] if counts else ""


def _is_foreign(text: str, script: str) -> bool:
    counts = _scripts(text)
    total = sum(counts.values())
    return bool(script) and total > 0 and 1 - counts[script.lower()] / total >= FOREIGN_SHARE


def _scripts(text: str) -> Counter[str]:
    """Letters by script. Unicode names begin with it (`CYRILLIC SMALL LETTER A`), which the standard library knows; the
    script property itself it does not.
    """
    names = (unicodedata.name(letter, "").split(" ")[0].split("-")[0].lower() for letter in text if letter.isalpha())
    return Counter(_SCRIPTS.get(name, name) for name in names if name)
