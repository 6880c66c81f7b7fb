"""Any checkpoint of `family.FAMILIES` through transformers' `generate()`, batched, on CPU and CUDA.

One thread owns the model. Callers queue requests; the thread takes whatever waits, up to `batch_size`, and answers it
in one call, so batches fill by themselves when many rows are in flight and a lone row does not wait. Prompts are
padded on the left, which leaves every caption the same as if it had been asked alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, GenerationConfig, LogitsProcessorList
from transformers.utils import logging as transformers_logging

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.generation import settle
from qwen_ray.engines.models import Model, read_json
from qwen_ray.engines.protocol import Caption, CaptionRequest
from qwen_ray.engines.qwen_vl.family import FAMILIES, VIDEO_PAD, Family
from qwen_ray.engines.qwen_vl.preprocess import Patching, left_pad, patchify, second_per_grid
from qwen_ray.engines.qwen_vl.sampling import SeededSampling
from qwen_ray.errors import EngineError, RequestError, ResourceError, RowError
from qwen_ray.prompts import messages

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: CaptionRequest
    token_ids: list[int]
    answer: Future[Caption]


class QwenVLEngine:
    """A `CaptionEngine` over one model in this process."""

    def __init__(self, config: CaptionConfig, model: Model, *, cuda: bool) -> None:
        self._config = settle(config, read_json(model, "generation_config.json"))
        self._device = torch.device("cuda" if cuda else "cpu")
        dtype = {"auto": torch.bfloat16 if cuda else torch.float32}.get(config.dtype) or getattr(torch, config.dtype)
        if not cuda:
            torch.set_num_threads(max(1, round(config.num_cpus)))
        transformers_logging.disable_progress_bar()
        pinned: dict[str, Any] = {} if model.is_local else {"revision": model.revision}
        self._tokenizer = AutoTokenizer.from_pretrained(model.location, **pinned)
        # "auto" spreads a model that needs several GPUs over all that this process was given, layer by layer.
        network = AutoModelForImageTextToText.from_pretrained(
            model.location, dtype=dtype, attn_implementation="sdpa", device_map="auto" if cuda else None, **pinned
        )
        self._model: Any = network.eval()
        self._family = FAMILIES[self._model.config.model_type]
        self._patching = _patching(model, self._family, self._model.config.vision_config)
        self._video_pad_id = int(self._tokenizer.convert_tokens_to_ids(VIDEO_PAD))
        self._generation = _generation(self._config, self._model.generation_config, self._tokenizer)
        self._model.generation_config = self._generation  # ours alone: defaults of the checkpoint must not seep in
        self.precision = str(dtype).removeprefix("torch.")
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="qwen-vl", daemon=True)
        self._thread.start()

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """See `CaptionEngine.submit`."""
        answer: Future[Caption] = Future()
        token_ids = self._tokenize(request)
        context = int(self._model.config.text_config.max_position_embeddings)
        if len(token_ids) + self._config.max_new_tokens > context:
            needed = f"{len(token_ids)} prompt tokens + {self._config.max_new_tokens} new ones"
            answer.set_exception(
                ResourceError(
                    "too_long",
                    f"{needed} exceed the model's context of {context}; lower decode.num_frames or decode.max_pixels",
                )
            )
        else:
            self._queue.put(_Waiting(request, token_ids, answer))
        return answer

    def close(self) -> None:
        """See `CaptionEngine.close`."""
        self._queue.put(None)
        self._thread.join()

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

    def _serve(self) -> None:
        while batch := self._next_batch():
            broken = self._answer(batch)
            if broken is not None:
                self._refuse(broken)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while len(batch) < self._config.batch_size:
            try:
                waiting = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if waiting is None:
                self._queue.put(None)  # answer what came before the end, then see it again
                break
            batch.append(waiting)
        return batch

    def _answer(self, batch: list[_Waiting]) -> EngineError | None:
        """Answer a batch; halve it when it fails, until the one request that cannot be answered stands alone.

        Returns the error that broke the process, if one did; all of the batch has been answered either way.
        """
        parts = [batch]
        while parts:
            part = parts.pop(0)
            failure = self._try(part)
            if failure is None:
                continue
            if _breaks_process(failure):
                broken = EngineError(f"the model's process has lost its GPU: {failure}")
                _fail([part, *parts], broken)
                return broken
            if len(part) == 1:
                part[0].answer.set_exception(_as_row_error(failure, part[0]))
                continue
            log.warning("a batch of %d captions failed (%s); trying its halves", len(part), failure)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
        return None

    def _try(self, batch: list[_Waiting]) -> Exception | None:
        """Answer a batch in one call, or return what went wrong, less the traceback that holds the call's tensors."""
        try:
            captions = self._generate(batch)
        except Exception as error:  # noqa: BLE001  whatever one request causes must not fail its neighbours
            error.__context__ = error.__cause__ = None
            return error.with_traceback(None)
        for waiting, caption in zip(batch, captions, strict=True):
            waiting.answer.set_result(caption)
        return None

    def _refuse(self, broken: EngineError) -> None:
        """Answer everything from now on with the error that broke the process."""
        while (waiting := self._queue.get()) is not None:
            waiting.answer.set_exception(broken)

    def _generate(self, batch: list[_Waiting]) -> list[Caption]:
        inputs = self._inputs(batch)
        config = self._config
        processors = LogitsProcessorList()
        if config.temperature:
            keys = [waiting.request.clip_id for waiting in batch]
            processors.append(SeededSampling(keys, config))
        with torch.inference_mode():
            tokens_BL = self._model.generate(**inputs, generation_config=self._generation, logits_processor=processors)
        new_BL = tokens_BL[:, inputs["input_ids"].shape[1] :].tolist()
        return [self._caption(waiting, new) for waiting, new in zip(batch, new_BL, strict=True)]

    def _inputs(self, batch: list[_Waiting]) -> dict[str, torch.Tensor]:
        ids_BL, mask_BL = left_pad([w.token_ids for w in batch], cast(int, self._generation.pad_token_id))
        inputs = {
            "input_ids": ids_BL,
            "attention_mask": mask_BL,
            # 2 marks video; without it transformers falls back to one-dimensional positions and says nothing
            "mm_token_type_ids": (ids_BL == self._video_pad_id) * 2,
            **self._videos([w.request for w in batch if w.request.frames_THWC is not None]),
        }
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}

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

    def _caption(self, waiting: _Waiting, new_ids: list[int]) -> Caption:
        ends = set(cast(list[int], self._generation.eos_token_id))
        length = next((k for k, token in enumerate(new_ids) if token in ends), None)
        kept = new_ids[:length]
        text = self._tokenizer.decode(kept, skip_special_tokens=True).strip()
        num_output = len(kept) + (length is not None)
        return Caption(text, "length" if length is None else "stop", len(waiting.token_ids), num_output)


def _patching(model: Model, family: Family, vision: Any) -> Patching:
    """From the vision config, and the channel statistics from the preprocessor's file where the checkpoint has one."""
    stated = read_json(model, "preprocessor_config.json") or {}
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


def _fail(parts: list[list[_Waiting]], error: Exception) -> None:
    for waiting in (one for part in parts for one in part):
        waiting.answer.set_exception(error)


def _breaks_process(error: Exception) -> bool:
    """Whether CUDA has failed in a way that every later call in this process repeats."""
    fault = getattr(torch, "AcceleratorError", ())
    return isinstance(error, fault) or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))


def _as_row_error(error: Exception, waiting: _Waiting) -> RowError:
    frames_THWC = waiting.request.frames_THWC
    what = "a text" if frames_THWC is None else "a clip of " + "x".join(str(n) for n in frames_THWC.shape)
    what = f"{what}, {len(waiting.token_ids)} prompt tokens,"
    if isinstance(error, torch.OutOfMemoryError):
        return ResourceError("out_of_memory", f"{what} does not fit into GPU memory even alone")
    return RequestError("engine_crashed", f"the model failed on {what}: {type(error).__name__}: {error}")
