"""The language model's weights over several ranks, one device each: every rank keeps some heads of attention and some
columns of the MLPs, and what all of them make of a token is added up twice a layer (Megatron-LM, arXiv 1909.08053).

Every model passes through here, a single device as a group of one. transformers' own plans were the alternative; they
wrap modules in hooks, which our compiled layers would have to look through.

What stays whole on every rank: norms and routers, which every rank needs as they are; embeddings and head, which are
small beside the layers; and the vision tower, since pictures do not look at each other and are better shared out one by
one than in slices that must be added up in each of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import distributed

from qwen_ray.engines.qwen_vl.family import PAGED
from qwen_ray.errors import ConfigError

SPLIT = {
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "k_proj.weight": 0,
    "k_proj.bias": 0,
    "v_proj.weight": 0,
    "v_proj.bias": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "experts.gate_up_proj": 1,  # experts, gates over ups, width
    "experts.down_proj": 2,  # experts, width, gated
}
"""By the last two parts of a weight's name, which axis the ranks share out."""
ADDED = ("o_proj.bias", "down_proj.bias")
"""Behind a sum over the ranks: the first rank alone adds them."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Fields of a text config that must be multiples of the group's size, where a model has them."""


@dataclass(frozen=True, slots=True)
class Group:
    """One rank among those that share a model: of the default process group, which has been started if `size` > 1."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor


ALONE = Group()


def shard(network: Any, group: Group) -> None:
    """Keep this rank's part of the language model's weights, and free the rest.

    Args:
        network: transformers' model for conditional generation.
        group: this rank and how many there are.

    Raises:
        ConfigError: the model cannot be divided into so many parts.
    """
    _check(network.config, group.size)
    for name, weight in network.model.language_model.layers.named_parameters():
        kind = ".".join(name.split(".")[-2:])
        if kind in SPLIT:
            part = _part(weight.data, SPLIT[kind], group, packed=2 if kind == "experts.gate_up_proj" else 1)
            weight.data = part if group.size == 1 else part.clone(memory_format=torch.contiguous_format)
        elif kind in ADDED and group.rank > 0:
            weight.data.zero_()


def _part(weight: torch.Tensor, axis: int, group: Group, packed: int) -> torch.Tensor:
    """This rank's part of each of the `packed` equal weights that follow each other on `axis`."""
    each = weight.unflatten(axis, (packed, -1))
    return each.chunk(group.size, axis + 1)[group.rank].flatten(axis, axis + 1)


def _check(config: Any, size: int) -> None:
    if size > 1 and config.model_type not in PAGED:
        raise ConfigError(f"{size} ranks share a model of type {config.model_type!r}; allowed: {', '.join(PAGED)}")
    stated = {name: int(getattr(config.text_config, name)) for name in DIVIDED if hasattr(config.text_config, name)}
    most = gcd(*stated.values())
    allowed = ", ".join(str(divisor) for divisor in range(1, most + 1) if most % divisor == 0)
    for name, found in stated.items():
        if found % size:
            raise ConfigError(
                f"{size} ranks cannot share the model's {name} = {found} evenly; allowed: {allowed} ranks"
            )
