"""Any checkpoint of `family.FAMILIES` through transformers' own `generate()`, batched, on CPU and CUDA.

For what the engine beside it does not run: hybrid checkpoints, whose recurrent layers keep no keys and values, and
models spread over several GPUs. It is also what that engine is compared with. Prompts are padded on the left, which
leaves every caption the same as if it had been asked alone.

Axes: B prompts of a batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.batching import Batcher
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import Caption, CaptionRequest, Sampling
from qwen_ray.engines.qwen_vl.loading import Checkpoint, load
from qwen_ray.engines.qwen_vl.preprocess import patchify
from qwen_ray.engines.qwen_vl.prompter import Prompt
from qwen_ray.engines.qwen_vl.sampling import choose, streams
from qwen_ray.errors import RowError


@dataclass(frozen=True, slots=True)
class _Asked:
    request: CaptionRequest
    prompt: Prompt
    sampling: Sampling


class GenerateEngine:
    """A `CaptionEngine` over `generate()`. Of a batch, requests that agree in their sampling are answered together."""

    def __init__(self, config: CaptionConfig, model: Model, *, cuda: bool) -> None:
        # "auto" spreads a model that needs several GPUs over all that this process was given, layer by layer.
        self._checkpoint: Checkpoint = load(config, model, device_map="auto" if cuda else "cpu")
        self._model: Any = self._checkpoint.network
        self._model.generation_config = GenerationConfig()  # ours alone: the checkpoint's must not seep in
        self.precision = self._checkpoint.precision
        self._batcher = Batcher(self._generate, _describe, batch_size=config.batch_size, name="qwen-vl")

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """See `CaptionEngine.submit`."""
        refused: Future[Caption] = Future()
        try:
            prompt = self._checkpoint.prompter.read(request)
            sampling = request.sampling or self._checkpoint.sampling
            self._checkpoint.check_length(len(prompt.token_ids_L), sampling.max_new_tokens)
        except RowError as error:
            refused.set_exception(error)
            return refused
        return self._batcher.submit(_Asked(request, prompt, sampling))

    def close(self) -> None:
        """See `CaptionEngine.close`."""
        self._batcher.close()

    def _generate(self, batch: list[_Asked]) -> list[Caption]:
        """Requests that agree in their sampling together."""
        groups: dict[Sampling, list[int]] = {}
        for k, asked in enumerate(batch):
            groups.setdefault(asked.sampling, []).append(k)
        captions: dict[int, Caption] = {}
        for sampling, rows in groups.items():
            captions.update(zip(rows, self._answer([batch[k] for k in rows], sampling), strict=True))
        return [captions[k] for k in range(len(batch))]

    def _answer(self, batch: list[_Asked], sampling: Sampling) -> list[Caption]:
        inputs = self._inputs(batch)
        stops = self._checkpoint.stops(sampling)
        how = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(stops) or None,
            pad_token_id=self._checkpoint.pad_id,
        )
        draw = _Draw([asked.request.clip_id for asked in batch], sampling)
        processors = LogitsProcessorList([draw] if sampling.temperature else [])
        with torch.inference_mode():
            tokens_BL = self._model.generate(**inputs, generation_config=how, logits_processor=processors)
        new_BL = tokens_BL[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._caption(asked, new, stops) for asked, new in zip(batch, new_BL, strict=True)]

    def _inputs(self, batch: Sequence[_Asked]) -> dict[str, torch.Tensor]:
        prompts = [asked.prompt for asked in batch]
        ids_BL = _left_pad([prompt.token_ids_L for prompt in prompts], self._checkpoint.pad_id)
        mask_BL = _left_pad([np.ones_like(prompt.token_ids_L) for prompt in prompts], 0)
        axes = [_left_pad([prompt.positions_3L[axis] for prompt in prompts], 0) for axis in range(3)]
        text_BL = (mask_BL.cumsum(-1) - 1).clamp_min(0)
        self._model.model.rope_deltas = None  # of another batch; the places of new tokens follow from these
        inputs = {"input_ids": ids_BL, "attention_mask": mask_BL, "position_ids": torch.stack([text_BL, *axes])}
        inputs |= self._pixels(batch, "video", "pixel_values_videos", "video_grid_thw")
        inputs |= self._pixels(batch, "image", "pixel_values", "image_grid_thw")
        # 2 marks video, 1 an image; generate() asks for it and, with positions given, does not read it
        inputs["mm_token_type_ids"] = self._checkpoint.token_types(ids_BL)
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    def _pixels(
        self, batch: Sequence[_Asked], kind: Literal["video", "image"], pixels: str, grids: str
    ) -> dict[str, torch.Tensor]:
        """Of the media of one kind; nothing where there is none."""
        media = [
            (medium, grid)
            for asked in batch
            for medium, grid in zip(asked.request.media, asked.prompt.grids, strict=True)
            if medium.kind == kind
        ]
        if not media:
            return {}
        how, device = self._checkpoint.patching, self._model.device
        patches = [patchify(torch.from_numpy(medium.frames_THWC).to(device), how) for medium, _ in media]
        return {pixels: torch.cat(patches).to(self._model.dtype), grids: torch.tensor([grid for _, grid in media])}

    def _caption(self, asked: _Asked, new_ids: list[int], stops: frozenset[int]) -> Caption:
        length = next((k for k, token in enumerate(new_ids) if token in stops), None)
        ids = new_ids if length is None else new_ids[: length + 1]
        return self._checkpoint.caption(ids, len(asked.prompt.token_ids_L), stopped=length is not None)


class _Draw(LogitsProcessor):  # type: ignore[misc]  # transformers ships no types
    """Turns `generate()`'s greedy choice into `sampling.choose`."""

    def __init__(self, keys: Sequence[str], sampling: Sampling) -> None:
        self._sampling, self._streams_B, self._step = sampling, streams(sampling.seed, keys), 0

    def __call__(self, _: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """scores_BV -> the same with the drawn token alone on top."""
        tokens_B = choose(scores, self._streams_B.to(scores.device) + self._step, self._sampling)
        self._step += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens_B[:, None], 0.0)


def _left_pad(rows: Sequence[np.typing.NDArray[np.int64]], pad: int) -> torch.Tensor:
    """Rows of unequal length as one int64 tensor_BL, padded on the left."""
    length = max(len(row) for row in rows)
    return torch.from_numpy(np.stack([np.pad(row, (length - len(row), 0), constant_values=pad) for row in rows]))


def _describe(asked: _Asked) -> str:
    return asked.prompt.describe(asked.request)
