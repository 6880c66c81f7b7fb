"""The vision tower over all pictures of a step at once, packed one behind the other.

The blocks are transformers' modules; attention runs over segments (a frame, or a window of one) in a single call, where
transformers loops over them. What depends on a grid alone is computed once per grid and kept.

Axes: N patches, D values of a patch, C width of the tower, E width of the language model, M merged cells (N / merge²).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from qwen_ray.engines.qwen_vl.attention import Attention, Segments, segments
from qwen_ray.engines.qwen_vl.compiled import Compiled

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the tower must know of a grid.

    Attributes:
        positions_N2: row and column of each patch.
        frames, windows: lengths of segments, in patches.
        order_M: which cell stands where while windows are packed; None without windows.
        taps_NK, weights_NK: of the learned positions; None without them.
    """

    positions_N2: torch.Tensor
    frames: tuple[int, ...]
    windows: tuple[int, ...]
    order_M: torch.Tensor | None
    taps_NK: torch.Tensor | None
    weights_NK: torch.Tensor | None


class VisionTower:
    """Features of pictures.

    Args:
        module: transformers' vision model of Qwen2.5-VL or Qwen3-VL.
        attention: how attention is computed.
        compiled: whether the parts between are.
    """

    def __init__(self, module: Any, attention: Attention, compiled: Compiled) -> None:
        self._module, self._attention = module, attention
        self._before, self._between, self._after = compiled(_before), compiled(_between), compiled(_after)
        self._deep = list(getattr(module, "deepstack_visual_indexes", []))
        self._full = set(getattr(module, "fullatt_block_indexes", range(len(module.blocks))))
        self._layout = lru_cache(64)(self._lay_out)
        self._unit = module.spatial_merge_size**2

    def encode(self, patches_ND: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """For each grid its features [1 + deepstack levels, M, E].

        Args:
            patches_ND: of all pictures, in the tower's precision.
            grids: patches along time, height and width of each picture.
        """
        layouts = [self._layout(grid) for grid in grids]
        hidden_NC = self._embed(patches_ND, layouts)
        cos, sin = self._module.rotary_pos_emb(hidden_NC, torch.cat([layout.positions_N2 for layout in layouts]))
        order_M = self._order(layouts)
        if order_M is not None:
            hidden_NC, cos, sin = (self._cells(part)[order_M].flatten(0, 1) for part in (hidden_NC, cos, sin))
        frames = self._segments([n for layout in layouts for n in layout.frames])
        windows = self._segments([n for layout in layouts for n in layout.windows])
        levels: list[torch.Tensor] = []
        blocks = self._module.blocks
        q, k, v = self._before(blocks[0], hidden_NC, cos, sin)
        for number, block in enumerate(blocks):
            where = frames if number in self._full else windows
            attended = self._attention.packed(q, k, v, where, causal=False)
            if number + 1 < len(blocks):
                hidden_NC, q, k, v = self._between(block, blocks[number + 1], hidden_NC, attended, cos, sin)
            else:
                hidden_NC = self._after(block, hidden_NC, attended)
            if number in self._deep:
                levels.append(self._module.deepstack_merger_list[self._deep.index(number)](hidden_NC))
        merged_ME = self._module.merger(hidden_NC)
        if order_M is not None:
            merged_ME = torch.empty_like(merged_ME).index_copy_(0, order_M, merged_ME)
        sizes = [t * h * w // self._unit for t, h, w in grids]
        return list(torch.stack([merged_ME, *levels]).split(sizes, dim=1))

    def _embed(self, patches_ND: torch.Tensor, layouts: Sequence[_Layout]) -> torch.Tensor:
        proj = self._module.patch_embed.proj  # its kernel is its stride: the convolution is one matrix product
        hidden_NC = torch.nn.functional.linear(patches_ND, proj.weight.flatten(1), proj.bias)
        if layouts[0].taps_NK is None:
            return hidden_NC
        for layout, part_NC in zip(layouts, hidden_NC.split([sum(lay.frames) for lay in layouts]), strict=True):
            assert layout.weights_NK is not None
            learned = (self._module.pos_embed(layout.taps_NK) * layout.weights_NK[..., None]).sum(1)
            part_NC += learned.to(part_NC.dtype)
        return hidden_NC

    def _cells(self, part: torch.Tensor) -> torch.Tensor:
        return part.unflatten(0, (-1, self._unit))

    def _order(self, layouts: Sequence[_Layout]) -> torch.Tensor | None:
        orders, base = [], 0
        for layout in layouts:
            if layout.order_M is None:
                return None
            orders.append(layout.order_M + base)
            base += len(layout.order_M)
        return torch.cat(orders)

    def _segments(self, lengths: Sequence[int]) -> Segments:
        return segments(lengths, None, self._device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._module.patch_embed.proj.weight.device
        return device

    def _lay_out(self, grid: Grid) -> _Layout:
        t, h, w = grid
        module, grid_13 = self._module, torch.tensor([grid])
        merge = module.spatial_merge_size
        positions_N2 = get_vision_position_ids(grid_13, merge).to(self._device)
        frames = (h * w,) * t
        if hasattr(module, "fullatt_block_indexes"):
            order_M, ends = get_vision_window_index(grid_13, merge, module.window_size, module.patch_size)
            return _Layout(positions_N2, frames, tuple(ends.diff().tolist()), order_M.to(self._device), None, None)
        taps, weights = get_vision_interpolation_indices_and_weights(
            grid_13,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        return _Layout(positions_N2, frames, frames, None, taps.to(self._device), weights.to(self._device))


def _before(
    block: Any, hidden_NC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block up to its attention: queries, keys and values."""
    qkv = block.attn.qkv
    shape = (3, block.attn.num_heads, -1)
    # The bias is added with what follows: cuBLAS is a tenth slower with it (661 against 741 TFLOP/s).
    parts = torch.nn.functional.linear(block.norm1(hidden_NC), qkv.weight).unflatten(-1, shape)
    q, k, v = (parts + qkv.bias.unflatten(-1, shape)).unbind(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


def _after(block: Any, hidden_NC: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The block from its attention on."""
    hidden_NC = hidden_NC + block.attn.proj(attended.flatten(1))
    new: torch.Tensor = hidden_NC + block.mlp(block.norm2(hidden_NC))
    return new


def _between(
    block: Any, following: Any, hidden_NC: torch.Tensor, attended: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the attention of one block to that of the next, compiled as one to pass over the hidden state less often."""
    hidden_NC = _after(block, hidden_NC, attended)
    return hidden_NC, *_before(following, hidden_NC, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions in float32, as `apply_rotary_pos_emb_vision` of transformers has them."""
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos[:, None].float() + torch.cat([-right, left], -1) * sin[:, None].float()).to(x.dtype)
