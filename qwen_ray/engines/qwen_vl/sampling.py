"""Sampling whose draw depends on the request alone.

`generate(do_sample=True)` draws from one global stream, so a caption would change with the clips that happen to share
its batch, and a row computed again after a crash would differ from the first. Adding Gumbel noise to
log-probabilities and taking the maximum draws from exactly the same distribution (Gumbel-max trick; Maddison et al.
2014, arXiv 1411.0030). The noise is a hash of seed, clip, position and token (counter-based, as in Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), made where the scores are: a generator per clip would fill a vocabulary
of 152,000 on the CPU for each row of each step.

Axes: B prompts, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from qwen_ray.engines.protocol import Sampling


def choose(logits_BV: torch.Tensor, streams_B: torch.Tensor, how: Sampling) -> torch.Tensor:
    """tokens_B drawn from rows of logits.

    Args:
        logits_BV: of the next token.
        streams_B: int64, of `streams`, plus the number of tokens that the answer has already.
        how: its temperature more than 0.
    """
    logprobs_BV = _top(torch.log_softmax(logits_BV.float() / how.temperature, dim=-1), how.top_k)
    gumbel_BV = -torch.log(-torch.log(_uniform(_mixed(streams_B), logits_BV.shape[-1])))
    return (logprobs_BV + gumbel_BV).masked_fill(_outside_nucleus(logprobs_BV, how.top_p), -torch.inf).argmax(-1)


def streams(seed: int, keys: Sequence[str]) -> torch.Tensor:
    """int64, where each answer's noise begins; `keys` are such as clip ids."""
    return torch.tensor([_stream(seed, key) for key in keys])


def penalised(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty_B1: torch.Tensor) -> torch.Tensor:
    """Logits with tokens that prompt or answer hold made less likely (Keskar et al. 2019, arXiv 1909.05858, as
    `RepetitionPenaltyLogitsProcessor` of transformers has it).
    """
    logits_BV = logits_BV.float()
    return torch.where(seen_BV, torch.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1), logits_BV)


def _top(logprobs_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    """The same with all but the `top_k` likeliest tokens ruled out, and what is left adding up to 1; 0 keeps all."""
    if not 0 < top_k < logprobs_BV.shape[-1]:
        return logprobs_BV
    least_B1 = logprobs_BV.topk(top_k, dim=-1).values[:, -1:]
    return torch.log_softmax(logprobs_BV.masked_fill(logprobs_BV < least_B1, -torch.inf), dim=-1)


def _outside_nucleus(logprobs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p >= 1:
        return torch.isneginf(logprobs_BV)  # sorting the vocabulary costs more than all the rest
    ordered_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    mass_before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    return torch.zeros_like(order_BV, dtype=torch.bool).scatter(-1, order_BV, mass_before_BV >= top_p)


def _uniform(streams_B: torch.Tensor, size: int) -> torch.Tensor:
    """float32 noise_BV in (0, 1), ends excluded: the upper 23 bits of a hash of each stream and each place."""
    place_V = torch.arange(size, device=streams_B.device)
    bits_BV = _shifted(_mixed(streams_B[:, None] + _GOLDEN * place_V), 41)
    return (bits_BV.float() + 0.5) / 2**23


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Constants of SplitMix64 (Steele, Lea and Flood 2014) as signed 64-bit numbers; products wrap as they should."""


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits as if x had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _stream(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest(), signed=True)
