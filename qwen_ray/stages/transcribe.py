"""The speech stage: a chunk of sound becomes segments on the video's axis; every other row passes untouched."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from qwen_ray.config import SpeechConfig
from qwen_ray.engines.build import speech_engine
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import Segment
from qwen_ray.errors import EngineError, RowError
from qwen_ray.stages.rows import Row, read_rows
from qwen_ray.work import LOADING, NOWHERE, Work


class TranscribeStage:
    """Holds an engine."""

    def __init__(self, config: SpeechConfig, model: Model, work: Work = NOWHERE, *, cuda: bool) -> None:
        self._config, self._model, self._work = config, model, work
        with work.on(LOADING):
            self._engine = speech_engine(config, model, cuda=cuda)

    def __call__(self, table: pa.Table) -> pa.Table:
        """One row in, one row out."""
        (row,) = read_rows(table)
        if row.kind != "speech" or row.pcm is None:
            return table
        with self._work.on(row.name):
            return Row(row.kind, row.video_id, row.item_id, row.body | self._transcribe(row)).to_table()

    def _transcribe(self, row: Row) -> dict[str, Any]:
        assert row.pcm is not None
        columns = {"model": self._config.model, "model_revision": self._model.revision}
        try:
            found = self._engine.transcribe(row.pcm)
        except RowError as error:
            return columns | {"status": "failed", "error_type": error.error_type, "error_message": error.message}
        except EngineError:
            os._exit(1)  # the process is broken: Ray starts another and runs the rows in flight again
        return columns | {"segments": [_on_axis(s, row.body["start_s"], row.body["end_s"]) for s in found]}


def _on_axis(segment: Segment, chunk_start_s: float, chunk_end_s: float) -> dict[str, Any]:
    """A segment with its times moved to the video's axis and kept inside its chunk.

    Whisper may place a last word past the sound it was given (seen as words at 18 to 23 s of a 3 s file).
    """

    def place(time_s: float) -> float:
        return min(max(chunk_start_s + time_s, chunk_start_s), chunk_end_s)

    words = [asdict(w) | {"start_s": place(w.start_s), "end_s": place(w.end_s)} for w in segment.words]
    times = {"start_s": place(segment.start_s), "end_s": place(segment.end_s)}
    return asdict(segment) | times | {"words": words, "flags": list(segment.flags)}
