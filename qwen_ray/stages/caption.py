"""The caption stage: a clip's frames become its captions, a video's captions its summary; other rows pass untouched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pyarrow as pa

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.build import isolated_caption_engine
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import Caption, CaptionRequest, Medium
from qwen_ray.errors import EngineError, RowError
from qwen_ray.guards import caption_flags
from qwen_ray.prompts import Prompt, fill
from qwen_ray.stages.rows import Row, read_rows
from qwen_ray.work import LOADING, NOWHERE, Work

MAX_SUMMARY_CHARS = 24_000
"""Captions merged by one request: some 6,000 tokens, about an hour of 12 s clips. More are merged in steps."""


class CaptionStage:
    """Holds an engine. Called from many threads at once, each with one row, so the engine's batches stay full."""

    def __init__(self, config: CaptionConfig, model: Model, work: Work = NOWHERE, *, cuda: bool) -> None:
        self._config, self._model, self._work = config, model, work
        with work.on(LOADING):
            self._engine = isolated_caption_engine(config, model, cuda=cuda)

    def __call__(self, table: pa.Table) -> pa.Table:
        """One row in, one row out: a retried task can then neither repeat nor lose a row."""
        (row,) = read_rows(table)
        if row.kind != "summary" and (row.kind != "clip" or row.frames_THWC is None):
            return table
        with self._work.on(row.name):
            made = self._summarise(row) if row.kind == "summary" else self._describe(row)
        body = {name: value for name, value in row.body.items() if name not in ("metadata", "captions")}
        return Row(row.kind, row.video_id, row.item_id, body | made).to_table()

    def _describe(self, row: Row) -> dict[str, Any]:
        """The columns of a clip's row: the first prompt's answer is its caption."""
        answers = self.answers(row, self._config.prompts)
        first = answers[0]
        return {
            **{name: value for name, value in first.items() if name != "flags"},
            **_outcome(answers),
            "flags": [*row.body.get("flags", ()), *first["flags"]],
            "answers": answers,
            "precision": self._engine.precision,
            "model": self._config.model,
            "model_revision": self._model.revision,
        }

    def answers(self, row: Row, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Entries of the column `answers`, one per prompt in order, for a row of kind `clip`."""
        asked = [self._ask(prompt, row, row.body.get("metadata") or {}) for prompt in prompts]
        return [_answer(prompt, got) for prompt, got in zip(prompts, asked, strict=True)]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _ask(self, prompt: Prompt, row: Row, values: Mapping[str, Any]) -> Future[Caption]:
        """Put one question to the engine; a failed future where it cannot even be put."""
        start_s = row.body.get("start_s", 0.0)
        times = tuple(time_s - start_s for time_s in row.body.get("frame_times_s", ()))
        try:
            text, system = fill(prompt, values)
        except RowError as error:
            refused: Future[Caption] = Future()
            refused.set_exception(error)
            return refused
        key = row.item_id if prompt == self._config.prompts[0] else f"{row.item_id}:{prompt.name}"
        media = () if row.frames_THWC is None else (Medium(row.frames_THWC, times),)
        return self._engine.submit(CaptionRequest(key, media, text, system))

    def _summarise(self, row: Row) -> dict[str, Any]:
        """The columns of a video's summary, from `captions`: (start, end, text) of its clips in order."""
        prompt = self._config.summary
        assert prompt is not None
        parts = [f"{start_s:.1f} to {end_s:.1f}: {text}" for start_s, end_s, text in row.body["captions"]]
        while True:
            groups = list(_groups(parts))
            asked = [self._ask(prompt, row, row.body["metadata"] | {"captions": "\n".join(g)}) for g in groups]
            answers = [_answer(prompt, got) for got in asked]
            failed = next((answer for answer in answers if answer["error_type"]), None)
            if failed is not None:
                return {"status": "failed"} | {name: failed[name] for name in ("error_type", "error_message")}
            parts = [answer["caption"] for answer in answers]
            if len(groups) == 1:
                return {"status": "ok", "summary": parts[0], "flags": answers[0]["flags"]}


def _answer(prompt: Prompt, got: Future[Caption]) -> dict[str, Any]:
    """One entry of `answers`."""
    row: dict[str, Any] = {"prompt_name": prompt.name, "prompt_hash": prompt.hash, "flags": [], "error_type": None}
    try:
        caption = got.result()
    except RowError as error:
        return row | {"error_type": error.error_type, "error_message": error.message}
    except EngineError:
        os._exit(1)  # no engine can be had here any more: Ray starts another actor and runs the rows in flight again
    return row | {
        "caption": caption.text,
        "flags": [*caption.flags, *caption_flags(caption.text, prompt.text, prompt.script)],
        "finish_reason": caption.finish_reason,
        "num_prompt_tokens": caption.num_prompt_tokens,
        "num_output_tokens": caption.num_output_tokens,
    }


def _outcome(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Status of a clip, and its first error: failed where no prompt was answered, partial where some were not."""
    failed = [answer for answer in answers if answer["error_type"]]
    if not failed:
        return {"status": "ok"}
    status = "failed" if len(failed) == len(answers) else "partial"
    return {"status": status, "error_type": failed[0]["error_type"], "error_message": failed[0]["error_message"]}


def _groups(parts: Sequence[str]) -> Iterator[list[str]]:
    """Parts in order, at least two together wherever there are two, so that merging in steps comes to an end."""
    group: list[str] = []
    for part in parts:
        if len(group) >= 2 and sum(len(one) + 1 for one in group) + len(part) > MAX_SUMMARY_CHARS:
            yield group
            group = []
        group.append(part)
    yield group
