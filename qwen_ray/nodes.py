"""The nodes of a cluster, and work that belongs on a certain one."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def living(resource: str) -> list[str]:
    """Ids of the nodes that are alive and have some of a resource, such as `CPU` or `GPU`."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource, 0) > 0]


def on(node: str) -> Any:
    """A scheduling strategy: there, or nowhere."""
    return NodeAffinitySchedulingStrategy(node, soft=False)
