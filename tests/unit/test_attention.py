"""Attention over packed segments and over pages, against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from qwen_ray.engines.qwen_vl.attention import Rows, Sdpa, segments
from qwen_ray.engines.qwen_vl.cache import PAGE, KeyValues, Where

CPU = torch.device("cpu")


def defined(q_THD, k_SGD, v_SGD, causal):
    """softmax(q k / sqrt(D)) v, one head after the other, in float64; the last query is the last key's neighbour."""
    heads, groups = q_THD.shape[1], k_SGD.shape[1]
    outputs = []
    for head in range(heads):
        group = head * groups // heads
        score_TS = q_THD[:, head].double() @ k_SGD[:, group].double().T / math.sqrt(q_THD.shape[2])
        if causal:
            hidden = torch.ones_like(score_TS, dtype=torch.bool).triu(1 + len(k_SGD) - len(q_THD))
            score_TS = score_TS.masked_fill(hidden, -torch.inf)
        outputs.append(score_TS.softmax(-1) @ v_SGD[:, group].double())
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_segments_look_at_their_own_keys_alone(causal):
    torch.manual_seed(0)
    queries, keys = [5, 5, 1, 3], [5, 5, 9, 7]
    q = torch.randn(sum(queries), 4, 16)
    k, v = torch.randn(sum(keys), 2, 16), torch.randn(sum(keys), 2, 16)
    got = Sdpa().packed(q, k, v, segments(queries, keys, CPU), causal=causal)
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    wanted = torch.cat([defined(*part, causal) for part in parts])
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def pages_of(lengths, heads, groups, dim, dtype, device):
    """Queries, a cache filled in shuffled pages, its rows, and what attention over each sequence is by definition."""
    torch.manual_seed(1)
    counts = [-(-length // PAGE) for length in lengths]
    cache = KeyValues(1, sum(counts), groups, dim, dtype, device)
    order = torch.randperm(sum(counts)).tolist()
    table = torch.full((len(lengths), max(counts)), sum(counts), dtype=torch.int32)
    wanted = []
    queries = torch.randn(len(lengths), heads, dim).to(dtype)
    for b, length in enumerate(lengths):
        pages = [order.pop() for _ in range(counts[b])]
        table[b, : len(pages)] = torch.tensor(pages)
        keys, values = torch.randn(length, groups, dim).to(dtype), torch.randn(length, groups, dim).to(dtype)
        tokens = torch.arange(length)
        where = Where(torch.tensor(pages)[tokens // PAGE].to(device), (tokens % PAGE).to(device))
        cache.write(0, keys.to(device), values.to(device), where)
        wanted.append(defined(queries[b : b + 1], keys, values, causal=False))
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    rows = Rows(table.to(device), slots, torch.tensor(lengths, dtype=torch.int32, device=device), max(lengths))
    return queries.to(device), cache, rows, torch.cat(wanted)


LENGTHS = [1, 63, 64, 65, 200, 129]


def test_decoding_looks_at_every_token_of_its_own_sequence():
    q, cache, rows, wanted = pages_of(LENGTHS, 4, 2, 16, torch.float32, CPU)
    got = Sdpa().paged(q, *cache.layer(0), rows)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
