"""A checkpoint in memory: transformers' modules with their weights, and all that requests and answers need of it.

Qwen2.5-VL's vision MLP is 3,420 wide, which is not a multiple of 16 bytes in bfloat16 and makes cuBLAS a third as fast
(260 against 765 TFLOP/s on an H200). Its weights are padded with zeros at loading: the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.generation import settle
from qwen_ray.engines.models import Model, read_json
from qwen_ray.engines.protocol import Caption, Sampling
from qwen_ray.engines.qwen_vl.family import FAMILIES, IMAGE_PAD, VIDEO_PAD, Family
from qwen_ray.engines.qwen_vl.preprocess import Patching
from qwen_ray.engines.qwen_vl.prompter import Prompter
from qwen_ray.engines.qwen_vl.tensor_parallel import ALONE, Group, shard
from qwen_ray.errors import ResourceError

WIDTH_MULTIPLE = 128
"""Padded widths are multiples of this: a tile of the fastest matrix products on Hopper."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded model.

    Attributes:
        network: transformers' model for conditional generation, in evaluation mode; of its layers this rank's part.
        group: the ranks that share it.
        precision: of its arithmetic, such as `bfloat16`.
        sampling: how answers are chosen where a request does not say.
        stop_token_ids: which tokens end an answer, by the checkpoint.
    """

    network: Any
    group: Group
    precision: str
    tokenizer: Any
    prompter: Prompter
    patching: Patching
    sampling: Sampling
    stop_token_ids: frozenset[int]
    pad_id: int

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer."""
        return int(self.network.config.text_config.max_position_embeddings)

    def stops(self, sampling: Sampling) -> frozenset[int]:
        """Which tokens end an answer."""
        stated = sampling.stop_token_ids
        return self.stop_token_ids if stated is None else frozenset(stated)

    def check_length(self, num_tokens: int, num_new: int, room: int | None = None) -> None:
        """Raise ResourceError for a request beyond the model's context, or beyond `room` tokens of the cache."""
        advice = "lower decode.num_frames or decode.max_pixels"
        what = f"{num_tokens} prompt tokens + {num_new} new ones exceed the"
        if num_tokens + num_new > self.context:
            raise ResourceError("too_long", f"{what} model's context of {self.context}; {advice}")
        if room is not None and num_tokens + num_new > room:
            raise ResourceError("too_long", f"{what} {room} that fit into the memory for keys and values; {advice}")

    def token_types(self, ids: torch.Tensor) -> torch.Tensor:
        """2 for video, 1 for image, 0 for text."""
        video, image = (int(self.tokenizer.convert_tokens_to_ids(pad)) for pad in (VIDEO_PAD, IMAGE_PAD))
        return (ids == video) * 2 + (ids == image) * 1

    def caption(self, new_ids: list[int], num_prompt: int, *, stopped: bool, flags: tuple[str, ...] = ()) -> Caption:
        """An answer from its tokens, the one that ended it included."""
        kept = new_ids[:-1] if stopped else new_ids
        text = self.tokenizer.decode(kept, skip_special_tokens=True).strip()
        return Caption(text, "stop" if stopped else "length", num_prompt, len(new_ids), flags)


def load(config: CaptionConfig, model: Model, *, device_map: str, group: Group = ALONE) -> Checkpoint:
    """Load a checkpoint.

    Args:
        config: whose precision and sampling hold.
        model: on this node's disk.
        device_map: `cpu`, `cuda:0`, or `auto` to spread layers over all GPUs of this process.
        group: the ranks that share the weights, each with a device of its own.

    Raises:
        ConfigError: so many ranks cannot share this model.
    """
    settled = settle(config, read_json(model, "generation_config.json"))
    cuda = device_map != "cpu"
    if not cuda:
        torch.set_num_threads(max(1, round(config.num_cpus)))
    dtype = {"auto": torch.bfloat16 if cuda else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model.location)
    network = _network(model, dtype, device_map, group)
    family = FAMILIES[network.config.model_type]
    vision = network.config.vision_config
    patching = _patching(model, family, vision)
    stated = network.generation_config.eos_token_id
    stated = tokenizer.eos_token_id if stated is None else stated
    ends = stated if isinstance(stated, list) else [stated]
    pad = network.generation_config.pad_token_id
    return Checkpoint(
        network=network,
        group=group,
        precision=str(dtype).removeprefix("torch."),
        tokenizer=tokenizer,
        prompter=Prompter(tokenizer, family, patching, float(getattr(vision, "tokens_per_second", 1))),
        patching=patching,
        sampling=_sampling(settled),
        stop_token_ids=frozenset(ends),
        pad_id=ends[0] if pad is None else pad,
    )


def _network(model: Model, dtype: torch.dtype, device_map: str, group: Group) -> Any:
    """transformers' model, of whose layers this rank's part is kept."""
    # What several ranks share may be larger than a GPU: all of it is in the host's memory alone.
    whole = None if device_map == "cpu" or group.size > 1 else device_map
    network = AutoModelForImageTextToText.from_pretrained(
        model.location, dtype=dtype, attn_implementation="sdpa", device_map=whole
    ).eval()
    shard(network, group)
    return network if whole else network.to(device_map)


def pad_widths(vision: nn.Module) -> None:
    """Pad the MLPs of a vision tower whose width makes matrix products slow."""
    for block in cast(Any, vision).blocks:
        if not hasattr(block.mlp, "gate_proj") or block.mlp.gate_proj.out_features % 8 == 0:
            continue
        more = -block.mlp.gate_proj.out_features % WIDTH_MULTIPLE
        for linear, side in ((block.mlp.gate_proj, 0), (block.mlp.up_proj, 0), (block.mlp.down_proj, 1)):
            _pad(linear, more, side)


def _pad(linear: nn.Linear, more: int, side: int) -> None:
    widths = (0, 0, 0, more) if side == 0 else (0, more)
    linear.weight = nn.Parameter(nn.functional.pad(linear.weight.data, widths), requires_grad=False)
    if side == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(nn.functional.pad(linear.bias.data, (0, more)), requires_grad=False)
    linear.out_features, linear.in_features = linear.weight.shape


def _sampling(config: CaptionConfig) -> Sampling:
    """Of a settled configuration."""
    temperature, top_p, top_k, penalty = config.temperature, config.top_p, config.top_k, config.repetition_penalty
    assert temperature is not None, "not settled"
    assert top_p is not None, "not settled"
    assert top_k is not None, "not settled"
    assert penalty is not None, "not settled"
    return Sampling(config.max_new_tokens, temperature, top_p, top_k, penalty, config.seed)


def _patching(model: Model, family: Family, vision: Any) -> Patching:
    """From the vision config, and the channel statistics from the preprocessor's file where the checkpoint has one."""
    files = ("video_preprocessor_config.json", "preprocessor_config.json")
    stated = next((found for name in files if (found := read_json(model, name))), {})
    return Patching(
        patch=vision.patch_size,
        merge=vision.spatial_merge_size,
        temporal=vision.temporal_patch_size,
        mean=tuple(stated.get("image_mean", family.mean)),
        std=tuple(stated.get("image_std", family.std)),
    )
