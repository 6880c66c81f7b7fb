"""Attention as Triton kernels: over packed segments, and of one new token per sequence over a paged cache.

Segments: online softmax over tiles (FlashAttention, Dao 2023, arXiv 2307.08691). On an H200 it is faster than the
kernel that torch 2.11 has for it (FlashAttention 2): 407 against 309 TFLOP/s on prompts of 2,400 tokens with 28 heads
on 4, 261 against 163 on 626 tokens with 32 on 8, 2.7 against 3.6 ms for 10,000 windows of a picture; cuDNN's took 50 ms
and more to prepare for each new set of lengths.

Pages: decoding reads every cached key and value once and computes little with them, so memory is the limit: the kernel
reads each page once for all query heads that share a key head, 16 KB at a time (4.3 TB/s, all that the memory gives,
with 256 sequences of 2,480 tokens). Few long sequences would leave most of the chip idle; then each is split among
several programs, whose results are joined by a second kernel (Flash-Decoding, Dao et al. 2023,
pytorch.org/blog/flash-decoding).

Axes: T query tokens, S key tokens, B sequences, H query heads, G key heads, D head dimension; M queries and N keys of a
tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from qwen_ray.engines.qwen_vl.cache import PAGE

PROGRAMS = 8 * 132
"""As many programs as keep the 132 multiprocessors of an H200 evenly loaded; fewer sequences are split into parts."""
MAX_SPLITS = 32
LOG2_E = math.log2(math.e)


@triton.jit
def _attend(
    q, keys, values, out, sums, table, slots, lengths, scale, table_width, num_groups,
    SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One sequence, one key head and its SHARED query heads, one split of the pages."""
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + b)
    pages = table + tl.load(slots + b).to(tl.int64) * table_width
    num_pages = tl.cdiv(length, PAGE)
    share = tl.cdiv(num_pages, SPLITS)
    first = split * share
    last = tl.minimum(first + share, num_pages)

    head = tl.arange(0, SHARED_PADDED)
    dim = tl.arange(0, D)
    row = tl.arange(0, PAGE)
    is_head = (head < SHARED)[:, None]
    places = ((b * num_groups + g) * SHARED + head)[:, None] * D + dim[None, :]
    q_HD = tl.load(q + places, mask=is_head, other=0.0)
    most = tl.full((SHARED_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((SHARED_PADDED,), tl.float32)
    sum_HD = tl.zeros((SHARED_PADDED, D), tl.float32)
    for p in range(first, last):
        base = (tl.load(pages + p).to(tl.int64) * num_groups + g) * PAGE * D
        k_DR = tl.load(keys + base + row[None, :] * D + dim[:, None])
        score_HR = tl.dot(q_HD, k_DR) * scale
        score_HR = tl.where((p * PAGE + row < length)[None, :], score_HR, float("-inf"))
        new_most = tl.maximum(most, tl.max(score_HR, 1))
        weight_HR = tl.exp2(score_HR - new_most[:, None])
        shrink = tl.exp2(most - new_most)
        v_RD = tl.load(values + base + row[:, None] * D + dim[None, :])
        sum_HD = sum_HD * shrink[:, None] + tl.dot(weight_HR.to(v_RD.dtype), v_RD)
        total = total * shrink + tl.sum(weight_HR, 1)
        most = new_most
    if SPLITS == 1:
        tl.store(out + places, (sum_HD / total[:, None]).to(out.dtype.element_ty), mask=is_head)
    else:
        is_empty = total == 0
        part = split + SPLITS * ((b * num_groups + g) * SHARED + head)
        mean_HD = sum_HD / tl.where(is_empty, 1.0, total)[:, None]
        tl.store(out + part[:, None] * D + dim[None, :], mean_HD, mask=is_head)
        log_total = tl.where(is_empty, float("-inf"), most + tl.log2(total))
        tl.store(sums + part, log_total, mask=head < SHARED)


@triton.jit
def _join(parts, sums, out, D: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one query head of one sequence, each by its weight."""
    place = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, D)
    log_total = tl.load(sums + place * SPLITS + split)
    weight = tl.exp2(log_total - tl.max(log_total, 0))
    weight = weight / tl.sum(weight, 0)
    part = tl.load(parts + (place * SPLITS + split)[:, None] * D + dim[None, :])
    tl.store(out + place * D + dim, tl.sum(part * weight[:, None], 0).to(out.dtype.element_ty))


def attend_pages(
    q_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    splits: int = 0,
) -> torch.Tensor:
    """Softmax attention of each query over the tokens of its sequence, scaled by 1/sqrt(D).

    Args:
        q_BHD: contiguous, H a multiple of G, D a power of two from 16 on.
        keys, values: [pages, G, PAGE, D], contiguous, of the queries' dtype, finite everywhere.
        table: int32 [slots, width], the pages of each slot's tokens in order.
        slots_B, lengths_B: int32; lengths from 1 on.
        splits: parts into which sequences are split, a power of two; 0 chooses by their number.

    Returns:
        o_BHD in the queries' dtype.
    """
    num_rows, num_heads, dim = q_BHD.shape
    groups = keys.shape[1]
    splits = splits or _splits(num_rows * groups)
    shared = num_heads // groups
    q_BHD, out = q_BHD.contiguous(), torch.empty_like(q_BHD, memory_format=torch.contiguous_format)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty(num_rows, num_heads, splits, dim, dtype=torch.float32, device=out.device)
        sums = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=out.device)
    _attend[(num_rows, groups, splits)](
        q_BHD, keys, values, parts, sums, table, slots_B, lengths_B, LOG2_E / math.sqrt(dim), table.shape[1], groups,
        SHARED=shared, SHARED_PADDED=max(16, triton.next_power_of_2(shared)), D=dim, PAGE=PAGE, SPLITS=splits,
        num_warps=2, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join[(num_rows * num_heads,)](parts, sums, out, D=dim, SPLITS=splits, num_warps=1)
    return out


@triton.jit
def _store(
    k, v, keys, values, pages, rows, k_stride, v_stride,
    GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values of one token into its row of its page."""
    token = tl.program_id(0).to(tl.int64)
    page, row = tl.load(pages + token), tl.load(rows + token)
    at = tl.arange(0, SIZE)
    is_there = at < GROUPS * D
    group, dim = at // D, at % D
    place = (page * GROUPS + group) * PAGE * D + row * D + dim
    tl.store(keys + place, tl.load(k + token * k_stride + at, mask=is_there), mask=is_there)
    tl.store(values + place, tl.load(v + token * v_stride + at, mask=is_there), mask=is_there)


def store_pages(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages_T: torch.Tensor,
    rows_T: torch.Tensor,
) -> None:
    """Put keys and values of T tokens into [pages, G, PAGE, D] at their pages and rows, int64 each.

    Indexing with two tensors does the same at a twentieth of the memory's speed.
    """
    count, groups, dim = k_TGD.shape
    for part in (k_TGD, v_TGD):
        assert part.stride()[1:] == (dim, 1), "a token's heads lie one behind the other"
    _store[(count,)](
        k_TGD, v_TGD, keys, values, pages_T, rows_T, k_TGD.stride(0), v_TGD.stride(0),
        GROUPS=groups, D=dim, PAGE=PAGE, SIZE=triton.next_power_of_2(groups * dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _block(
    q_MD, most, total, sum_MD, k, v, at, dim, num_keys, last_seen, scale, k_stride, v_stride,
    D: tl.constexpr, D_PADDED: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of queries and N keys from `at` on."""
    key = at + tl.arange(0, N)
    is_key = key < num_keys
    is_dim = dim < D
    if MASKED:
        k_DN = tl.load(k + key[None, :] * k_stride + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
    elif D == D_PADDED:
        k_DN = tl.load(k + key[None, :] * k_stride + dim[:, None])
    else:
        k_DN = tl.load(k + key[None, :] * k_stride + dim[:, None], mask=is_dim[:, None], other=0.0)
    score_MN = tl.dot(q_MD, k_DN) * scale
    if MASKED:
        score_MN = tl.where((key[None, :] <= last_seen[:, None]) & is_key[None, :], score_MN, float("-inf"))
    new_most = tl.maximum(most, tl.max(score_MN, 1))
    weight_MN = tl.exp2(score_MN - new_most[:, None])
    shrink = tl.exp2(most - new_most)
    if MASKED:
        v_ND = tl.load(v + key[:, None] * v_stride + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
    elif D == D_PADDED:
        v_ND = tl.load(v + key[:, None] * v_stride + dim[None, :])
    else:
        v_ND = tl.load(v + key[:, None] * v_stride + dim[None, :], mask=is_dim[None, :], other=0.0)
    sum_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, sum_MD * shrink[:, None])
    return new_most, total * shrink + tl.sum(weight_MN, 1), sum_MD


@triton.jit
def _segment(
    q, k, v, out, query_ends, key_ends, scale, q_stride, k_stride, v_stride, out_stride,
    SHARED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M queries of one head of one segment; the last ones, which see most keys, first."""
    tile, head, segment = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_query, first_key = tl.load(query_ends + segment).to(tl.int64), tl.load(key_ends + segment).to(tl.int64)
    num_queries = (tl.load(query_ends + segment + 1) - first_query).to(tl.int32)
    num_keys = (tl.load(key_ends + segment + 1) - first_key).to(tl.int32)
    if tile * M >= num_queries:
        return
    row = tile * M + tl.arange(0, M)
    dim = tl.arange(0, D_PADDED)
    is_value = (row < num_queries)[:, None] & (dim < D)[None, :]
    q_MD = tl.load(q + (first_query + row)[:, None] * q_stride + head * D + dim[None, :], mask=is_value, other=0.0)
    k += first_key * k_stride + head // SHARED * D
    v += first_key * v_stride + head // SHARED * D
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sum_MD = tl.zeros((M, D_PADDED), tl.float32)
    if CAUSAL:
        last_seen = row + (num_keys - num_queries)
        open_keys = tl.minimum(num_keys, tile * M + num_keys - num_queries + 1) // N * N
        all_keys = tl.minimum(num_keys, tile * M + M + num_keys - num_queries)
    else:
        last_seen = tl.full((M,), 1 << 30, tl.int32)
        open_keys = num_keys // N * N
        all_keys = num_keys
    for at in range(0, open_keys, N):
        most, total, sum_MD = _block(
            q_MD, most, total, sum_MD, k, v, at, dim, num_keys, last_seen, scale, k_stride, v_stride,
            D, D_PADDED, N, False,
        )  # fmt: skip
    for at in range(open_keys, all_keys, N):
        most, total, sum_MD = _block(
            q_MD, most, total, sum_MD, k, v, at, dim, num_keys, last_seen, scale, k_stride, v_stride,
            D, D_PADDED, N, True,
        )  # fmt: skip
    mean_MD = (sum_MD / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (first_query + row)[:, None] * out_stride + head * D + dim[None, :], mean_MD, mask=is_value)


def attend_segments(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    *,
    causal: bool,
    tile: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """Softmax attention of packed queries over the keys of their segment, scaled by 1/sqrt(D).

    Args:
        q_THD, k_SGD, v_SGD: a token's heads one behind the other; H a multiple of G.
        query_ends, key_ends: int32, where each segment ends, with a 0 before.
        longest_query: most queries of a segment.
        causal: the last query of a segment sees all of its keys, the one before all but the last.
        tile: queries and keys at once, warps and stages; None chooses.

    Returns:
        o_THD in the queries' dtype.
    """
    _, heads, dim = q_THD.shape
    shared = heads // k_SGD.shape[1]
    for part in (q_THD, k_SGD, v_SGD):
        assert part.stride()[1:] == (dim, 1), "a token's heads lie one behind the other"
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    m, n, warps, stages = tile or (64, 64, 4, 2 if longest_query <= 64 else 3)
    grid = (triton.cdiv(longest_query, m), heads, len(query_ends) - 1)
    _segment[grid](
        q_THD, k_SGD, v_SGD, out, query_ends, key_ends, LOG2_E / math.sqrt(dim),
        q_THD.stride(0), k_SGD.stride(0), v_SGD.stride(0), out.stride(0),
        SHARED=shared, D=dim, D_PADDED=max(16, triton.next_power_of_2(dim)), CAUSAL=causal, M=m, N=n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _splits(programs: int) -> int:
    return min(MAX_SPLITS, triton.next_power_of_2(max(1, PROGRAMS // (2 * programs))))
