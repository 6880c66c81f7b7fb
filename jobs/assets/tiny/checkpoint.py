"""The tiny checkpoint: its constants, tokenizer, settings and fresh weights, laid out as every Qwen2.5-VL is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

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
