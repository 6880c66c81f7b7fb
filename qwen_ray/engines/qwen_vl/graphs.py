"""Decode steps as CUDA graphs: some 500 kernels a step, started at once instead of one by one.

A graph is of one size, so steps are filled up to the next size that was recorded, with rows that write to a scratch
page and are not looked at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

log = logging.getLogger(__name__)


def sizes_up_to(most: int) -> list[int]:
    """Numbers of rows that are recorded: close together where few rows are filled up, never more than 1/8 too many."""
    sizes = {2, 4, 8, 16, 24, *range(32, 128, 16), *range(128, most, 32), most + most % 2}
    return sorted(size for size in sizes if size <= most + 1)


class DecodeGraphs:
    """Recorded steps.

    Args:
        logits: rows [5, B] int64 -> logits_BV; everything else that it reads stays where it is.
        filling: one row to fill up with.
        most: largest number of rows.
    """

    def __init__(
        self, logits: Callable[[torch.Tensor], torch.Tensor], filling: Sequence[int], most: int, device: torch.device
    ) -> None:
        began = time.monotonic()
        self._filling = torch.tensor(filling, dtype=torch.int64, device=device)[:, None]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        pool = None
        for size in reversed(sizes_up_to(most)):  # the largest first: the others fit into its memory
            rows = self._filling.repeat(1, size)
            logits(rows)  # compiles, and takes what libraries keep for themselves
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = logits(rows)
            pool = graph.pool()
            self._graphs[size] = (graph, rows, out)
        log.info("recorded decode steps of %d sizes in %.1f s", len(self._graphs), time.monotonic() - began)

    def replay(self, rows_5B: torch.Tensor) -> torch.Tensor:
        """logits_BV, valid until the next replay."""
        count = rows_5B.shape[1]
        size = min(one for one in self._graphs if one >= count)
        graph, rows, out = self._graphs[size]
        rows[:, :count] = rows_5B
        rows[:, count:] = self._filling
        graph.replay()
        return out[:count]
