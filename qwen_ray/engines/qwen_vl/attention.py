"""Attention over packed segments and over the cache, twice: through SDPA anywhere, and through our kernels on CUDA.

Both are the same function. SDPA works in any precision and is what exactness is tested with; `Flash` (`kernels`) needs
CUDA and half precision.

Axes: T query tokens, S key tokens, B sequences, H query heads, G key heads, each for H/G query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from qwen_ray.engines.qwen_vl.cache import PAGE


@dataclass(frozen=True, slots=True)
class Segments:
    """Which stretch of packed queries looks at which stretch of packed keys.

    Attributes:
        queries, keys: their lengths, one by one.
        query_ends, key_ends: int32 on the device, where each ends, with a 0 before.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_ends: torch.Tensor
    key_ends: torch.Tensor


def segments(queries: Sequence[int], keys: Sequence[int] | None, device: torch.device) -> Segments:
    """Segments of these lengths; keys None where queries look at themselves."""
    query_ends = _ends(queries, device)
    if keys is None:
        return Segments(tuple(queries), tuple(queries), query_ends, query_ends)
    return Segments(tuple(queries), tuple(keys), query_ends, _ends(keys, device))


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences that decode one token each.

    Attributes:
        table: int32 [slots, pages], which pages hold each slot's tokens, in order.
        slots_B, lengths_B: int32, each sequence's slot and number of tokens, the newest included.
        longest: most tokens that one of them may have.
    """

    table: torch.Tensor
    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    longest: int


class Attention(Protocol):
    """How attention is computed."""

    def packed(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, where: Segments, *, causal: bool
    ) -> torch.Tensor:
        """o_THD. Causal: the last query of a segment sees all of its keys, the one before all but the last."""

    def paged(self, q_BHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        """o_BHD over all tokens of each sequence; keys and values are [pages, G, PAGE, D]."""


class Sdpa:
    """`scaled_dot_product_attention`, segment by segment; equal ones in a row together."""

    def packed(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, where: Segments, *, causal: bool
    ) -> torch.Tensor:
        """See `Attention.packed`."""
        outputs, query, key = [], 0, 0
        for (num_queries, num_keys), equal in groupby(zip(where.queries, where.keys, strict=True)):
            count = len(list(equal))
            q, k, v = (
                part.unflatten(0, (count, length)).transpose(1, 2)
                for part, length in (
                    (q_THD[query : query + count * num_queries], num_queries),
                    (k_SGD[key : key + count * num_keys], num_keys),
                    (v_SGD[key : key + count * num_keys], num_keys),
                )
            )
            mask = None
            if causal and num_queries != num_keys:
                mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
            is_causal = causal and mask is None
            out = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            query, key = query + count * num_queries, key + count * num_keys
        return torch.cat(outputs)

    def paged(self, q_BHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `Attention.paged`."""
        pages = rows.table[rows.slots_B, : -(-rows.longest // PAGE)]
        k, v = (part[pages].transpose(1, 2).flatten(2, 3) for part in (keys, values))
        seen_BS = torch.arange(k.shape[2], device=k.device) < rows.lengths_B[:, None]
        out = scaled_dot_product_attention(q_BHD[:, :, None], k, v, seen_BS[:, None, None], enable_gqa=True)
        return out[:, :, 0]


class Flash:
    """Our Triton kernels; CUDA in bfloat16 or float16 alone."""

    def __init__(self) -> None:
        from qwen_ray.engines.qwen_vl import kernels  # Triton comes with CUDA builds of torch alone

        self._kernels = kernels

    def packed(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, where: Segments, *, causal: bool
    ) -> torch.Tensor:
        """See `Attention.packed`."""
        ends, longest = (where.query_ends, where.key_ends), max(where.queries)
        return self._kernels.attend_segments(q_THD, k_SGD, v_SGD, *ends, longest, causal=causal)

    def paged(self, q_BHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `Attention.paged`."""
        return self._kernels.attend_pages(q_BHD, keys, values, rows.table, rows.slots_B, rows.lengths_B)


def best(device: torch.device, dtype: torch.dtype) -> Attention:
    """The fastest that computes in this precision there."""
    return Flash() if device.type == "cuda" and dtype.itemsize == 2 else Sdpa()
