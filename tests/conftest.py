"""What tests of several folders need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from jobs.conformance.assets import suite

settings.register_profile("patient", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("patient")


@pytest.fixture(scope="session")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whisper tiny.en in transformers form; made from the other form in some seconds."""
    from jobs.assets.convert_whisper import convert
    from qwen_ray.engines.models import resolve

    folder = tmp_path_factory.mktemp("whisper-tiny.en")
    convert(Path(resolve("builtin:whisper-tiny.en").location), folder)
    return folder


@pytest.fixture(scope="session")
def find(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a file of the conformance suite, which is made when it is first asked for."""
    own = tmp_path_factory.getbasetemp()
    return suite((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "suite").find
