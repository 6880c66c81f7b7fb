"""Whisper from CTranslate2 form (engine `faster_whisper`) to transformers form (engine `whisper`).

    python -m jobs.assets.convert_whisper OUT [--model FOLDER]

By default it converts the English Whisper tiny of the `demo` extra, so that both engines can be tried and compared
without a model hub. CTranslate2's own converter goes the other way only. Every tensor must find its place and every
place its tensor; the sizes are read off the tensors. Weights must be float16 or float32: quantised ones are refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from qwen_ray.engines.models import resolve

FORMAT = 6
"""Version of CTranslate2's `model.bin` (`ctranslate2/specs/model_spec.py`, `_serialize`)."""
FLOATS: dict[int, str] = {0: "<f4", 4: "<f2"}
"""CTranslate2's type ids of the floats that numpy has."""
HEAD_SIZE = 64
"""Of every Whisper."""
MULTILINGUAL_VOCABULARY = 51865
"""Least size of the vocabulary of a Whisper that knows more than English."""
Tensors = dict[str, npt.NDArray[np.floating[Any]]]

PLACES = {
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "ffn/layer_norm": "final_layer_norm",
}
"""CTranslate2's names, less stack and layer, to transformers'."""
FUSED = {
    "self_attention/linear_0": [f"self_attn.{part}_proj" for part in "qkv"],
    "attention/linear_1": [f"encoder_attn.{part}_proj" for part in "kv"],
}
"""Layers that lie below one another in one of CTranslate2's."""


def convert(source: Path, target: Path) -> None:
    """Write the model in `source` to `target`. Raises ValueError where it is not a float Whisper of CTranslate2."""
    stated = json.loads((source / "config.json").read_text())
    tensors = {
        name: part for key, value in read_tensors(source / "model.bin").items() for name, part in _place(key, value)
    }
    config = _config(tensors, source)
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    weights = {name: torch.from_numpy(value.astype(np.float32)) for name, value in tensors.items()}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = _generation(config, stated)
    model.to(torch.float16).save_pretrained(target)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(target)
    shutil.copy(source / "tokenizer.json", target)
    special = {"tokenizer_class": "WhisperTokenizer"} | {
        f"{which}_token": "<|endoftext|>" for which in ("bos", "eos", "unk", "pad")
    }
    (target / "tokenizer_config.json").write_text(json.dumps(special, indent=2))


def read_tensors(path: Path) -> Tensors:
    """The float tensors of a `model.bin` by name; flags and counts are left out, since the shapes tell the same."""
    tensors: Tensors = {}
    with path.open("rb") as file:
        version, spec, _ = _number(file, "<I"), _string(file), _number(file, "<I")
        if version != FORMAT or spec != "WhisperSpec":
            raise ValueError(f"{path}: {spec} in format {version}; expected WhisperSpec in format {FORMAT}")
        for _ in range(_number(file, "<I")):
            name = _string(file)
            shape = [_number(file, "<I") for _ in range(_number(file, "<B"))]
            kind, data = _number(file, "<B"), file.read(_number(file, "<I"))
            if kind in FLOATS:
                tensors[name] = np.frombuffer(data, FLOATS[kind]).reshape(shape)
            elif name.endswith("weight"):
                raise ValueError(
                    f"{path}: {name} is of CTranslate2's type {kind}; only float16 and float32 can be converted"
                )
    return tensors


def _number(file: BinaryIO, kind: str) -> int:
    return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])


def _string(file: BinaryIO) -> str:
    return file.read(_number(file, "<H"))[:-1].decode()


def _place(key: str, value: npt.NDArray[np.floating[Any]]) -> list[tuple[str, npt.NDArray[np.floating[Any]]]]:
    """Where a tensor of CTranslate2 belongs in transformers; three places where it holds q, k and v."""
    key = key.replace("gamma", "weight").replace("beta", "bias")
    stack, layer, rest = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)", key).groups()  # type: ignore[union-attr]
    prefix = f"model.{stack}." + (f"layers.{layer}." if layer else "")
    if rest in PLACES:
        return [(prefix + PLACES[rest], value)]
    module, _, kind = rest.rpartition("/")
    if module in FUSED:
        parts = zip(FUSED[module], np.split(value, len(FUSED[module])), strict=True)
        # Whisper's keys have no bias; CTranslate2 stores zeros
        return [
            (f"{prefix}{name}.{kind}", part) for name, part in parts if not (name.endswith("k_proj") and kind == "bias")
        ]
    return [(f"{prefix}{PLACES.get(module, module)}.{kind}", value)]


def _config(tensors: Tensors, source: Path) -> WhisperConfig:
    vocab_size, d_model = tensors["model.decoder.embed_tokens.weight"].shape
    depth = {
        stack: len({n.split(".")[3] for n in tensors if n.startswith(f"model.{stack}.layers.")})
        for stack in ("encoder", "decoder")
    }
    ids = {
        token["content"]: token["id"] for token in json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    }
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    sizes: dict[str, int] = {
        f"{stack}_{what}": value
        for stack in ("encoder", "decoder")
        for what, value in (
            ("layers", depth[stack]),
            ("attention_heads", d_model // HEAD_SIZE),
            ("ffn_dim", tensors[f"model.{stack}.layers.0.fc1.weight"].shape[0]),
        )
    }
    return WhisperConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_mel_bins=tensors["model.encoder.conv1.weight"].shape[1],
        max_source_positions=tensors["model.encoder.embed_positions.weight"].shape[0],
        max_target_positions=tensors["model.decoder.embed_positions.weight"].shape[0],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        **sizes,
    )


def _generation(config: WhisperConfig, stated: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(
        alignment_heads=stated["alignment_heads"],
        suppress_tokens=stated["suppress_ids"],
        begin_suppress_tokens=stated["suppress_ids_begin"],
        no_timestamps_token_id=config.vocab_size - 1502,  # 1501 times follow it, of 0.02 s each
        is_multilingual=config.vocab_size >= MULTILINGUAL_VOCABULARY,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        max_initial_timestamp_index=50,
        max_length=config.max_target_positions,
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--model", default="builtin:whisper-tiny.en", help="folder in CTranslate2 form, or builtin:NAME"
    )
    asked = parser.parse_args()
    convert(Path(resolve(asked.model).location), asked.out)


if __name__ == "__main__":
    main()
