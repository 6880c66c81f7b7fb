"""Sampling whose draw depends on the request alone.

`generate(do_sample=True)` draws from one global stream, so a caption would change with the clips that happen to share
its batch, and a row computed again after a crash would differ from the first. Adding Gumbel noise to
log-probabilities and taking the maximum draws from exactly the same distribution (Gumbel-max trick; Maddison et al.
2014, arXiv 1411.0030), and the noise can be keyed by clip and position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from qwen_ray.config import CaptionConfig


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # transformers ships no types
    """Turns greedy choice into temperature and nucleus sampling with one noise stream per row.

    Args:
        keys: one per row of the batch, such as clip ids.
        config: settled, its temperature more than 0.
    """

    def __init__(self, keys: Sequence[str], config: CaptionConfig) -> None:
        assert config.temperature is not None, "not settled"
        assert config.top_p is not None, "not settled"
        assert config.top_k is not None, "not settled"
        self._streams = [torch.Generator().manual_seed(_stream_seed(config.seed, key)) for key in keys]
        self._temperature, self._top_p, self._top_k = config.temperature, config.top_p, config.top_k

    def __call__(self, _: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """scores_BV, logits over the vocabulary -> the same with the draw's winner on top."""
        logprobs_BV = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        noise_BV = torch.stack([torch.rand(scores.shape[-1], generator=stream) for stream in self._streams])
        gumbel_BV = -torch.log(-torch.log(noise_BV.clamp(1e-20, 1 - 1e-7))).to(scores.device)
        kept_BV = _top(logprobs_BV, self._top_k)
        return torch.where(_outside_nucleus(kept_BV, self._top_p), -torch.inf, kept_BV + gumbel_BV)


def _top(logprobs_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    """The same with all but the `top_k` likeliest tokens ruled out, and what is left adding up to 1; 0 keeps all."""
    if not 0 < top_k < logprobs_BV.shape[-1]:
        return logprobs_BV
    least_B1 = logprobs_BV.topk(top_k, dim=-1).values[:, -1:]
    return torch.log_softmax(logprobs_BV.masked_fill(logprobs_BV < least_B1, -torch.inf), dim=-1)


def _outside_nucleus(logprobs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    mass_before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    return torch.zeros_like(order_BV, dtype=torch.bool).scatter(-1, order_BV, mass_before_BV >= top_p)


def _stream_seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()) >> 1
