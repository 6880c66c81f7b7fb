"""How a checkpoint wants its tokens chosen, where the configuration does not say.

Qwen's checkpoints state their own temperature, nucleus and penalty in `generation_config.json`; a caption made with
others is not what the model's authors measured. What is taken from there is put into the configuration before a run
starts, so that the resolved configuration and the fingerprints tell the numbers that were used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qwen_ray.config import CaptionConfig


def settle(config: CaptionConfig, stated: Mapping[str, Any] | None) -> CaptionConfig:
    """The configuration with every null of its sampling fields replaced by what the checkpoint states.

    Args:
        config: whose own values win.
        stated: the checkpoint's `generation_config.json`; None where it has none. Without `do_sample` it decodes
            greedily, whatever else it states, as in transformers.
    """
    stated = stated or {}
    sampled = bool(stated.get("do_sample"))
    defaults = {
        "temperature": _or(stated.get("temperature"), 1.0) if sampled else 0.0,
        "top_p": _or(stated.get("top_p"), 1.0) if sampled else 1.0,
        "top_k": _or(stated.get("top_k"), 0) if sampled else 0,
        "repetition_penalty": _or(stated.get("repetition_penalty"), 1.0),
    }
    missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return replace(config, **missing)


def _or(value: Any, default: float) -> Any:
    return default if value is None else value
