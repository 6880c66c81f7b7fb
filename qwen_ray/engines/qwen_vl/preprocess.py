"""From uint8 frames and a prompt to the tensors that Qwen-VL models take, on the device where the model lives.

Frames arrive already resized, so a clip crosses to the GPU as bytes, a quarter of its float form, and no image
processor runs on the CPU. Normalising and cutting into patches repeat transformers' `Qwen2VLVideoProcessor` operation
for operation (rescale folded into mean and std, pairs of frames, patches grouped by merge cell) in float32, so the
result is the same bit for bit.

Axes: T frames, H height, W width, C colour; N patches, D values of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Patching:
    """How a checkpoint cuts frames: sizes in pixels, patches and frames, and per-channel statistics of values in
    0..1.
    """

    patch: int
    merge: int
    temporal: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def grid(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches along time, height and width."""
        return num_frames // self.temporal, height // self.patch, width // self.patch

    def num_tokens(self, num_frames: int, height: int, width: int) -> int:
        """Placeholders that a clip takes in the prompt."""
        t, h, w = self.grid(num_frames, height, width)
        return t * h * w // self.merge**2


def patchify(frames_THWC: torch.Tensor, how: Patching) -> torch.Tensor:
    """Cut a clip into normalised patches.

    Args:
        frames_THWC: uint8; T a multiple of `how.temporal`, or 1 for an image, which is shown as often as that; H
            and W multiples of `how.patch * how.merge`.
        how: the checkpoint's patching.

    Returns:
        float32 patches_ND on the same device, N = T*H*W / (temporal * patch²), D = C * temporal * patch², in the order
        of the reference: time, then merge cells by row, then the patches inside each cell.
    """
    if frames_THWC.shape[0] == 1:
        frames_THWC = frames_THWC.expand(how.temporal, -1, -1, -1)
    num_frames, height, width, channels = frames_THWC.shape
    t, h, w = how.grid(num_frames, height, width)
    scale = torch.tensor(how.std, device=frames_THWC.device) * 255
    shift = torch.tensor(how.mean, device=frames_THWC.device) * 255
    frames_TCHW = ((frames_THWC.float() - shift) / scale).permute(0, 3, 1, 2)
    m, p = how.merge, how.patch
    cells = frames_TCHW.reshape(t, how.temporal, channels, h // m, m, p, w // m, m, p)
    return cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, channels * how.temporal * p * p)


def second_per_grid(frame_times_s: Sequence[float], temporal: int = 2) -> float:
    """Seconds between neighbouring temporal patches, from true frame times (repeated padding frames do not count).

    Qwen2.5-VL turns this into its time positions (`get_rope_index`), so it must be the clip's own spacing.
    """
    distinct = sorted(set(frame_times_s))
    if len(distinct) < 2:
        return 0.0  # one moment: the clip has a single temporal patch, at position 0
    return temporal * (distinct[-1] - distinct[0]) / (len(distinct) - 1)
