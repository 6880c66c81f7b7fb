"""The caption stage: a clip's frames become its caption; every other row passes untouched."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.build import caption_engine
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import CaptionRequest
from qwen_ray.errors import EngineError, RowError
from qwen_ray.prompts import prompt_hash
from qwen_ray.stages.rows import Row, read_rows


class CaptionStage:
    """Holds an engine. Called from many threads at once, each with one row, so the engine's batches stay full."""

    def __init__(self, config: CaptionConfig, model: Model, *, cuda: bool) -> None:
        self._config, self._model = config, model
        self._engine = caption_engine(config, model, cuda=cuda)

    def __call__(self, table: pa.Table) -> pa.Table:
        """One row in, one row out: a retried task can then neither repeat nor lose a row."""
        (row,) = read_rows(table)
        if row.kind != "clip" or row.frames_THWC is None:
            return table
        return Row(row.kind, row.video_id, row.item_id, row.body | self._caption(row)).to_table()

    def _caption(self, row: Row) -> dict[str, Any]:
        assert row.frames_THWC is not None
        config = self._config
        times = tuple(row.body["frame_times_s"])
        request = CaptionRequest(row.item_id, row.frames_THWC, times, config.prompt, config.system_prompt)
        columns: dict[str, Any] = {
            "precision": self._engine.precision,
            "model": config.model,
            "model_revision": self._model.revision,
            "prompt_name": config.prompt_name,
            "prompt_hash": prompt_hash(config.prompt, config.system_prompt),
        }
        try:
            caption = self._engine.submit(request).result()
        except RowError as error:
            return columns | {"status": "failed", "error_type": error.error_type, "error_message": error.message}
        except EngineError:
            os._exit(1)  # the process is broken: Ray starts another and runs the rows in flight again
        return columns | {
            "caption": caption.text,
            "finish_reason": caption.finish_reason,
            "num_prompt_tokens": caption.num_prompt_tokens,
            "num_output_tokens": caption.num_output_tokens,
        }
