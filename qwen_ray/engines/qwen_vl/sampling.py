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


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # transformers ships no types
    """Turns greedy choice into temperature and nucleus sampling with one noise stream per row.

    Args:
        keys: one per row of the batch, such as clip ids.
        seed: the run's seed.
        temperature: more than 0.
        top_p: nucleus bound, more than 0, at most 1.
    """

    def __init__(self, keys: Sequence[str], seed: int, temperature: float, top_p: float) -> None:
        self._streams = [torch.Generator().manual_seed(_stream_seed(seed, key)) for key in keys]
        self._temperature, self._top_p = temperature, top_p

    def __call__(self, _: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """scores_BV, logits over the vocabulary -> the same with the draw's winner on top."""
        logprobs_BV = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        noise_BV = torch.stack([torch.rand(scores.shape[-1], generator=stream) for stream in self._streams])
        gumbel_BV = -torch.log(-torch.log(noise_BV.clamp(1e-20, 1 - 1e-7))).to(scores.device)
        return torch.where(_outside_nucleus(logprobs_BV, self._top_p), -torch.inf, logprobs_BV + gumbel_BV)


def _outside_nucleus(logprobs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    mass_before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    return torch.zeros_like(order_BV, dtype=torch.bool).scatter(-1, order_BV, mass_before_BV >= top_p)


def _stream_seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()) >> 1
