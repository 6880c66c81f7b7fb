"""When an engine works and when it waits, for benchmarks; switched off unless `QWEN_RAY_TRACE` names a folder.

Each batch becomes a JSON line in FOLDER/NAME-PID.jsonl. On a GPU the kernels of one batch, from its start to the start
of the next, are recorded as well: utilisation as the driver reports it is near 100 % whenever anything runs at all,
and says nothing about how much of the time kernels run.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

VARIABLE = "QWEN_RAY_TRACE"
PROFILED_BATCH = 3
"""The first ones load kernels and grow the memory pool."""
TOP_KERNELS = 12


class Trace:
    """The diary of one engine. Every method is called on the engine's own thread."""

    def __init__(self, name: str) -> None:
        folder = os.environ.get(VARIABLE)
        self._path = Path(folder, f"{name}-{os.getpid()}.jsonl") if folder else None
        self._count = 0
        self._profiler: Any = None
        self._profiled_from = 0.0

    @contextmanager
    def batch(self, size: int) -> Iterator[None]:
        """Around the work on one batch."""
        if self._path is None:
            yield
            return
        self._end_profile()
        self._count += 1
        if self._count == PROFILED_BATCH and torch.cuda.is_available():
            self._begin_profile()
        began = time.time()
        try:
            yield
        finally:
            self._write({"event": "batch", "began": began, "ended": time.time(), "size": size})

    def _begin_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()
        self._profiled_from = time.time()

    def _end_profile(self) -> None:
        """At the start of the batch after, so that waiting for it counts as time without kernels."""
        if self._profiler is None:
            return
        torch.cuda.synchronize()
        window_s = time.time() - self._profiled_from
        self._profiler.stop()
        events = [event for event in self._profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        spans = [(event.time_range.start, event.time_range.end) for event in events]
        by_name: Counter[str] = Counter()
        for event in events:
            by_name[event.name[:100]] += event.time_range.end - event.time_range.start
        top = {name: round(time_us / 1e6, 4) for name, time_us in by_name.most_common(TOP_KERNELS)}
        self._profiler = None
        kernel_s = covered(spans) / 1e6
        self._write(
            {"event": "kernels", "window_s": window_s, "kernel_s": kernel_s, "num_kernels": len(events), "top_s": top}
        )

    def _write(self, line: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
