"""Batches of whatever waits, answered on the one thread that owns a model.

Callers queue requests; the thread takes what is there, up to `batch_size`, so batches fill by themselves when many
callers wait, and a lone request does not wait for company.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from qwen_ray.engines.trace import Trace
from qwen_ray.errors import EngineError, RequestError, ResourceError, RowError

Request = TypeVar("Request")
Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Request, Answer]):
    request: Request
    answer: Future[Answer]


class Batcher(Generic[Request, Answer]):
    """Asks `model` with lists of requests; an error of one request fails that one only.

    Args:
        model: answers a list of requests with as many answers, in their order; only ever called on one thread.
        describe: what a request is, for messages, such as `a clip of 8x28x28x3`.
        batch_size: most requests in one call.
        name: of the thread.
    """

    def __init__(
        self,
        model: Callable[[list[Request]], list[Answer]],
        describe: Callable[[Request], str],
        *,
        batch_size: int,
        name: str,
    ) -> None:
        self._model, self._describe, self._batch_size = model, describe, batch_size
        self._trace = Trace(name)
        self._queue: queue.SimpleQueue[_Waiting[Request, Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Answer]:
        """Queue one request; its future raises ResourceError, RequestError or EngineError."""
        answer: Future[Answer] = Future()
        self._queue.put(_Waiting(request, answer))
        return answer

    def close(self) -> None:
        """Answer what is waiting, then stop the thread. Nothing may be submitted afterwards."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while batch := self._next_batch():
            broken = self._answer(batch)
            if broken is not None:
                self._refuse(broken)

    def _next_batch(self) -> list[_Waiting[Request, Answer]]:
        batch: list[_Waiting[Request, Answer]] = []
        while len(batch) < self._batch_size:
            try:
                waiting = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if waiting is None:
                self._queue.put(None)  # answer what came before the end, then see it again
                break
            batch.append(waiting)
        return batch

    def _answer(self, batch: list[_Waiting[Request, Answer]]) -> EngineError | None:
        """Answer a batch; halve it when it fails, until the one request that cannot be answered stands alone.

        Returns the error that broke the process, if one did; all of the batch has been answered either way.
        """
        parts = [batch]
        while parts:
            part = parts.pop(0)
            failure = self._try(part)
            if failure is None:
                continue
            if breaks_process(failure):
                broken = EngineError(f"the model's process has lost its GPU: {failure}")
                for waiting in (one for left in [part, *parts] for one in left):
                    waiting.answer.set_exception(broken)
                return broken
            if len(part) == 1:
                part[0].answer.set_exception(self._as_row_error(failure, part[0].request))
                continue
            log.warning("a batch of %d requests failed (%s); trying its halves", len(part), failure)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
        return None

    def _try(self, batch: list[_Waiting[Request, Answer]]) -> Exception | None:
        """Answer a batch in one call, or return what went wrong, less the traceback that holds the call's tensors."""
        began = time.time()
        try:
            answers = self._model([waiting.request for waiting in batch])
        except Exception as error:  # noqa: BLE001  whatever one request causes must not fail its neighbours
            error.__context__ = error.__cause__ = None
            return error.with_traceback(None)
        self._trace.work("batch", began, len(batch), len(batch))
        for waiting, answer in zip(batch, answers, strict=True):
            waiting.answer.set_result(answer)
        return None

    def _refuse(self, broken: EngineError) -> None:
        """Answer everything from now on with the error that broke the process."""
        while (waiting := self._queue.get()) is not None:
            waiting.answer.set_exception(broken)
        self._queue.put(None)

    def _as_row_error(self, error: Exception, request: Request) -> RowError:
        what = self._describe(request)
        if isinstance(error, torch.OutOfMemoryError):
            return ResourceError("out_of_memory", f"{what} does not fit into GPU memory even alone")
        return RequestError("engine_crashed", f"the model failed on {what}: {type(error).__name__}: {error}")


def breaks_process(error: Exception) -> bool:
    """Whether CUDA has failed in a way that every later call in this process repeats."""
    fault = getattr(torch, "AcceleratorError", ())
    return isinstance(error, fault) or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))
