"""When an engine works and when it waits, for benchmarks; switched off unless `QWEN_RAY_TRACE` names a folder.

Each piece of work becomes a JSON line in FOLDER/NAME-PID.jsonl. On a GPU the kernels of some seconds are recorded as
well: utilisation as the driver reports it is near 100 % whenever anything runs at all,
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
PROFILED_FROM = 2
"""Work before loads kernels and grows the memory pool."""
PROFILED_S = 5.0
"""Least length of the profile; it ends with the piece of work that is going on then."""
TOP_KERNELS = 12


class Trace:
    """The diary of one engine. Every method is called on the engine's own thread."""

    def __init__(self, name: str) -> None:
        folder = os.environ.get(VARIABLE)
        self._path = Path(folder, f"{name}-{os.getpid()}.jsonl") if folder else None
        self._count = 0
        self._profiler: Any = None
        self._profiled_from = 0.0

    def work(self, kind: str, began: float, rows: int, answered: int) -> None:
        """Note a piece of work that ends now.

        Args:
            kind: `batch`; or of an engine that works step by step, `prompt` or `decode`.
            began: unix time.
            rows: requests that it was about.
            answered: requests that have their answer with it.
        """
        if self._path is None:
            return
        line = {"event": "work", "kind": kind, "began": began, "ended": time.time(), "rows": rows}
        self._write(line | {"answered": answered})
        self._count += 1
        if self._count == PROFILED_FROM and torch.cuda.is_available():
            self._begin_profile()
        elif self._profiler is not None and time.time() - self._profiled_from >= PROFILED_S:
            self._end_profile()

    def _begin_profile(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()
        self._profiled_from = time.time()

    def _end_profile(self) -> None:
        """At the end of a piece of work, so that waiting for it counts as time without kernels."""
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


class Laps:
    """How long a GPU works on what, by its own clock. Switched off, it costs nothing."""

    def __init__(self) -> None:
        self.is_on = False
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Around what is sent to the GPU under one name."""
        if not self.is_on:
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((name, begin, end))

    def seconds(self) -> dict[str, float]:
        """By name, of all laps so far; waits for the GPU."""
        torch.cuda.synchronize()
        total: Counter[str] = Counter()
        for name, begin, end in self._events:
            total[name] += begin.elapsed_time(end) / 1000
        self._events.clear()
        return dict(total)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
