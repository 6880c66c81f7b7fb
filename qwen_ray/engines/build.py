"""From configuration to engines, on the worker that will run them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from qwen_ray.config import CaptionConfig, JobConfig, SpeechConfig
from qwen_ray.engines import generation, models, weights
from qwen_ray.engines.isolated import IsolatedEngine
from qwen_ray.engines.protocol import CaptionEngine, SpeechEngine
from qwen_ray.engines.qwen_vl.family import FAMILIES, PAGED
from qwen_ray.errors import ConfigError

WHISPER_SIZES = (
    *("tiny", "base", "small", "medium", "large", "large-v2", "large-v3", "large-v3-turbo"),
    *("tiny.en", "base.en", "small.en", "medium.en"),
)
"""Sizes that OpenAI publishes in transformers form, as `openai/whisper-SIZE`."""


def caption_engine(config: CaptionConfig, model: models.Model, *, cuda: bool) -> CaptionEngine:
    """The engine that `config` names, its model loaded into this process."""
    if config.engine == "fake":
        from qwen_ray.engines.fake import FakeCaptionEngine

        return FakeCaptionEngine(config.model)
    _hold_to(config.num_gpus, cuda=cuda)
    if not is_paged(config, model):
        from qwen_ray.engines.qwen_vl.generate import GenerateEngine

        return GenerateEngine(config, weights.local(model), cuda=cuda)
    from qwen_ray.engines.qwen_vl.engine import QwenVLEngine

    return QwenVLEngine(config, weights.local(model), cuda=cuda)


def is_paged(config: CaptionConfig, model: models.Model) -> bool:
    """Whether the fast engine runs a model: one GPU, and layers that all keep keys and values of every token."""
    stated = models.read_json(model, "config.json") or {}
    text = stated.get("text_config") or stated
    others = set(text.get("layer_types") or ()) - {"full_attention"} or text.get("use_sliding_window")
    return stated.get("model_type") in PAGED and config.num_gpus <= 1 and not others


def isolated_caption_engine(config: CaptionConfig, model: models.Model, *, cuda: bool) -> CaptionEngine:
    """`caption_engine` in a process of its own; the fake one, in which nothing can break, in this one."""
    make = partial(caption_engine, config, model, cuda=cuda)
    return make() if config.engine == "fake" else IsolatedEngine(make)


def speech_engine(config: SpeechConfig, model: models.Model, *, cuda: bool) -> SpeechEngine:
    """The engine that `config` names, its model loaded."""
    if config.engine == "fake":
        from qwen_ray.engines.fake import FakeSpeechEngine

        return FakeSpeechEngine(config.model)
    if config.engine == "whisper":
        from qwen_ray.engines.whisper.engine import WhisperEngine

        _hold_to(config.num_gpus, cuda=cuda)
        return WhisperEngine(config, weights.local(model), cuda=cuda)
    from qwen_ray.engines.faster_whisper import FasterWhisperEngine

    return FasterWhisperEngine(config, weights.local(model), cuda=cuda)


def _hold_to(share: float, *, cuda: bool) -> None:
    """Bound this process to its share of the card's memory: Ray counts shares and does not enforce them, and an engine
    that grows would take its neighbour's. What does not fit then is halved or refused like anything else.
    """
    if cuda and share < 1:
        import torch

        torch.cuda.set_per_process_memory_fraction(share)


def resolve(component: CaptionConfig | SpeechConfig, job: JobConfig | None = None) -> models.Model:
    """The model of a component; the fake engines have none. Raises ConfigError when it cannot be found.

    Args:
        component: which model.
        job: how stores are reached and where downloads go, where that is not as usual.
    """
    job = job or JobConfig()
    if component.engine == "fake":
        return models.Model("fake", "fake-1")
    if isinstance(component, SpeechConfig):
        model = models.resolve(whisper_repository(component), component.revision, job.storage, job.weights)
        _check_form(component, model)
        return model
    return models.resolve(component.model, component.revision, job.storage, job.weights)


def settle(config: CaptionConfig, model: models.Model) -> CaptionConfig:
    """The configuration with the checkpoint's own way of choosing tokens where it states none itself."""
    stated = None if config.engine == "fake" else models.read_json(model, "generation_config.json")
    return generation.settle(config, stated)


def check(model: models.Model, config: JobConfig) -> None:
    """Raise ConfigError unless the caption model is one that the engine runs, on frames as they will be cut."""
    if config.caption is None or config.caption.engine == "fake":
        return
    multiple = models.check_type(model, tuple(FAMILIES))
    if config.decode.size_multiple != multiple:
        raise ConfigError(
            f"decode.size_multiple = {config.decode.size_multiple}: the patches of {config.caption.model!r} "
            f"need {multiple}"
        )
    stated = models.read_json(model, "config.json") or {}
    _check_context(stated, config)
    _check_rate(stated, config)


def _check_rate(stated: Mapping[str, Any], config: JobConfig) -> None:
    """Raise ConfigError where frames follow each other faster than the model tells times apart."""
    vision = stated.get("vision_config") or {}
    fastest = vision.get("temporal_patch_size", 2) * vision.get("tokens_per_second", math.inf)
    by_position = not FAMILIES[stated["model_type"]].timestamps
    if by_position and config.decode.sampling == "fps" and config.decode.fps > fastest:
        raise ConfigError(
            f"decode.fps = {config.decode.fps:g}: above {fastest} frames a second two pairs of frames share one time "
            "position in this model; lower it, or take a Qwen3-VL"
        )


def _check_context(stated: Mapping[str, Any], config: JobConfig) -> None:
    """Raise ConfigError where a clip's frames may take more tokens than the model's context holds."""
    assert config.caption is not None
    context = (stated.get("text_config") or stated).get("max_position_embeddings")
    video, new = config.decode.max_video_tokens, config.caption.max_new_tokens
    if context is not None and video + new > context:
        raise ConfigError(
            f"decode.num_frames = {config.decode.num_frames}, decode.max_pixels = {config.decode.max_pixels}: a clip "
            f"may become {video} tokens; with caption.max_new_tokens = {new} that is more than the {context} of "
            f"{config.caption.model!r}; lower one of them"
        )


def _check_form(speech: SpeechConfig, model: models.Model) -> None:
    """Raise ConfigError where a model is no Whisper, or one for the other engine."""
    is_transformers = "model_type" in (models.read_json(model, "config.json") or {})
    if not is_transformers and model.file("model.bin") is None:
        raise ConfigError(f"speech.model = {speech.model!r}: no Whisper in CTranslate2 or transformers form")
    if is_transformers:
        models.check_type(model, ("whisper",))
    form, engine = ("transformers", "whisper") if is_transformers else ("CTranslate2", "faster_whisper")
    if speech.engine != engine:
        raise ConfigError(
            f"speech.model = {speech.model!r} is Whisper in {form} form, which speech.engine={engine} takes; "
            f"speech.engine is {speech.engine}"
        )


def whisper_repository(speech: SpeechConfig) -> str:
    """The hub id of a Whisper size such as `small` or `large-v3`; any other name as it is."""
    name = speech.model
    if ":" in name or "/" in name:
        return name
    if speech.engine == "whisper":
        return f"openai/whisper-{name}" if name in WHISPER_SIZES else name
    from faster_whisper.utils import _MODELS  # the library's own table of sizes; it has no public one with the ids

    return str(_MODELS.get(name, name))
