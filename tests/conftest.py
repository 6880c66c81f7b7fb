"""What tests of several folders need."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

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
