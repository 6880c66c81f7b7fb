"""Models on every node that may hold an engine, before any engine starts.

A download inside an engine's start would be seen by nobody, and its failure would be a traceback after several tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from qwen_ray.engines import weights
from qwen_ray.engines.models import Model
from qwen_ray.errors import EngineError, QwenRayError
from qwen_ray.nodes import living, on

_TELL_EVERY_S = 1.0


def fetch(models: Sequence[Model], *, on_gpu: bool) -> Iterator[tuple[int, int]]:
    """Have the models on the cluster's nodes; yields bytes ready and bytes wanted over all nodes, every second or so.

    A node that dies meanwhile is left out: no engine will start there. One that joins later fetches for itself.

    Args:
        models: those that engines will load; a model without files needs nothing.
        on_gpu: whether only nodes with GPUs will hold engines.

    Raises:
        ConfigError, TransientError: as `weights.local`, from the first node that fails.
        EngineError: the work died on a node that is alive.
    """
    models = [model for model in models if model.files]
    nodes = living("GPU" if on_gpu else "CPU") if models else []
    task = ray.remote(num_cpus=0)(_on_node)
    working = {task.options(scheduling_strategy=on(node)).remote(models): node for node in nodes}
    ready = dict.fromkeys(nodes, 0)
    total = sum(model.size_bytes for model in models)
    while working:
        yield sum(ready.values()), total * len(ready)
        arrived, _ = ray.wait(list(working), num_returns=len(working), timeout=_TELL_EVERY_S)
        for stream in arrived:
            _take(stream, working, ready)
    yield sum(ready.values()), total * len(ready)


def _on_node(models: Sequence[Model]) -> Iterator[int | QwenRayError]:
    """The work on one node. An error of ours travels as a value: Ray would wrap it into a traceback."""
    try:
        yield from weights.fetch(models)
    except QwenRayError as error:
        yield error


def _take(stream: Any, working: dict[Any, str], ready: dict[str, int]) -> None:
    """The next word from a node."""
    node = working[stream]
    try:
        told = ray.get(next(stream))
    except StopIteration:
        del working[stream]
        return
    except RayError as error:
        if node in living("CPU"):
            raise EngineError(f"fetching weights on node {node[:8]} failed: {type(error).__name__}") from error
        del working[stream], ready[node]
        return
    if isinstance(told, QwenRayError):
        raise told
    ready[node] = told
