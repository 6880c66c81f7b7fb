"""Tests of this folder need a CUDA GPU: skipped without one, failed instead where one is promised."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> None:
    """A CUDA device, or no test."""
    if torch.cuda.is_available():
        return
    if os.environ.get("QWEN_RAY_REQUIRE_GPU") == "1":
        pytest.fail("QWEN_RAY_REQUIRE_GPU=1 and torch sees no CUDA device")
    pytest.skip("no CUDA device")
