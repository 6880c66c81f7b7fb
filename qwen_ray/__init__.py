"""Captions and transcripts of very many videos: Ray Data, Qwen-VL, Whisper, Parquet.

    import qwen_ray

    report = qwen_ray.run(qwen_ray.configure("./videos", "./out", preset="tiny"))
    clips = qwen_ray.read_table("./out", "clips").to_pandas()

Importing the package loads neither torch nor ray; each name loads what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen_ray.api import SAMPLES, Captioner, configure, frames, probe, read_table, verify
    from qwen_ray.config import (
        PRESETS,
        CaptionConfig,
        CommitConfig,
        DecodeConfig,
        JobConfig,
        SpeechConfig,
        StorageConfig,
    )
    from qwen_ray.errors import ConfigError, QwenRayError
    from qwen_ray.prompts import Prompt
    from qwen_ray.report import RunReport
    from qwen_ray.runner import run

_HOME = {
    "PRESETS": "config",
    "CaptionConfig": "config",
    "Captioner": "api",
    "CommitConfig": "config",
    "ConfigError": "errors",
    "DecodeConfig": "config",
    "JobConfig": "config",
    "Prompt": "prompts",
    "QwenRayError": "errors",
    "RunReport": "report",
    "SAMPLES": "api",
    "SpeechConfig": "config",
    "StorageConfig": "config",
    "configure": "api",
    "frames": "api",
    "probe": "api",
    "read_table": "api",
    "run": "runner",
    "verify": "api",
}

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "SAMPLES",
    "CaptionConfig",
    "Captioner",
    "CommitConfig",
    "ConfigError",
    "DecodeConfig",
    "JobConfig",
    "Prompt",
    "QwenRayError",
    "RunReport",
    "SpeechConfig",
    "StorageConfig",
    "configure",
    "frames",
    "probe",
    "read_table",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qwen_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qwen_ray.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
