"""The forward pass of a training step: all sequences of one shape, so attention is dense and batched."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from jobs.assets.tiny.checkpoint import HEAD_DIM, MERGE, ROPE_THETA, Grid
from jobs.assets.tiny.pictures import constant, patchify


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def vision_rope(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary cos and sin [S, D] of the patches of one temporal patch, in the processor's order."""
    rows, columns = (size // MERGE for size in grid.patches)
    row, column, dy, dx = torch.meshgrid(
        *(torch.arange(size, device=device) for size in (rows, columns, MERGE, MERGE)), indexing="ij"
    )
    y, x = (row * MERGE + dy).flatten(), (column * MERGE + dx).flatten()
    frequency = ROPE_THETA ** (-torch.arange(0, HEAD_DIM // 2, 2, device=device).float() / (HEAD_DIM // 2))
    angle = torch.cat([y[:, None] * frequency, x[:, None] * frequency], -1)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


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
        project(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


@cache
def token_row(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Token ids [L] on a device, kept for the next step with the same prompt."""
    return torch.tensor(ids, device=device)


class Trainee:
    """The model with a forward pass for batches of one shape."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, compiled: bool = False) -> None:
        self.model = model
        self.visual, self.text = model.model.visual, model.model.language_model
        self.vision_block = torch.compile(vision_block, dynamic=True) if compiled else vision_block
        self.text_layer = torch.compile(text_layer, dynamic=True) if compiled else text_layer
        self.rope: dict[Grid, tuple[Tensor, Tensor]] = {}

    def embed_video(self, frames: Tensor, grid: Grid) -> Tensor:
        """Video tokens [B, T / 2 * S / 4, D] of frames [B, T, C, H, W]."""
        if grid not in self.rope:
            self.rope[grid] = vision_rope(grid, frames.device)
        x = F.linear(patchify(frames), self.visual.patch_embed.proj.weight.flatten(1))
        for block in self.visual.blocks:
            x = self.vision_block(block, x, *self.rope[grid])
        merger = self.visual.merger
        return merger.mlp(merger.ln_q(x).reshape(-1, merger.hidden_size)).view(len(frames), -1, self.text_width)

    @property
    def text_width(self) -> int:
        """Features of a token."""
        return int(self.model.config.text_config.hidden_size)

    def logits(self, video: Tensor, before: list[int], after: list[int], answer_BL: Tensor, position: Tensor) -> Tensor:
        """Next-token logits [B, L + 1, V] at the prompt's end and after each token of the answer."""
        batch, device = len(video), video.device
        lead, tail = (token_row(tuple(ids), device).expand(batch, -1) for ids in (before, after))
        embed = self.text.embed_tokens
        x = torch.cat([embed(lead), video.to(embed.weight.dtype), embed(torch.cat([tail, answer_BL], 1))], 1)
        angle = position[constant("TEXT_AXIS", device)].permute(1, 2, 0) * constant("TEXT_ROPE", device)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        for layer in self.text.layers:
            x = self.text_layer(layer, x, cos, sin)
        return self.model.lm_head(self.text.norm(x[:, -answer_BL.shape[1] - 1 :]))
