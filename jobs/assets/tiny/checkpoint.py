"""What the tiny checkpoints share: constants, sizes of pictures, tokenizer and the files beside the weights."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig

from jobs.assets import shapes
from jobs.assets.tiny.family import HEAD_DIM, MERGE, ROPE_THETA, Family, Grid

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
TEXT_WIDTH, VISION_WIDTH = 256, 192
TEXT_TOKENS = 448
VOCABULARY = 512
"""Rows of the embedding; the ones after the special tokens are padding."""
PRETOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SWAPPED_WORDS = 0.12
GUIDE_WEIGHT = 0.3
NUM_FRAMES, NUM_FRAMES_WEIGHTS = (8, 6, 4, 2), (0.76, 0.1, 0.1, 0.04)
IGNORED = -100
LONGEST_CLIP_S = 13.0


def _with_portrait(grid: Grid) -> list[Grid]:
    low, high = grid.aspects
    return [grid, Grid(grid.columns, grid.rows, (1 / high, 1 / low), grid.weight * 0.6)]


GRIDS = (
    *_with_portrait(Grid(3, 4, (1.037, 1.508), 0.26)),
    *_with_portrait(Grid(3, 5, (1.508, 1.842), 0.26)),
    Grid(4, 4, (0.966, 1.036), 0.12),
    *_with_portrait(Grid(2, 5, (1.842, 2.17), 0.04)),
    *_with_portrait(Grid(2, 6, (2.171, 2.4), 0.03)),
)


def caption_parts() -> tuple[list[str], list[str]]:
    """Every first sentence and, with its leading space, every second sentence, in `caption_index` order."""
    phrases = [
        f"A {size} {colour} {shape} {motion}"
        for size, colour, shape, motion in product(shapes.SIZES, shapes.COLOURS, shapes.SHAPES, shapes.MOTIONS)
    ]
    first = [f"{phrase} on a {background} background." for phrase in phrases for background in shapes.BACKGROUNDS]
    return first, [f" {phrase}." for phrase in phrases]


def build_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    """Byte-level BPE set up as Qwen2's (NFC, its pre-tokenizer), learnt from captions, prompts and `texts`."""
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
    prompts = [PROMPT, *OTHER_PROMPTS, *texts, "system\n", "user\n", "assistant\n"]
    tokenizer.train_from_iterator([*first, *second, *prompts * 20], trainer)
    if tokenizer.get_vocab_size() > TEXT_TOKENS:
        raise AssertionError("the text vocabulary overlaps the special tokens")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(family: Family, out: Path) -> None:
    """Write the tokenizer, chat template and processor settings as the family's checkpoints have them."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(family.texts)
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
        "processor_class": family.processor,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(out / "tokenizer_config.json", settings)
    (out / "chat_template.jinja").write_text(family.chat_template)
    _write_json(out / "preprocessor_config.json", _processor_settings(family, "image"))
    _write_json(out / "video_preprocessor_config.json", _processor_settings(family, "video"))


def _processor_settings(family: Family, kind: str) -> dict[str, Any]:
    name = family.image_processor if kind == "image" else family.video_processor
    return {
        f"{kind}_processor_type": name,
        "processor_class": family.processor,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(family.patching.mean),
        "image_std": list(family.patching.std),
        "merge_size": MERGE,
        "patch_size": family.patch,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": family.min_pixels, "longest_edge": family.max_pixels},
        "temporal_patch_size": 2,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def build_model(family: Family, token_id: dict[str, int]) -> Any:
    """A model of the family with fresh weights."""
    end, end_of_turn = token_id["<|endoftext|>"], token_id["<|im_end|>"]
    text = {
        "num_hidden_layers": 4,
        "hidden_size": TEXT_WIDTH,
        "num_attention_heads": TEXT_WIDTH // HEAD_DIM,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA, **family.rope},
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end_of_turn,
        "pad_token_id": end,
        **family.text,
    }
    vision = {
        "depth": 4,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 512,
        "num_heads": VISION_WIDTH // HEAD_DIM,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": family.patch,
        **family.vision,
    }
    config = family.config_class(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
    )
    model = family.model_class(config)
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=end, eos_token_id=[end_of_turn, end], pad_token_id=end
    )
    return model
