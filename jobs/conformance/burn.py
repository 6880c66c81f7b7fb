"""What a file says of itself: every picture its number and time, the sound its own seconds.

Each picture has two strips of black and white cells, read at any size (cells of 4 px or more) and after lossy
compression, and only where the picture is upright:

    top sixth    1 0 | 16 bits of the frame's number, most significant first | parity, not parity
    next sixth   1 0 | 24 bits of the frame's time in milliseconds           | parity, not parity

Pictures too small or too narrow for strips have one grey level each instead. The sound beeps for a tenth of a second
after every half second, each second at a frequency of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]

CELLS_WIDTH = 140
"""Pixels of a strip before it is scaled: 20 cells of 7, or 28 of 5."""
LEVELS, LEVEL_STEP = 28, 8
"""Grey levels that tell small pictures apart, from 16 upwards; the number is known modulo `LEVELS`."""
BEEP_AT_S, BEEP_S = Fraction(1, 2), Fraction(1, 10)
"""Of each second."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Where a strip lies, in sixths of the height from the top, and how many bits it has."""

    sixth: int
    bits: int

    def cells(self, number: int) -> npt.NDArray[np.uint8]:
        """0 or 255 for each cell."""
        bits = [1, 0] + [(number >> (self.bits - 1 - i)) & 1 for i in range(self.bits)]
        parity = sum(bits[2:]) & 1
        return np.array([*bits, parity, 1 - parity], np.uint8) * 255

    def read(self, picture: Picture) -> int | None:
        """The number in a picture of H x W or H x W x C; None where no strip can be read."""
        grey = (picture if picture.ndim == 2 else picture[..., :3].mean(-1)).astype(np.float32)
        height, width = grey.shape
        middle, count = (2 * self.sixth + 1) * height / 12, self.bits + 4
        top, bottom = int(middle - height / 36), int(middle + height / 36)
        bits = []
        for cell in range(count):
            left, right = int((cell + 0.35) * width / count), int((cell + 0.65) * width / count)
            bits.append(int(grey[top : max(bottom, top + 1), left : max(right, left + 1)].mean() > 128))
        value = bits[2:-2]
        if bits[:2] != [1, 0] or sum(value) & 1 != bits[-2] or bits[-2] == bits[-1]:
            return None
        return int("".join(map(str, value)), 2)


NUMBER, CLOCK = Strip(0, 16), Strip(1, 24)


def read_number(picture: Picture) -> int | None:
    """The frame's number."""
    return NUMBER.read(picture)


def read_time_s(picture: Picture) -> float | None:
    """The frame's time, to a millisecond."""
    milliseconds = CLOCK.read(picture)
    return None if milliseconds is None else milliseconds / 1000


def strips(number: int, time_s: Fraction) -> bytes:
    """Both strips as grey pixels, two rows of `CELLS_WIDTH`."""
    rows = [NUMBER.cells(number), CLOCK.cells(round(time_s * 1000))]
    return b"".join(np.repeat(row, CELLS_WIDTH // len(row)).tobytes() for row in rows)


def level(number: int) -> bytes:
    """One grey pixel."""
    return bytes([16 + LEVEL_STEP * (number % LEVELS)])


def read_level(picture: Picture) -> int:
    """The number, modulo `LEVELS`, of a picture of one grey level."""
    return round((float(picture.astype(np.float32).mean()) - 16) / LEVEL_STEP) % LEVELS


def beeps(duration_s: Fraction | float, rate_hz: int = 48_000) -> str:
    """The lavfi source of the sound."""
    tone = "0.5*sin(2*PI*(600+50*mod(floor(t)\\,30))*t)"
    return f"aevalsrc='if(between(mod(t\\,1)\\,0.5\\,0.6)\\,{tone}\\,0)':s={rate_hz}:d={float(duration_s):.6f}"


def frequency_hz(second: int) -> int:
    """Of the beep in that second."""
    return 600 + 50 * (second % 30)


def read_beeps(samples: npt.NDArray[np.float32], rate_hz: int) -> list[tuple[float, int]]:
    """(onset in seconds, second that its pitch names, modulo 30) of each beep, in order; to about 5 ms."""
    step = rate_hz // 500
    loud = np.abs(samples[: len(samples) // step * step]).reshape(-1, step).max(1) > 0.1
    found: list[tuple[float, int]] = []
    quiet = 20
    for k, is_loud in enumerate(loud):
        if is_loud and quiet >= 20:
            piece = samples[k * step : k * step + rate_hz // 12]
            spectrum = np.abs(np.fft.rfft(piece * np.hanning(len(piece)), 8 * rate_hz // 12))
            pitch_hz = float(spectrum.argmax()) * rate_hz / (8 * rate_hz // 12)
            found.append((k * step / rate_hz, round((pitch_hz - 600) / 50) % 30))
        quiet = 0 if is_loud else quiet + 1
    return found
