"""One private Ray cluster for all tests of this folder; what it runs is real, only its core count is pretended."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.s3 import ENVIRONMENT

os.environ["RAY_AUTH_MODE"] = "disabled"  # drivers of the kill test join from other processes
os.environ.update(ENVIRONMENT)  # the cluster's workers inherit it


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a cluster with two cores and no GPU."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
