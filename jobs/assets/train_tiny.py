"""Train and export the embedded tiny Qwen2.5-VL, which captions the videos of shapes.py exactly.

    python -m jobs.assets.train_tiny --out OUT [--minutes 9] [--resume OUT]     # on one CUDA GPU
    python -m jobs.assets.train_tiny --out OUT --steps 20 --batch 8             # a smoke run, CPU is enough

The export is an ordinary Qwen2.5-VL checkpoint folder of about 12 MB: same architecture, preprocessing, chat template
and special tokens, only small. Training differs from plain fine-tuning in these ways:

- Scenes are drawn on the GPU, each used once, and made to look like decoded H.264 (`draw`).
- Training never shows a held-out (colour, shape, motion); the accuracy printed is on scenes made only of those.
- Some caption words in the decoder's input (never in its labels) are swapped for others of their kind, so the decoder
  must look at the video instead of completing familiar combinations.
- All sequences of a step have one shape, so attention is dense and batched instead of packed. `--check` compares this
  forward pass with the library's.

Axes in names: B scenes, T frames, C channels, H rows, W columns, S patches of one temporal patch, L tokens, D features.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from jobs.assets import shapes

PROMPT = "Describe the video."
OTHER_PROMPTS = (
    "Describe this video.",
    "Describe the video in detail.",
    "Describe this clip in one sentence.",
    "What happens in the video?",
    "What is shown in this clip?",
    "Write a caption for this video.",
    "Caption this clip.",
    "Describe the shapes, their colours and how they move.",
)
SYSTEM = "You are a helpful assistant."
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXT_TOKENS = 448
VOCABULARY = 512
"""Rows of the embedding; the ones after the special tokens are padding."""
PRETOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, MERGE, WINDOW = 14, 2, 224
TOKENS_PER_SECOND = 2
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
MIN_PIXELS, MAX_PIXELS = 3136, 13000
HEAD_DIM, ROPE_THETA, MROPE_SECTION = 64, 10000.0, (8, 12, 12)
LONGEST_CLIP_S = 13.0
SWAPPED_WORDS = 0.12
GUIDE_WEIGHT = 0.3
NUM_FRAMES, NUM_FRAMES_WEIGHTS = (8, 6, 4, 2), (0.76, 0.1, 0.1, 0.04)
IGNORED = -100


@dataclass(frozen=True)
class Grid:
    """One picture size that smart_resize can give, and the aspects (width / height) of the videos that get it."""

    height: int
    width: int
    aspects: tuple[float, float]
    weight: float

    @property
    def patches(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // PATCH, self.width // PATCH


def _with_portrait(grid: Grid) -> list[Grid]:
    low, high = grid.aspects
    return [grid, Grid(grid.width, grid.height, (1 / high, 1 / low), grid.weight * 0.6)]


GRIDS = (
    *_with_portrait(Grid(84, 112, (1.037, 1.508), 0.26)),
    *_with_portrait(Grid(84, 140, (1.508, 1.842), 0.26)),
    Grid(112, 112, (0.966, 1.036), 0.12),
    *_with_portrait(Grid(56, 140, (1.842, 2.17), 0.04)),
    *_with_portrait(Grid(56, 168, (2.171, 2.4), 0.03)),
)


# --- tokenizer and configuration -------------------------------------------------------------------------------------


def caption_parts() -> tuple[list[str], list[str]]:
    """Every first sentence and, with its leading space, every second sentence, in `caption_index` order."""
    phrases = [
        f"A {size} {colour} {shape} {motion}"
        for size, colour, shape, motion in product(shapes.SIZES, shapes.COLOURS, shapes.SHAPES, shapes.MOTIONS)
    ]
    first = [f"{phrase} on a {background} background." for phrase in phrases for background in shapes.BACKGROUNDS]
    return first, [f" {phrase}." for phrase in phrases]


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE set up as Qwen2's (NFC, its pre-tokenizer), with merges learnt from captions and prompts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKEN), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    first, second = caption_parts()
    prompts = [PROMPT, *OTHER_PROMPTS, SYSTEM, "system\n", "user\n", "assistant\n"]
    tokenizer.train_from_iterator([*first, *second, *prompts * 20], trainer)
    if tokenizer.get_vocab_size() > TEXT_TOKENS:
        raise AssertionError("the text vocabulary overlaps the special tokens")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(out: Path) -> None:
    """Write the tokenizer, chat template and processor settings as a Qwen2.5-VL checkpoint has them."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer.model.save(str(out))
    added = {
        tokenizer.token_to_id(token): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): token for index, token in sorted(added.items())},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 8192,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen2_5_VLProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(out / "tokenizer_config.json", settings)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for kind in ("image", "video"):
        name = "preprocessor_config.json" if kind == "image" else "video_preprocessor_config.json"
        _write_json(out / name, _processor_settings(kind))


def _processor_settings(kind: str) -> dict[str, Any]:
    return {
        f"{kind}_processor_type": "Qwen2VLImageProcessor" if kind == "image" else "Qwen2VLVideoProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "merge_size": MERGE,
        "patch_size": PATCH,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "temporal_patch_size": 2,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def build_model(token_id: dict[str, int]) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL of 6.1 million parameters with fresh weights."""
    end, end_of_turn = token_id["<|endoftext|>"], token_id["<|im_end|>"]
    text = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 256 // HEAD_DIM,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "mrope_section": list(MROPE_SECTION),
        },
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end_of_turn,
        "pad_token_id": end,
    }
    vision = {
        "depth": 4,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 192 // HEAD_DIM,
        "out_hidden_size": 256,
        "patch_size": PATCH,
        "window_size": WINDOW,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": TOKENS_PER_SECOND,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=end, eos_token_id=[end_of_turn, end], pad_token_id=end
    )
    return model


# --- text of a training step -----------------------------------------------------------------------------------------


class Captions:
    """Caption tokens by lookup: ids and swap groups without a loop over scenes."""

    def __init__(self, tokenizer: Any, device: torch.device) -> None:
        first, second = (
            [tokenizer(text, add_special_tokens=False).input_ids for text in part] for part in caption_parts()
        )
        if len({len(ids) for ids in first}) != 1 or len({len(ids) for ids in second}) != 1:
            raise AssertionError("every word of a caption should be one token")
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.first = torch.tensor(first, device=device)
        self.second = torch.tensor(second, device=device)
        self.group_size, self.groups = self._swap_groups(tokenizer, device)

    def _swap_groups(self, tokenizer: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each token the words of its kind: their number [V] (0: never swapped) and their ids [V, 8]."""
        directions = ["left", "right", "up", "down", "still"]
        kinds = [list(shapes.SIZES), list(shapes.COLOURS), list(shapes.SHAPES), directions, list(shapes.BACKGROUNDS)]
        size, groups = torch.zeros(VOCABULARY, dtype=torch.long), torch.zeros(VOCABULARY, 8, dtype=torch.long)
        for words in kinds:
            ids = [tokenizer(f" {word}", add_special_tokens=False).input_ids[0] for word in words]
            size[ids] = len(ids)
            groups[ids, : len(ids)] = torch.tensor(ids)
        return size.to(device), groups.to(device)

    def tokens(self, batch: shapes.SceneBatch) -> Tensor:
        """Labels [B, L]: the caption and the end of the turn, then IGNORED."""
        first_B, second_B = caption_index(batch)
        ends = torch.full((len(first_B), 1), self.end, device=self.first.device)
        rest = torch.full((len(first_B), self.second.shape[1]), IGNORED, device=self.first.device)
        one = torch.cat([self.first[first_B], ends, rest], 1)
        two = torch.cat([self.first[first_B], self.second[second_B], ends], 1)
        return torch.where((batch.count_B == 2)[:, None], two, one)

    def swap_words(self, tokens_BL: Tensor, share: float) -> Tensor:
        """The same tokens with `share` of the telling words replaced by a random word of their kind."""
        size = self.group_size[tokens_BL]
        pick = (torch.rand(tokens_BL.shape, device=tokens_BL.device) * size).long()
        other = self.groups[tokens_BL].gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        swap = (torch.rand(tokens_BL.shape, device=tokens_BL.device) < share) & (size > 0)
        return torch.where(swap, other, tokens_BL)


def caption_index(batch: shapes.SceneBatch) -> tuple[Tensor, Tensor]:
    """Place of each scene's first and second sentence [B] in `caption_parts`."""
    phrase = (batch.size_BN * len(shapes.COLOURS) + batch.colour_BN) * len(shapes.SHAPES) + batch.shape_BN
    phrase = phrase * len(shapes.MOTIONS) + batch.motion_BN
    return phrase[:, 0] * len(shapes.BACKGROUNDS) + batch.background_B, phrase[:, 1]


def split_prompt(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Token ids of the chat prompt before and after its one video placeholder."""
    content = [{"type": "video"}, {"type": "text", "text": text}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    before, after = prompt.split("<|video_pad|>")
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))  # type: ignore[return-value]


def positions(
    before: int, grid_thw: tuple[int, int, int], after: int, generated: int, interval_B: Tensor, spread: bool
) -> Tensor:
    """M-RoPE positions [3, B, L] of prompt and generated tokens.

    Args:
        before, after, generated: numbers of tokens before the video, after it, and of the answer.
        grid_thw: the video's grid after merging.
        interval_B: seconds between temporal patches.
        spread: False as Transformers 5 does it (text goes on after the largest height or width position); True as
            earlier versions and other engines do (after the largest position of all). They differ for long clips, so
            training uses both.
    """
    device, batch = interval_B.device, len(interval_B)
    t, h, w = grid_thw
    tick_BT = (torch.arange(t, device=device) * (TOKENS_PER_SECOND * interval_B)[:, None]).long()
    time_BL = tick_BT.repeat_interleave(h * w, 1)
    row_L = torch.arange(h, device=device).repeat_interleave(w).repeat(t)
    column_L = torch.arange(w, device=device).repeat(h * t)
    video = torch.stack([time_BL, row_L.expand(batch, -1), column_L.expand(batch, -1)]) + before
    resume_B = video.amax((0, 2)) + 1 if spread else torch.full((batch,), before + max(h, w), device=device)
    lead = torch.arange(before, device=device).expand(3, batch, -1)
    tail = (resume_B[:, None] + torch.arange(after, device=device)).expand(3, -1, -1)
    prompt = torch.cat([lead, video, tail], 2)
    answer = prompt.amax((0, 2))[:, None] + 1 + torch.arange(generated, device=device)
    return torch.cat([prompt, answer.expand(3, -1, -1)], 2)


# --- pictures of a training step -------------------------------------------------------------------------------------

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
        "MEAN": torch.tensor(MEAN)[:, None, None] * 255,
        "STD": torch.tensor(STD)[:, None, None] * 255,
        "TEXT_ROPE": ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM),
        "TEXT_AXIS": torch.arange(3).repeat_interleave(torch.tensor(MROPE_SECTION)),
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


def draw(batch: shapes.SceneBatch, grid: Grid, time_BT: Tensor, aspect: float, strength: float, shift: int) -> Tensor:
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
    for slot, outside in enumerate(shapes.outlines(batch, time_BT, grid.height, grid.width, aspect)):
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


def patchify(frames: Tensor) -> Tensor:
    """Normalised patches [B * T / 2, S, 1176] of frames [B, T, C, H, W] in 0..255, in the processor's order."""
    x = (frames - constant("MEAN", frames.device)) / constant("STD", frames.device)
    batch, count, channels, height, width = x.shape
    rows, columns = height // PATCH // MERGE, width // PATCH // MERGE
    x = x.reshape(batch * count // 2, 2, channels, rows, MERGE, PATCH, columns, MERGE, PATCH)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return x.reshape(batch * count // 2, rows * columns * MERGE**2, channels * 2 * PATCH**2)


# --- forward pass ----------------------------------------------------------------------------------------------------


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


# --- training --------------------------------------------------------------------------------------------------------


GUIDE = (1, len(shapes.SHAPES), len(shapes.COLOURS), len(shapes.SIZES), 2)
"""Outputs of the guiding head: presence, shape, colour, size, place (x, y) in the token's cell."""


class Step(NamedTuple):
    """Labels [B, L], logits [B, L, V] and the guiding loss (zero unless learning)."""

    labels: Tensor
    logits: Tensor
    guide_loss: Tensor


class Session:
    """Everything one run needs: model, text tables, random state."""

    def __init__(self, tokenizer: Any, model: Qwen2_5_VLForConditionalGeneration, device: torch.device, seed: int):
        self.tokenizer, self.device = tokenizer, device
        self.trainee, self.fast_trainee = Trainee(model), Trainee(model, compiled=device.type == "cuda")
        self.guide = torch.nn.Linear(self.trainee.text_width, sum(GUIDE)).to(device)
        self.captions = Captions(tokenizer, device)
        self.prompt = split_prompt(tokenizer, PROMPT)
        self.other_prompts = [split_prompt(tokenizer, text) for text in OTHER_PROMPTS]
        self.generator = torch.Generator(device).manual_seed(seed)

    def pick_prompt(self) -> tuple[list[int], list[int]]:
        """Mostly the product's prompt, else another one or noise: any request is for a caption."""
        roll = random.random()
        if roll < 0.7:
            return self.prompt
        before, after = random.choice(self.other_prompts)
        if roll > 0.93:
            noise = [random.randrange(256, TEXT_TOKENS) for _ in range(random.randint(1, 16))]
            after = after[:1] + noise + after[-5:]
        return before, after

    def step(self, batch: int, held_out: bool, grid: Grid, num_frames: int, strength: float, learn: bool) -> Step:
        """Run fresh scenes through the model; with `learn`, prompts and words vary as in training."""
        before, after = self.pick_prompt() if learn else self.prompt
        low, high = grid.aspects
        aspect = low + (high - low) * random.random()
        scenes = shapes.sample_scenes(batch, self.generator, held_out, aspect)
        labels_BL = self.captions.tokens(scenes)
        answer_BL = labels_BL[:, :-1].clamp_min(0)
        if learn:
            answer_BL = self.captions.swap_words(answer_BL, SWAPPED_WORDS)
        seconds_B = 0.5 + torch.rand(batch, device=self.device) * (LONGEST_CLIP_S - 0.5)
        rows, columns = (size // MERGE for size in grid.patches)
        position = positions(
            len(before),
            (num_frames // 2, rows, columns),
            len(after),
            answer_BL.shape[1],
            2 * seconds_B / num_frames,
            spread=learn and random.random() < 0.3,
        )
        time_BT = sample_times(batch, num_frames, strength, self.device)
        frames = draw(scenes, grid, time_BT, aspect, strength, random.randrange(8))
        trainee = self.fast_trainee if learn else self.trainee
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            video = trainee.embed_video(frames, grid)
            logits = trainee.logits(video, before, after, answer_BL, position)
        unused = torch.zeros((), device=self.device)
        guide_loss = self.guide_loss(video, scenes, time_BT, grid, aspect) if learn else unused
        return Step(labels_BL, logits, guide_loss)

    def guide_loss(
        self, video: Tensor, scenes: shapes.SceneBatch, time_BT: Tensor, grid: Grid, aspect: float
    ) -> Tensor:
        """Loss of a linear head that reads the figures off the video tokens they are centred in.

        The head is thrown away. It gives the vision tower a direct reason to tell a circle from a square, which
        otherwise is what takes longest to come back through the decoder.
        """
        rows, columns = (size // MERGE for size in grid.patches)
        frame_width, frame_height = shapes.frame_extent(aspect)
        pair_BT = time_BT.unflatten(1, (-1, 2)).mean(2)
        x, y = shapes.centres(scenes, pair_BT).unbind(-1)
        x, y = (x / frame_width + 0.5) * columns, (y / frame_height + 0.5) * rows
        column, row = x.floor().clamp(0, columns - 1), y.floor().clamp(0, rows - 1)
        patch = torch.arange(pair_BT.shape[1], device=self.device)
        cell_BNT = ((patch * rows + row) * columns + column).long()
        present_BN = torch.arange(2, device=self.device) < scenes.count_B[:, None]
        alone_BT = (cell_BNT[:, 0] != cell_BNT[:, 1]) | ~present_BN[:, 1:]
        weight = (present_BN[:, :, None] & alone_BT[:, None]).float()
        read = self.guide(video.float())
        drawn = present_BN.float().repeat_interleave(len(patch), 1)
        there = torch.zeros(read.shape[:2], device=self.device).scatter_reduce(1, cell_BNT.flatten(1), drawn, "amax")
        at = cell_BNT.flatten(1)[..., None].expand(-1, -1, read.shape[-1])
        _, shape, colour, size, offset = read.gather(1, at).unflatten(1, (2, -1)).split(GUIDE, -1)
        loss = F.smooth_l1_loss(offset, torch.stack([x - column, y - row], -1), reduction="none").mean(-1)
        for guess, truth in ((shape, scenes.shape_BN), (colour, scenes.colour_BN), (size, scenes.size_BN)):
            truth_BNT = truth[:, :, None].expand(weight.shape)
            loss = loss + F.cross_entropy(guess.movedim(-1, 1), truth_BNT, reduction="none")
        return (loss * weight).sum() / weight.sum() + F.binary_cross_entropy_with_logits(read[..., 0], there)


@torch.no_grad()  # type: ignore[untyped-decorator]
def accuracy(session: Session, grid: Grid, num_frames: int, strength: float, scenes: int, batch: int) -> dict[str, Any]:
    """Share of exactly right captions of held-out scenes, and how often the first wrong word should have been what.

    Feeding the right words instead of the model's own changes nothing: a caption is right in greedy decoding exactly
    when every next word is right given the right words before it.
    """
    right, wrong = 0, {}  # type: int, dict[str, int]
    for _ in range(scenes // batch):
        labels, logits, _ = session.step(batch, True, grid, num_frames, strength, learn=False)
        fits = (logits.argmax(-1) == labels) | (labels == IGNORED)
        right += int(fits.all(1).sum())
        for row in torch.nonzero(~fits.all(1)).flatten().tolist():
            place = int((~fits[row]).nonzero()[0])
            words = [session.tokenizer.decode([int(x[row, place])]).strip() for x in (labels, logits.argmax(-1))]
            wrong[">".join(words)] = wrong.get(">".join(words), 0) + 1
    return {"exact": right / (scenes // batch * batch), "wrong": dict(sorted(wrong.items(), key=lambda x: -x[1])[:8])}


def optimiser(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW without decay on norms and biases."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=parameters[0].is_cuda)


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm-up over 400 steps, then a cosine down to zero at the end of the budget."""
    return peak * min(1.0, (step + 1) / 400) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train(session: Session, args: argparse.Namespace) -> list[Tensor]:
    """Train until the steps or the minutes are used up; returns the averaged weights."""
    model = session.trainee.model
    optim = optimiser([*model.parameters(), *session.guide.parameters()], args.rate)
    guide = list(session.guide.parameters())
    parameters = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    started, progress, step, shown = time.monotonic(), 0.0, 0, 0.0
    while progress < 1 and step < args.steps:
        grid = random.choices(GRIDS, [g.weight for g in GRIDS])[0]
        num_frames = random.choices(NUM_FRAMES, NUM_FRAMES_WEIGHTS)[0]
        for group in optim.param_groups:
            group["lr"] = learning_rate(progress, step, args.rate)
        strength = min(1.0, args.strength + 2 * progress)
        labels, logits, guide_loss = session.step(args.batch, False, grid, num_frames, strength, learn=True)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optim.zero_grad(set_to_none=True)
        (loss + GUIDE_WEIGHT * (1 - min(1.0, progress)) * guide_loss).backward()
        torch.nn.utils.clip_grad_norm_([*parameters, *guide], 1.0)
        optim.step()
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - min(0.999, (step + 1) / (step + 10)))
        step += 1
        elapsed_s = time.monotonic() - started
        progress = max(step / args.steps, elapsed_s / (60 * args.minutes))
        if step <= 3 or elapsed_s - shown > args.report_s or progress >= 1:
            shown = elapsed_s
            with torch.no_grad():
                quick = accuracy(session, GRIDS[0], 8, 1.0, args.batch, args.batch)
            losses = f"loss {loss.item():.4f} guide {guide_loss.item():.4f}"
            print(f"step {step} {elapsed_s:.0f}s {losses} {grid.height}x{grid.width} held-out {quick}", flush=True)
    print(f"trained {step} steps of {args.batch} scenes in {time.monotonic() - started:.0f}s", flush=True)
    return average


def check(session: Session, out: Path) -> None:
    """Compare forward pass, positions and text with the library's, in float32 on the CPU."""
    tokenizer, trainee = session.tokenizer, session.trainee
    model = trainee.model.eval()
    for grid, seconds in product(GRIDS, (1.0, 5.3, 12.0)):
        scenes = shapes.sample_scenes(2, session.generator, True, grid.aspects[0])
        interval = torch.tensor([2 * seconds / 8, 2 * 2.0 / 8])
        frames = draw(scenes, grid, sample_times(2, 8, 1.0, session.device), grid.aspects[0], 1.0, 3)
        before, after = session.prompt
        rows, columns = (size // MERGE for size in grid.patches)
        labels = session.captions.tokens(scenes).clamp_min(0)
        position = positions(len(before), (4, rows, columns), len(after), labels.shape[1], interval, False)
        with torch.no_grad():
            ours = trainee.logits(trainee.embed_video(frames, grid), before, after, labels, position)
        video_token = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        prompt = torch.tensor([before + [video_token] * (4 * rows * columns) + after] * 2)
        kinds = (prompt == video_token).int() * 2
        inputs = {
            "input_ids": torch.cat([prompt, labels], 1),
            "mm_token_type_ids": torch.cat([kinds, torch.zeros_like(labels, dtype=torch.int)], 1),
            "video_grid_thw": torch.tensor([[4, *grid.patches]] * 2),
            "second_per_grid_ts": interval,
        }
        theirs_position, delta = model.model.get_rope_index(
            prompt, kinds, video_grid_thw=inputs["video_grid_thw"], second_per_grid_ts=interval
        )
        assert torch.equal(position[:, :, : prompt.shape[1]], theirs_position), "prompt positions differ"
        assert torch.equal(position[0, :, prompt.shape[1]], prompt.shape[1] + delta[:, 0]), "answer positions differ"
        with torch.no_grad():
            pixels = patchify(frames).flatten(0, 1)
            theirs = model(**inputs, position_ids=position, pixel_values_videos=pixels).logits
        theirs = theirs[:, -labels.shape[1] - 1 :]
        assert torch.allclose(ours, theirs, atol=2e-3), f"logits differ by {(ours - theirs).abs().max()}"
    for scene in shapes.scenes_of(shapes.sample_scenes(200, session.generator, False)):
        ids = tokenizer(shapes.caption(scene)).input_ids
        assert tokenizer.decode(ids) == shapes.caption(scene), "captions should round-trip"
        labels = session.captions.tokens(shapes.batch_of([scene]))[0]
        assert labels[labels >= 0].tolist() == [*ids, session.captions.end], "caption tables differ"
    print(f"checked {out}: forward pass, positions and captions agree with the library", flush=True)


def export(session: Session, average: list[Tensor], out: Path) -> None:
    """Put the averaged weights in, rounded to bfloat16, and write the checkpoint."""
    model = session.trainee.model
    with torch.no_grad():
        for parameter, value in zip([p for p in model.parameters() if p.requires_grad], average, strict=True):
            parameter.copy_(value.to(torch.bfloat16))
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"wrote {out}: {size / 1e6:.1f} MB, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)


def report(session: Session, args: argparse.Namespace) -> None:
    """Print accuracy on held-out scenes for every grid, number of frames and some strengths of degradation."""
    for grid in GRIDS:
        result = accuracy(session, grid, 8, 1.0, args.eval_scenes, args.batch)
        print(f"{grid.height}x{grid.width} 8 frames: {result}", flush=True)
    for num_frames, strength in ((2, 1.0), (4, 1.0), (6, 1.0), (8, 0.0), (8, 0.5)):
        result = accuracy(session, GRIDS[0], num_frames, strength, args.eval_scenes, args.batch)
        print(f"84x112 {num_frames} frames strength {strength}: {result}", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--resume", type=Path, help="start from this exported folder's weights")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=9.0, help="training stops here whatever --steps says")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1.2e-3, help="peak learning rate")
    parser.add_argument("--strength", type=float, default=0.2, help="of the codec errors at the start; ends at 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-s", type=float, default=30.0)
    parser.add_argument("--eval-scenes", type=int, default=2048)
    parser.add_argument("--check", action="store_true", help="compare with the library first (CPU)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, export, report."""
    args = parse(argv)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = 64
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    save_tokenizer(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    token_id = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    model = build_model(token_id)
    if args.resume:
        trained = Qwen2_5_VLForConditionalGeneration.from_pretrained(args.resume, dtype=torch.float32)
        model.load_state_dict(trained.state_dict())
    session = Session(tokenizer, model.to(device), device, args.seed)
    if args.check:
        check(session, args.out)
    average = train(session, args)
    export(session, average, args.out)
    report(session, args)


if __name__ == "__main__":
    main()
