"""The forward pass of a training step: all sequences of one shape, so attention is dense and batched.

It goes through the library's own modules and serves both families: blocks and layers have the same names in both, and
what only one of them has (positions and deepstack in the vision tower, norms of queries and keys) is asked for by name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from jobs.assets.tiny.family import HEAD_DIM, MERGE, ROPE_THETA, Family, Grid
from jobs.assets.tiny.pictures import patchify


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def patch_places(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column [S] of the patches of one temporal patch, in the processor's order."""
    row, column, dy, dx = torch.meshgrid(
        *(torch.arange(size, device=device) for size in (grid.rows, grid.columns, MERGE, MERGE)), indexing="ij"
    )
    return (row * MERGE + dy).flatten(), (column * MERGE + dx).flatten()


def vision_rope(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary cos and sin [S, D]."""
    y, x = patch_places(grid, device)
    frequency = ROPE_THETA ** (-torch.arange(0, HEAD_DIM // 2, 2, device=device).float() / (HEAD_DIM // 2))
    angle = torch.cat([y[:, None] * frequency, x[:, None] * frequency], -1)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def learned_positions(table: Tensor, grid: Grid) -> Tensor:
    """The square table of position embeddings [side², D] stretched over a grid: [S, D]."""
    side = int(len(table) ** 0.5)
    square = table.T.unflatten(1, (side, side))[None]
    stretched = F.interpolate(square, size=grid.patches, mode="bilinear", align_corners=True)[0]
    y, x = patch_places(grid, table.device)
    return stretched[:, y, x].T


def vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One block of the vision tower on x [B * T / 2, S, D]; every grid here fits in one window, so none is cut."""
    qkv = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, -1, HEAD_DIM))
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    attended = F.scaled_dot_product_attention(q, k, v)
    x = x + block.attn.proj(attended.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def text_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One decoder layer on x [B, L, D], causal."""
    attention, normed = layer.self_attn, layer.input_layernorm(x)
    q, k, v = (
        project(normed).unflatten(-1, (-1, HEAD_DIM))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    q, k = _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


@cache
def row_of(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers [L] on a device, kept for the next step that needs the same."""
    return torch.tensor(values, device=device)


class Trainee:
    """The model with a forward pass for batches of one shape."""

    def __init__(self, family: Family, model: Any, compiled: bool = False) -> None:
        self.family, self.model = family, model
        self.visual, self.text = model.model.visual, model.model.language_model
        self.vision_block = torch.compile(vision_block, dynamic=True) if compiled else vision_block
        self.text_layer = torch.compile(text_layer, dynamic=True) if compiled else text_layer
        self.rope: dict[Grid, tuple[Tensor, Tensor]] = {}
        self.deepstack_at = list(getattr(self.visual, "deepstack_visual_indexes", []))

    def embed_video(self, frames: Tensor, grid: Grid) -> list[Tensor]:
        """Video tokens [B, T / 2 * S / 4, D] of frames [B, T, C, H, W], and what deepstack adds to the first layers."""
        if grid not in self.rope:
            self.rope[grid] = vision_rope(grid, frames.device)
        embed = self.visual.patch_embed.proj
        x = F.linear(patchify(frames, self.family), embed.weight.flatten(1), embed.bias)
        if hasattr(self.visual, "pos_embed"):
            x = x + learned_positions(self.visual.pos_embed.weight, grid)
        features: list[Tensor] = []
        for index, block in enumerate(self.visual.blocks):
            x = self.vision_block(block, x, *self.rope[grid])
            if index in self.deepstack_at:
                features.append(self.visual.deepstack_merger_list[len(features)](x))
        merged = [self.visual.merger(x), *features]
        return [part.reshape(len(frames), -1, self.text_width) for part in merged]

    @property
    def text_width(self) -> int:
        """Features of a token."""
        return int(self.model.config.text_config.hidden_size)

    def logits(self, video: list[Tensor], prompt: list[int], pad: int, answer_BL: Tensor, position: Tensor) -> Tensor:
        """Next-token logits [B, L + 1, V] at the prompt's end and after each token of the answer.

        Args:
            video: what `embed_video` gives.
            prompt: token ids, with `pad` where the video goes.
            answer_BL: token ids.
            position: [3, B, L] of prompt and answer.
        """
        tokens, *deepstack = video
        batch, device = len(tokens), tokens.device
        embed = self.text.embed_tokens
        places = row_of(tuple(k for k, token in enumerate(prompt) if token == pad), device)
        x = torch.cat([embed(row_of(tuple(prompt), device).expand(batch, -1)), embed(answer_BL)], 1)
        x = x.index_copy(1, places, tokens.to(x.dtype))
        axes = row_of(tuple(self.family.rope_axes), device)
        frequency = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
        angle = position[axes].permute(1, 2, 0) * frequency
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        for index, layer in enumerate(self.text.layers):
            x = self.text_layer(layer, x, cos, sin)
            if index < len(deepstack):
                x = x.index_add(1, places, deepstack[index].to(x.dtype))
        return self.model.lm_head(self.text.norm(x[:, -answer_BL.shape[1] - 1 :]))
