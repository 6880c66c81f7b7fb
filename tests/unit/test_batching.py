"""Batches fill by themselves, and an error costs the request that caused it, and no other."""

from __future__ import annotations

import threading

import pytest
import torch

from qwen_ray.engines.batching import Batcher
from qwen_ray.errors import EngineError, RequestError, ResourceError


class Model:
    """Doubles numbers; fails with `error` where any number of a batch is `bad`. Waits for `go` before the first."""

    def __init__(self, bad: int | None = None, error: Exception | None = None) -> None:
        self.bad, self.error, self.batches, self.go = bad, error, list[list[int]](), threading.Event()

    def __call__(self, numbers: list[int]) -> list[int]:
        self.go.wait()
        self.batches.append(numbers)
        if self.bad in numbers and self.error is not None:
            raise self.error
        return [2 * number for number in numbers]


def ask(model: Model, numbers: range, batch_size: int = 8) -> list:
    """Futures of all numbers; the model only begins when all are submitted."""
    batcher = Batcher(model, lambda number: f"number {number}", batch_size=batch_size, name="test")
    answers = [batcher.submit(number) for number in numbers]
    model.go.set()
    batcher.close()
    return answers


def test_what_waits_is_answered_together_and_in_order():
    model = Model()
    assert [answer.result(0) for answer in ask(model, range(20))] == [2 * number for number in range(20)]
    assert max(len(batch) for batch in model.batches) == 8
    assert [number for batch in model.batches for number in batch] == list(range(20))


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ResourceError, "number 5 does not fit"),
        (ValueError("odd shape"), RequestError, "number 5: ValueError: odd shape"),
        (RuntimeError("size mismatch"), RequestError, "number 5: RuntimeError"),
    ],
)
def test_a_bad_request_fails_alone(error, expected, words):
    answers = ask(Model(5, error), range(8))
    with pytest.raises(expected, match=words):
        answers.pop(5).result(0)
    assert [answer.result(0) for answer in answers] == [0, 2, 4, 6, 8, 12, 14]


def test_nothing_is_answered_after_the_process_has_lost_its_gpu():
    model = Model(3, RuntimeError("CUDA error: an illegal memory access was encountered"))
    answers = ask(model, range(12), batch_size=2)
    before = [number for batch in model.batches for number in batch if number not in model.batches[-1]]
    for number, answer in enumerate(answers):
        if number in before:
            assert answer.result(0) == 2 * number
        else:
            with pytest.raises(EngineError, match="lost its GPU"):
                answer.result(0)
