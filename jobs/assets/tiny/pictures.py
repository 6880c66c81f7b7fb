"""The pictures of a training step: scenes drawn as they may come out of a lossy codec, cut into patches."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from jobs.assets import shapes
from jobs.assets.tiny.family import MERGE, Family

BT601 = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
BT709 = ((0.2126, 0.7152, 0.0722), (-0.114572, -0.385428, 0.5), (0.5, -0.454153, -0.045847))


@cache
def constant(name: str, device: torch.device) -> Tensor:
    """A fixed tensor, made once per device: copying it in each step would wait for the GPU's queue."""
    k, n = torch.arange(8.0)[:, None], torch.arange(8.0)
    dct = torch.cos(math.pi * (2 * n + 1) * k / 16) / 2
    dct[0] /= math.sqrt(2)
    values = {
        "YCC": torch.tensor([BT601, BT709]),
        "RGB": torch.linalg.inv(torch.tensor([BT601, BT709])),
        "DCT": dct,  # orthonormal, rows are frequencies
        "COARSENESS": 1 + 0.12 * (k + n),
        "STEPS": torch.tensor([36.0, 44.0, 44.0]),
    }
    return values[name].to(device)


def quantise(planes: Tensor, step: Tensor, shift: int) -> Tensor:
    """Round the 8x8 DCT coefficients of planes [B, T, C, H, W] to multiples of step [B, 1, C] (at zero frequency).

    `shift` places the blocks, in pixels.
    """
    height, width = planes.shape[-2:]
    flat = planes.flatten(0, 1)
    after = (-(width + shift) % 8, -(height + shift) % 8)
    flat = F.pad(flat, (shift, after[0], shift, after[1]), mode="replicate")
    rows, columns = flat.shape[-2] // 8, flat.shape[-1] // 8
    blocks = flat.unflatten(-2, (rows, 8)).unflatten(-1, (columns, 8)).transpose(-3, -2)
    matrix = constant("DCT", planes.device)
    scale = step.expand(-1, planes.shape[1], -1).flatten(0, 1)[..., None, None, None, None]
    scale = scale * constant("COARSENESS", planes.device)
    # Products with an 8x8 matrix on the right only: each is one large matrix product instead of millions of tiny ones.
    coefficients = F.linear(F.linear(blocks, matrix).transpose(-1, -2), matrix)
    coefficients = torch.round(coefficients / scale) * scale
    blocks = F.linear(F.linear(coefficients, matrix.T).transpose(-1, -2), matrix.T)
    flat = blocks.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return flat[..., shift : shift + height, shift : shift + width].unflatten(0, planes.shape[:2])


def _colours(batch: shapes.SceneBatch, strength: float) -> Tensor:
    """YCbCr of background and figures [B, 1 + N, C] with errors of brightness, contrast, gain and colour matrix.

    All of these are linear in the picture, so they are applied to its three flat colours instead of to its pixels.
    """
    background_BC, colour_BNC = shapes.palette(batch)
    rgb, device, count = torch.cat([background_BC[:, None], colour_BNC], 1), batch.radius_BN.device, len(batch.count_B)

    def uniform(low: float, high: float, channels: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, channels, device=device)

    gain = uniform(1 - 0.12 * strength, 1 + 0.14 * strength) * uniform(1 - 0.03 * strength, 1 + 0.03 * strength, 3)
    rgb = ((rgb - 128) * gain + 128 + uniform(-10, 10) * strength).clamp(0, 255)
    written = (torch.rand(count, device=device) < 0.25 * strength).long()
    read = torch.where(torch.rand(count, device=device) < 0.3 * strength, 1 - written, written)
    ycc, back = constant("YCC", device), constant("RGB", device)
    mixed_BCC = ycc[0] @ back[read] @ ycc[written]
    return rgb @ mixed_BCC.transpose(1, 2)


def draw(
    batch: shapes.SceneBatch, size: tuple[int, int], time_BT: Tensor, aspect: float, strength: float, shift: int
) -> Tensor:
    """Frames [B, T, C, H, W] of scenes, whole numbers in 0..255, as they may come out of a lossy codec.

    Every scene draws its own blur, softer chroma, block quantisation, ghost of the frame before, noise, and errors of
    colour. `strength` 0 is a clean picture and 1 the full range; `shift` places the 8x8 blocks.
    """
    device, count = batch.radius_BN.device, len(batch.count_B)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand((count, *(shape or (1, 1, 1))), device=device)

    colours = _colours(batch, strength)
    soft = 1 + uniform(-0.35, 0.65) * strength + (uniform(0, 1) < 0.2 * strength) * uniform(0, 1)
    soft_chroma = soft + uniform(0, 3) * strength
    planes = [colours[:, 0, c, None, None, None] for c in range(3)]
    for slot, outside in enumerate(shapes.outlines(batch, time_BT, *size, aspect)):
        covers = [(0.5 - outside / width).clamp(0, 1) for width in (soft, soft_chroma)]
        for c in range(3):
            planes[c] = planes[c] + covers[min(c, 1)] * (colours[:, slot + 1, c, None, None, None] - planes[c])
    picture = torch.stack([planes[0] - 128, *planes[1:]], 2)
    step = (uniform(0, 1, 1, 1) < 0.75 * strength) * uniform(0, 1, 1, 1).square() * constant("STEPS", device)
    picture = quantise(picture, step.clamp_min(0.05), shift)
    ghost = (uniform(0, 1, 1, 1, 1, 1) < 0.4 * strength) * uniform(0, 0.12, 1, 1, 1, 1)
    picture = torch.lerp(picture, torch.cat([picture[:, :1], picture[:, :-1]], 1), ghost)
    y, cb, cr = picture.unbind(2)
    y = y + 128
    frames = torch.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], 2)
    frames = frames + torch.randn_like(frames) * (uniform(0, 1, 1, 1, 1, 1).square() * 6 * strength)
    return frames.clamp(0, 255).round()


def sample_times(count: int, num_frames: int, strength: float, device: torch.device) -> Tensor:
    """Fractions of the clip [B, T] that the product samples, with small errors as of frame rates and clip ends."""
    time_T = torch.arange(num_frames, device=device) / num_frames
    time_BT = time_T + (torch.rand(count, num_frames, device=device) - 0.5) * 0.05 * strength
    return (time_BT * (1 + (torch.rand(count, 1, device=device) - 0.5) * 0.1 * strength)).clamp(0, 1)


@cache
def _statistics(family: Family, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [C, 1, 1] of values in 0..255."""
    how = family.patching
    mean, std = (torch.tensor(values, device=device)[:, None, None] * 255 for values in (how.mean, how.std))
    return mean, std


def patchify(frames: Tensor, family: Family) -> Tensor:
    """Normalised patches [B * T / 2, S, D] of frames [B, T, C, H, W] in 0..255, in the processor's order."""
    mean, std = _statistics(family, frames.device)
    x, patch = (frames - mean) / std, family.patch
    batch, count, channels, height, width = x.shape
    rows, columns = height // patch // MERGE, width // patch // MERGE
    x = x.reshape(batch * count // 2, 2, channels, rows, MERGE, patch, columns, MERGE, patch)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return x.reshape(batch * count // 2, rows * columns * MERGE**2, channels * 2 * patch**2)
