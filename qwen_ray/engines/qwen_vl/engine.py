"""Any checkpoint of `family.FAMILIES` through transformers' `generate()`, batched, on CPU and CUDA.

Prompts are padded on the left, which leaves every caption the same as if it had been asked alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, GenerationConfig, LogitsProcessorList
from transformers.utils import logging as transformers_logging

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.batching import Batcher
from qwen_ray.engines.generation import settle
from qwen_ray.engines.models import Model, read_json
from qwen_ray.engines.protocol import Caption, CaptionRequest
from qwen_ray.engines.qwen_vl.family import FAMILIES, VIDEO_PAD, Family
from qwen_ray.engines.qwen_vl.positions import is_uneven, true_positions
from qwen_ray.engines.qwen_vl.preprocess import Patching, left_pad, patchify, second_per_grid
from qwen_ray.engines.qwen_vl.sampling import SeededSampling
from qwen_ray.errors import ResourceError
from qwen_ray.prompts import messages


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request with its tokens."""

    request: CaptionRequest
    token_ids: list[int]


class QwenVLEngine:
    """A `CaptionEngine` over one model in this process."""

    def __init__(self, config: CaptionConfig, model: Model, *, cuda: bool) -> None:
        self._config = settle(config, read_json(model, "generation_config.json"))
        self._device = torch.device("cuda" if cuda else "cpu")
        dtype = {"auto": torch.bfloat16 if cuda else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
        if not cuda:
            torch.set_num_threads(max(1, round(config.num_cpus)))
        transformers_logging.disable_progress_bar()
        self._tokenizer = AutoTokenizer.from_pretrained(model.location)
        # "auto" spreads a model that needs several GPUs over all that this process was given, layer by layer.
        network = AutoModelForImageTextToText.from_pretrained(
            model.location, dtype=dtype, attn_implementation="sdpa", device_map="auto" if cuda else None
        )
        self._model: Any = network.eval()
        self._family = FAMILIES[self._model.config.model_type]
        self._patching = _patching(model, self._family, self._model.config.vision_config)
        self._video_pad_id = int(self._tokenizer.convert_tokens_to_ids(VIDEO_PAD))
        self._generation = _generation(self._config, self._model.generation_config, self._tokenizer)
        self._model.generation_config = self._generation  # ours alone: defaults of the checkpoint must not seep in
        self.precision = str(dtype).removeprefix("torch.")
        self._batcher = Batcher(self._generate, _describe, batch_size=config.batch_size, name="qwen-vl")

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """See `CaptionEngine.submit`."""
        prompt = _Prompt(request, self._tokenize(request))
        num_tokens, num_new = len(prompt.token_ids), self._config.max_new_tokens
        context = int(self._model.config.text_config.max_position_embeddings)
        if num_tokens + num_new <= context:
            return self._batcher.submit(prompt)
        what = f"{num_tokens} prompt tokens + {num_new} new ones exceed the model's context of {context}"
        refused: Future[Caption] = Future()
        refused.set_exception(ResourceError("too_long", f"{what}; lower decode.num_frames or decode.max_pixels"))
        return refused

    def close(self) -> None:
        """See `CaptionEngine.close`."""
        self._batcher.close()

    def _tokenize(self, request: CaptionRequest) -> list[int]:
        frames_THWC = request.frames_THWC
        text = self._tokenizer.apply_chat_template(
            messages(request.prompt, request.system_prompt, video=frames_THWC is not None),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # Qwen3.5's template would have it think aloud; others do not know the word
        )
        if frames_THWC is not None:
            size = cast(tuple[int, int, int], frames_THWC.shape[:3])
            video = self._family.placeholders(request.frame_times_s, size, self._patching)
            text = text.replace(VIDEO_PAD, video, 1)
        return cast(list[int], self._tokenizer(text)["input_ids"])

    def _generate(self, batch: list[_Prompt]) -> list[Caption]:
        inputs = self._inputs(batch)
        config = self._config
        processors = LogitsProcessorList()
        if config.temperature:
            keys = [prompt.request.clip_id for prompt in batch]
            processors.append(SeededSampling(keys, config))
        with torch.inference_mode():
            tokens_BL = self._model.generate(**inputs, generation_config=self._generation, logits_processor=processors)
        new_BL = tokens_BL[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._caption(prompt, new) for prompt, new in zip(batch, new_BL, strict=True)]

    def _inputs(self, batch: list[_Prompt]) -> dict[str, torch.Tensor]:
        ids_BL, mask_BL = left_pad([prompt.token_ids for prompt in batch], cast(int, self._generation.pad_token_id))
        inputs = {
            "input_ids": ids_BL,
            "attention_mask": mask_BL,
            # 2 marks video; without it transformers falls back to one-dimensional positions and says nothing
            "mm_token_type_ids": (ids_BL == self._video_pad_id) * 2,
            **self._videos([prompt.request for prompt in batch if prompt.request.frames_THWC is not None]),
        }
        inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        uneven = [self._uneven_times(prompt.request) for prompt in batch]
        return inputs | (true_positions(self._model.model, inputs, uneven) if any(uneven) else {})

    def _uneven_times(self, request: CaptionRequest) -> Sequence[float] | None:
        """The frames' times, where this family must be told each of them."""
        times = request.frame_times_s
        if request.frames_THWC is None or self._family.timestamps:
            return None
        rate = float(self._model.config.vision_config.tokens_per_second)
        return times if is_uneven(times, second_per_grid(times), rate) else None

    def _videos(self, requests: Sequence[CaptionRequest]) -> dict[str, torch.Tensor]:
        """Of the requests that have frames; nothing where none has."""
        if not requests:
            return {}
        frames = [torch.from_numpy(request.frames_THWC).to(self._device) for request in requests]
        inputs = {
            "pixel_values_videos": torch.cat([patchify(f, self._patching) for f in frames]).to(self._model.dtype),
            "video_grid_thw": torch.tensor([self._patching.grid(*f.shape[:3]) for f in frames]),
        }
        if not self._family.timestamps:
            inputs["second_per_grid_ts"] = torch.tensor([second_per_grid(r.frame_times_s) for r in requests])
        return inputs

    def _caption(self, prompt: _Prompt, new_ids: list[int]) -> Caption:
        ends = set(cast(list[int], self._generation.eos_token_id))
        length = next((k for k, token in enumerate(new_ids) if token in ends), None)
        kept = new_ids[:length]
        text = self._tokenizer.decode(kept, skip_special_tokens=True).strip()
        num_output = len(kept) + (length is not None)
        return Caption(text, "length" if length is None else "stop", len(prompt.token_ids), num_output)


def _patching(model: Model, family: Family, vision: Any) -> Patching:
    """From the vision config, and the channel statistics from the preprocessor's file where the checkpoint has one."""
    files = ("video_preprocessor_config.json", "preprocessor_config.json")
    stated = next((found for name in files if (found := read_json(model, name))), {})
    return Patching(
        patch=vision.patch_size,
        merge=vision.spatial_merge_size,
        temporal=vision.temporal_patch_size,
        mean=tuple(stated.get("image_mean", family.mean)),
        std=tuple(stated.get("image_std", family.std)),
    )


def _generation(config: CaptionConfig, checkpoint: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Our settings with the checkpoint's special tokens, or the tokenizer's where it states none."""
    stated = checkpoint.eos_token_id if checkpoint.eos_token_id is not None else tokenizer.eos_token_id
    ends = stated if isinstance(stated, list) else [stated]
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        do_sample=False,
        repetition_penalty=config.repetition_penalty,
        eos_token_id=ends,
        pad_token_id=checkpoint.pad_token_id if checkpoint.pad_token_id is not None else ends[0],
    )


def _describe(prompt: _Prompt) -> str:
    frames_THWC = prompt.request.frames_THWC
    what = "a text" if frames_THWC is None else "a clip of " + "x".join(str(n) for n in frames_THWC.shape)
    return f"{what} ({len(prompt.token_ids)} prompt tokens)"
