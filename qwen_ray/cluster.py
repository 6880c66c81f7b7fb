"""A Ray cluster to run on: joined by address, or started on this machine for one run.

Ray is talkative when it starts and stops, and patient with addresses where nothing answers; here it is neither.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qwen_ray.errors import ConfigError
from qwen_ray.pools import Cluster, Node


@contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The cluster at `address`, one started here where that is empty, or the one in use already.

    Raises:
        ConfigError: nothing answers there.
    """
    # A row iterator that outlives its cluster would otherwise start another.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    import ray

    mine = not ray.is_initialized()
    if mine:
        _connect(address)
    import ray.data  # sets its own loggers up when it is imported, so it comes before they are quietened

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it logs as an error is raised as well
    try:
        yield _seen()
    finally:
        if mine:
            ray.shutdown()


def gather(num_gpus: int, wait_s: float) -> Iterator[Cluster]:
    """The connected cluster as it grows, every second, until it has so many GPUs; the last one has them.

    Asks Ray's autoscaler for them, which would not see what a run is going to need: pools are planned from what is
    there. The request is withdrawn at the end; workers on the nodes keep those up from then on.

    Raises:
        ConfigError: they are not there after `wait_s` seconds.
    """
    if not num_gpus:
        return
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{"GPU": 1}] * num_gpus)
    deadline = time.monotonic() + wait_s
    try:
        while (cluster := _seen()).num_gpus < num_gpus:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"gpus = {num_gpus}: the cluster has {cluster.num_gpus} after gpus_wait_s = {wait_s:g} s; wait "
                    "longer, ask for fewer, or see `ray status` for what the autoscaler cannot get"
                )
            yield cluster
            time.sleep(1.0)
        yield cluster
    finally:
        request_resources(bundles=[])


def _seen() -> Cluster:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = tuple(Node(found.get("CPU", 0.0), int(found.get("GPU", 0))) for found in resources)
    return Cluster(nodes, sum(found.get("object_store_memory", 0.0) for found in resources) or float(1 << 30))


def _connect(address: str) -> None:
    import ray

    _check_reachable(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    local: dict[str, Any] = {} if address else {"include_dashboard": False}
    # Ray's core prints a line per actor class about restarts, and one more about being told not to.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with _stderr_closed():
            # "local" starts a private cluster; without it Ray joins whatever cluster it finds on the machine
            ray.init(address=address or "local", **quiet, **local)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"--address {address}: no Ray cluster answers there ({error})") from None
    if on_sigterm is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own there, which ends the process at once


def _check_reachable(address: str) -> None:
    """Look for a listener first: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # nothing, or a name such as "auto", which Ray looks up at once
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(f"--address {address}: no Ray cluster answers there ({error.strerror or error})") from None


@contextmanager
def _stderr_closed() -> Iterator[None]:
    """Keep native code from writing to the terminal; what goes wrong is raised all the same."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
