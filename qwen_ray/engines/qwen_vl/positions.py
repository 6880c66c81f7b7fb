"""Time positions of unevenly sampled clips, for the family that takes time as positions (Qwen2.5-VL).

Its `second_per_grid_ts` states one interval for a whole clip, which cannot say that frames lie close together where the
picture moves and far apart where it does not. There each patch's time position is set from its own time instead, in the
model's unit, `tokens_per_second`; heights, widths and text stay where `get_rope_index` puts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def patch_starts(frame_times_s: Sequence[float], temporal: int = 2) -> list[float]:
    """When each group of `temporal` frames begins, in seconds from the first, as `arange(T) * second_per_grid_ts`
    counts them.
    """
    return [time_s - frame_times_s[0] for time_s in frame_times_s[::temporal]]


def is_uneven(frame_times_s: Sequence[float], seconds_per_grid: float, tokens_per_second: float) -> bool:
    """Whether an even spacing would put a patch off by more than one position."""
    starts_s = patch_starts(frame_times_s)
    return any(abs(s - k * seconds_per_grid) * tokens_per_second > 1 for k, s in enumerate(starts_s))


def true_positions(
    model: Any, inputs: Mapping[str, torch.Tensor], times_s: Sequence[Sequence[float] | None]
) -> dict[str, torch.Tensor]:
    """`position_ids` for `generate()`, int64 [4, B, L] (text, time, height, width), with true times.

    Args:
        model: the multimodal module, whose `get_rope_index` places everything.
        inputs: of `generate()`, padded on the left.
        times_s: of each prompt its frames' times where they are uneven; None leaves the prompt as it is.
    """
    names = ("input_ids", "attention_mask", "mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    places_3BL, _ = model.get_rope_index(**{name: inputs[name] for name in names})
    rate = model.config.vision_config.tokens_per_second
    for row, times in enumerate(times_s):
        if times is None:
            continue
        video_L = inputs["mm_token_type_ids"][row] == 2
        starts = torch.tensor([int(s * rate + 1e-6) for s in patch_starts(times)], device=places_3BL.device)
        begin = places_3BL[1, row][video_L][0]  # the first patch lies in row 0
        places_3BL[0, row, video_L] = begin + starts.repeat_interleave(int(video_L.sum()) // len(starts))
    text_BL = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    model.rope_deltas = None  # of another batch; the places of new tokens follow from these
    return {"position_ids": torch.cat([text_BL[None], places_3BL])}
