"""What an engine's memory is for, settled before the first request: weights, one step, and the rest for the cache.

What a step needs is measured, not estimated: on a GPU a step as large as any will be is run once with an empty cache.
Whatever is left of this process's share becomes pages. A request that could not fit is refused with the numbers, so an
engine runs out of memory only when somebody else takes what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.qwen_vl.cache import PAGE
from qwen_ray.errors import ResourceError

if TYPE_CHECKING:
    from qwen_ray.engines.qwen_vl.runner import Runner

BUDGET = 32_768
"""Tokens of a prompt step on a GPU: matrix products are at full speed from some 8,000 on, and steps are rarer."""
PATCHES_A_TOKEN = 4
"""A merged cell is one token of the prompt."""
LEAST_BUDGET = 1_024
CPU_BUDGET, CPU_TOKENS = 8_192, 16_384
MOST_FEATURES = 1 << 30
RESERVE = 0.04
"""Share of the memory left alone on a GPU: for recorded steps, what libraries take, and gaps between allocations."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        weights: of the model.
        step: what the largest step takes besides.
        cache: of keys and values.
        features: of pictures that are kept for requests that show them again.
        reserve: left for what cannot be planned.
        budget: most tokens of a prompt step.
        max_patches: most patches that are encoded at once, where a single picture has no more.
        num_pages: of the cache.
    """

    weights: int
    step: int
    cache: int
    features: int
    reserve: int
    budget: int
    max_patches: int
    num_pages: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.step + self.cache + self.features + self.reserve

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the cache."""
        return self.num_pages * PAGE


def plan(runner: Runner, config: CaptionConfig) -> MemoryPlan:
    """Share out this process's memory.

    Raises:
        ResourceError: not even one request of the model's context, or of a step's budget, would fit.
    """
    context, page_bytes = runner.context, runner.bytes_a_page
    if runner.device.type == "cpu":
        num_pages = -(-max(CPU_TOKENS, config.batch_size * 2048) // PAGE)
        patches, features = CPU_BUDGET * PATCHES_A_TOKEN, MOST_FEATURES // 4 if config.reuse else 0
        return MemoryPlan(0, 0, num_pages * page_bytes, features, 0, CPU_BUDGET, patches, num_pages)
    free, total = torch.cuda.mem_get_info(runner.device)
    weights = torch.cuda.memory_allocated(runner.device)
    share = min(1.0, config.num_gpus)
    mine = min(free + torch.cuda.memory_reserved(runner.device), int(share * total))
    room = mine - int(RESERVE * mine) - weights
    budget, step = _largest_step(runner, room // 2)
    features = min(MOST_FEATURES, room // 16) if config.reuse else 0
    num_pages = min(config.batch_size * -(-context // PAGE), (room - step - features) // page_bytes)
    if num_pages * PAGE < LEAST_BUDGET:
        gib = 2**30
        raise ResourceError(
            "out_of_memory",
            f"a share of {share:g} of {total / gib:.1f} GiB, of which {free / gib:.1f} are free, leaves no room for a "
            f"cache beside {weights / gib:.1f} GiB of weights and {step / gib:.1f} for a step; raise caption.num_gpus",
        )
    reserve = mine - room - weights
    cache, patches = num_pages * page_bytes, budget * PATCHES_A_TOKEN
    return MemoryPlan(weights, step, cache, features, reserve, budget, patches, num_pages)


def _largest_step(runner: Runner, room: int) -> tuple[int, int]:
    """The largest budget whose step fits into `room` bytes, and what it takes."""
    budget = BUDGET
    while True:
        try:
            step = runner.measure_step(budget, budget * PATCHES_A_TOKEN)
        except torch.OutOfMemoryError:
            step = room + 1
        if step <= room or budget <= LEAST_BUDGET:
            return budget, step
        budget //= 2
