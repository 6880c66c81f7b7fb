"""What this project's reader and its peers make of every file of the suite, as a table.

    python -m jobs.conformance.peers [--folder FOLDER] [--write]

Each is asked for 16 frames evenly spread over the file, as its users ask: the peers by index, over the count that they
state; ours by time. Every answer is judged by the numbers burnt into the pictures. Each runs in a process of its own,
which may crash or hang. `--write` puts the table into docs/conformance.md and the answers into jobs/bench/results/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track

from jobs.bench import record
from jobs.conformance.assets import ASSETS, Asset, suite
from jobs.conformance.burn import read_level, read_number

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
ASKED = 16
TIMEOUT_S = 60
Pictures = npt.NDArray[np.uint8]
Answer = dict[str, Any]
"""`numbers` of the pictures (None where unreadable), `wanted`: the ranks that the reader says they are (or None),
`times_s` that it states, `count` of frames that it states, `repaired` that it owns up to; or `error`.
"""


def _spread(count: int) -> list[int]:
    return [round(k) for k in np.linspace(0, count - 1, ASKED)] if count > 0 else []


def by_ours(path: str) -> tuple[Pictures, list[int] | None, list[float], int, int]:
    from qwen_ray.config import DecodeConfig
    from qwen_ray.media.decode import decode_events
    from qwen_ray.media.events import ClipFailed, DecodeRequest

    decode = DecodeConfig(window_s=1e6, num_frames=ASKED, max_pixels=320 * 240, max_repaired=1.0)
    opened, *clips, _ = decode_events(DecodeRequest(path=path, decode=decode))
    if not clips:
        raise ValueError("no picture")
    if isinstance(clips[0], ClipFailed):
        raise ValueError(clips[0].error_type)
    clip: Any = clips[0]
    return clip.frames_THWC, None, clip.frame_times_s, opened.info.num_frames, clip.num_repaired  # type: ignore[union-attr]


def by_torchcodec(path: str) -> tuple[Pictures, list[int] | None, list[float], int, int]:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, dimension_order="NHWC", seek_mode="exact")
    count = len(decoder)
    batch = decoder.get_frames_at(_spread(count))
    return batch.data.numpy(), _spread(count), batch.pts_seconds.tolist(), count, 0


def by_decord(path: str) -> tuple[Pictures, list[int] | None, list[float], int, int]:
    import decord

    reader = decord.VideoReader(path)
    count = len(reader)
    pictures = reader.get_batch(_spread(count)).asnumpy()
    return pictures, _spread(count), reader.get_frame_timestamp(_spread(count))[:, 0].tolist(), count, 0


def by_opencv(path: str) -> tuple[Pictures, list[int] | None, list[float], int, int]:
    import cv2

    capture = cv2.VideoCapture(path)
    if not capture.isOpened():
        raise ValueError("not opened")
    count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    ranks, times_s, pictures = [], [], []
    for rank in _spread(count):
        capture.set(cv2.CAP_PROP_POS_FRAMES, rank)
        ok, picture = capture.read()
        if ok:
            ranks.append(rank)
            times_s.append(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000)
            pictures.append(picture)
    if not pictures:
        raise ValueError(f"opened, says {count} frames, gives none")
    if len({picture.shape for picture in pictures}) > 1:  # the size changed on the way
        pictures = [cv2.resize(picture, (320, 240)) for picture in pictures]
    return np.stack(pictures), ranks, times_s, count, 0


READERS: dict[str, Callable[[str], tuple[Pictures, list[int] | None, list[float], int, int]]] = {
    "qwen_ray": by_ours,
    "torchcodec": by_torchcodec,
    "decord": by_decord,
    "OpenCV": by_opencv,
}


def answer(reader: str, path: str, levels: bool) -> Answer:
    """What a reader says of a file."""
    try:
        pictures, ranks, times_s, count, repaired = READERS[reader](path)
    except Exception as error:  # noqa: BLE001  whatever it raises is its answer
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    numbers = [read_level(picture) if levels else read_number(picture) for picture in pictures]
    return {"numbers": numbers, "ranks": ranks, "times_s": times_s, "count": count, "repaired": repaired}


def verdict(asset: Asset, said: Answer) -> str:
    """`right`, or what is wrong."""
    if "error" in said:
        refused = not asset.numbers or asset.status == "failed"
        return "right" if refused else said["error"].partition(":")[0] if "hang" in said["error"] else "raises"
    if not asset.numbers:
        return "returns pictures of nothing"
    truth_s, ranks = asset.shown_s(), _ranks(asset, said)
    wrong = sum(rank is None or bad for rank, bad in ranks)
    parts = []
    unreadable = said["numbers"].count(None)
    if wrong:
        parts.append(f"**{wrong} of {len(ranks)} wrong**" + (f" ({unreadable} unreadable)" if unreadable else ""))
    if said["ranks"] is not None and len(ranks) < min(ASKED, said["count"]):
        parts.append(f"{ASKED - len(ranks)} missing")
    if asset.good and said["count"] != len(asset.numbers):
        parts.append(f"count {said['count']}")
    if not wrong:
        shift = said["times_s"][0] - truth_s[ranks[0][0]]  # type: ignore[index]
        off_s = max(abs(t - shift - truth_s[r]) for t, (r, _) in zip(said["times_s"], ranks, strict=True))  # type: ignore[index]
        if off_s > asset.slack_s + 0.002:
            parts.append(f"times off by {off_s:.2g} s")
    if asset.damaged and said["repaired"]:
        parts.append(f"{said['repaired']} counted as damaged")
        if wrong <= said["repaired"]:
            return "right: " + ", ".join(parts[1:] if wrong else parts)
    return ", ".join(parts) or "right"


def _ranks(asset: Asset, said: Answer) -> list[tuple[int | None, bool]]:
    """Of each picture: which frame it is, and whether another was asked for (ours states times, not ranks)."""
    found: list[tuple[int | None, bool]] = []
    truth_s = asset.shown_s()
    for k, number in enumerate(said["numbers"]):
        rank = asset.numbers.index(number) if number in asset.numbers else None
        if said["ranks"] is not None:
            bad = rank != said["ranks"][k]
        else:
            bad = rank is None or abs(truth_s[rank] - said["times_s"][k]) > asset.slack_s
        found.append((rank, bad))
    return found


def ask_all(reader: str, folder: Path) -> Iterator[tuple[str, Answer]]:
    """Answers by file name, from a process that is started again when it hung or died."""
    process: subprocess.Popen[str] | None = None
    for name, asset in ASSETS.items():
        if process is None:
            command = [sys.executable, "-m", "jobs.conformance.peers", "--answer", reader]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, text=True, bufsize=1, **pipes)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(folder / name), asset.levels]) + "\n")
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        if line:
            yield name, json.loads(line)
            continue
        yield name, {"error": "crashes" if ready else f"hangs for {TIMEOUT_S} s"}
        process.kill()
        process.wait()
        process = None
    if process is not None:
        process.kill()


def serve(reader: str) -> None:
    """Answer one file a line."""
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        path, levels = json.loads(line)
        print(json.dumps(answer(reader, path, levels)), file=out, flush=True)


def versions() -> dict[str, str]:
    """Of what is compared."""
    packages = {"torchcodec": "torchcodec", "decord": "decord", "OpenCV": "opencv-python-headless", "PyAV": "av"}
    return {name: importlib.metadata.version(package) for name, package in packages.items()}


def table(verdicts: dict[str, dict[str, str]]) -> str:
    """In Markdown."""
    head = ["file", "what it is", *READERS]
    rows = [head, ["---"] * len(head)]
    for name, asset in ASSETS.items():
        rows.append([f"`{name}`", asset.what, *(verdicts[reader][name] for reader in READERS)])
    counts = [sum(verdicts[r][name].startswith("right") for name in ASSETS) for r in READERS]
    rows.append([f"**right of {len(ASSETS)}**", "", *(f"**{count}**" for count in counts)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(verdicts: dict[str, dict[str, str]], answers: dict[str, dict[str, Answer]]) -> None:
    """The table into the docs, between its marks; the answers beside the other results."""
    about = record.about("16 frames of every file of the conformance suite, by reader", "jobs.conformance.peers")
    about["versions"] |= versions()
    body = {"verdicts": verdicts, "answers": answers}
    record.path_of("conformance").write_text(json.dumps(about | body, indent=None))
    text = DOCS.read_text()
    before, _, rest = text.partition("<!-- table -->\n")
    _, _, after = rest.partition("<!-- end of table -->")
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    stated = f"Made {about['at'][:10]} with `python -m jobs.conformance.peers --write`; {named}.\n\n"
    DOCS.write_text(f"{before}<!-- table -->\n{stated}{table(verdicts)}\n<!-- end of table -->{after}")


def main() -> None:
    """Make the files, ask everybody, show the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the files are, or are put; by default they are removed")
    parser.add_argument("--write", action="store_true", help="write docs/conformance.md and the dated result")
    parser.add_argument("--answer", choices=list(READERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        serve(arguments.answer)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        kitchen = suite(folder)
        for name in track(ASSETS, description="making"):
            kitchen.find(name)
        answers = {
            reader: dict(track(ask_all(reader, folder), total=len(ASSETS), description=reader)) for reader in READERS
        }
    verdicts = {
        reader: {name: verdict(ASSETS[name], said) for name, said in found.items()} for reader, found in answers.items()
    }
    print(table(verdicts))
    if arguments.write:
        write(verdicts, answers)


if __name__ == "__main__":
    main()
