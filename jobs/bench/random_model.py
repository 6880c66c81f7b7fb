"""Real architectures with random weights as checkpoint folders: how fast a model is does not depend on what it says.

    python -m jobs.bench.random_model qwen2.5-vl-7b FOLDER --tokenizer qwen.tiktoken
    python -m jobs.bench.random_model whisper-large-v3-turbo FOLDER --tokenizer TOKENIZER_FOLDER

The configurations are those of the published checkpoints. `qwen.tiktoken` is Qwen's vocabulary as the PyPI package
`dashscope` carries it; the Whisper tokenizer is a folder such as `jobs.assets.convert_whisper` writes (the vocabulary
is then that folder's). Weights are normal with the published standard deviation, made on the GPU where there is one.
They never end a text, so every answer has all its tokens: a benchmark must say so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""Qwen's special tokens in the order of their ids, from 151643 on."""
FIRST_SPECIAL = 151643
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
QWEN: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    },
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
}
TURBO = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_layers": 4,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
"""Whisper large-v3-turbo."""
SIZES = ("qwen2.5-vl-7b", "qwen3-vl-8b", "whisper-large-v3-turbo")


def write(name: str, folder: Path, tokenizer: Path) -> None:
    """A checkpoint folder of one of `SIZES`."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in QWEN:
        _write_qwen(QWEN[name], folder, tokenizer)
    else:
        _write_whisper(folder, tokenizer)


def _write_qwen(values: dict[str, Any], folder: Path, tiktoken: Path) -> None:
    qwen_tokenizer(tiktoken).save_pretrained(folder)
    _name_tokenizer(folder, "Qwen2Tokenizer")
    config = AutoConfig.for_model(**values, **IDS)
    with _default_device():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    GenerationConfig(eos_token_id=[151645, 151643], pad_token_id=151643).save_pretrained(folder)


def qwen_tokenizer(tiktoken: Path) -> PreTrainedTokenizerFast:
    """Qwen's tokenizer, special tokens at their own ids, with a chat template that has one place for a video."""
    converted = TikTokenConverter(vocab_file=str(tiktoken), pattern=PATTERN, extra_special_tokens=list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converted.converted(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    found = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    if found != list(range(FIRST_SPECIAL, FIRST_SPECIAL + len(SPECIAL))):
        raise SystemExit(f"{tiktoken}: special tokens at {found}, expected from {FIRST_SPECIAL} on")
    return tokenizer


def _name_tokenizer(folder: Path, name: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))


def _write_whisper(folder: Path, tokenizer: Path) -> None:
    for path in tokenizer.iterdir():
        if path.suffix == ".json" and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    features = folder / "preprocessor_config.json"
    features.write_text(json.dumps(json.loads(features.read_text()) | {"feature_size": TURBO["num_mel_bins"]}))
    stated = json.loads((folder / "generation_config.json").read_text())
    small = WhisperConfig.from_pretrained(tokenizer)
    # as many heads as the published model lists, in its four layers
    stated["alignment_heads"] = [[2, 4], [2, 11], [3, 3], [3, 6], [3, 11], [3, 14]]
    # A trained Whisper closes its passages at the end of the sound. Random weights close them anywhere, and the rest of
    # a chunk would be heard again and again; without end times a chunk is one passage, heard once.
    first_time = int(stated["no_timestamps_token_id"]) + 1
    stated["suppress_tokens"] = [*(stated.get("suppress_tokens") or ()), *range(first_time + 1, small.vocab_size)]
    special = {name: getattr(small, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = WhisperConfig(**TURBO, **special, decoder_start_token_id=small.decoder_start_token_id)
    with _default_device():
        model = WhisperForConditionalGeneration(config).to(torch.float16)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(stated))


def _default_device() -> torch.device:
    """Usable as a context: what is made within is made there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Write one folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    started = time.monotonic()
    write(arguments.name, arguments.folder, arguments.tokenizer)
    size = sum(path.stat().st_size for path in arguments.folder.iterdir())
    AutoTokenizer.from_pretrained(arguments.folder)
    print(f"{arguments.folder}: {size / 1e9:.1f} GB in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
