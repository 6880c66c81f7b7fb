"""What a vision tower is shown, by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

STATISTICS = {
    "qwen2_5_vl": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "qwen3": ([0.5] * 3, [0.5] * 3),
}


def by_definition(frames_THWC: npt.NDArray[np.uint8], family: str) -> tuple[torch.Tensor, list[int]]:
    """`pixel_values` of a clip, or of an image, which is shown twice, and its grid: time, merge cells by row, the
    cell's patches by row; inside: channel, time, y, x.
    """
    is_2_5 = family == "qwen2_5_vl"
    patch = 14 if is_2_5 else 16
    mean, std = STATISTICS["qwen2_5_vl" if is_2_5 else "qwen3"]
    if len(frames_THWC) == 1:
        frames_THWC = np.repeat(frames_THWC, 2, axis=0)
    pixels: Any = (torch.from_numpy(frames_THWC).float() - torch.tensor(mean) * 255) / (torch.tensor(std) * 255)
    num_frames, height, width, _ = pixels.shape
    rows = [
        pixels[t : t + 2, y + dy : y + dy + patch, x + dx : x + dx + patch].permute(3, 0, 1, 2).reshape(-1)
        for t in range(0, num_frames, 2)
        for y in range(0, height, 2 * patch)
        for x in range(0, width, 2 * patch)
        for dy in (0, patch)
        for dx in (0, patch)
    ]
    return torch.stack(rows), [num_frames // 2, height // patch, width // patch]
