"""The process of an isolated engine: `python -m qwen_ray.engines.child FD JOURNAL_FD`, started by `isolated`.

Over the socket FD it is told how to make the engine, and says its precision or what went wrong; then requests come with
numbers, and answers go back under them as they are ready. None closes the engine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, cast

from qwen_ray import children, wire, work
from qwen_ray.engines.journal import Journal
from qwen_ray.engines.protocol import Caption, CaptionEngine
from qwen_ray.errors import EngineError, QwenRayError

PR_SET_PDEATHSIG = 1


class Telling(Protocol):
    """An engine that tells what it is about to work on."""

    on_step: Callable[[Sequence[str]], None] | None


def main() -> None:
    """Serve requests until the parent has no more, or is gone."""
    faulthandler.enable()
    work.show_stacks()
    sock = socket.socket(fileno=int(sys.argv[1]))
    _end_with_parent(sock)
    try:
        engine: CaptionEngine = wire.receive(sock)()
    except Exception as error:  # noqa: BLE001  the parent raises it
        wire.send(sock, _portable(error))
        return
    journal = None
    if hasattr(engine, "on_step"):
        journal = Journal(int(sys.argv[2]))
        cast(Telling, engine).on_step = journal.step
    wire.send(sock, engine.precision)
    _serve(sock, engine, journal)
    engine.close()


def _end_with_parent(sock: socket.socket) -> None:
    """Twice over: the socket ends our own children too; the kernel needs no thread, which a native hang may hold up.

    The parent starts us on a thread that lives as long as it wants us.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    children.end_with_parent(sock.fileno())


def _serve(sock: socket.socket, engine: CaptionEngine, journal: Journal | None) -> None:
    lock = threading.Lock()  # answers come on the engine's threads

    def say(number: int, answer: Future[Caption]) -> None:
        error = answer.exception()
        if journal and isinstance(error, EngineError):
            journal.close()
        with lock:
            wire.send(sock, (number, answer.result() if error is None else _portable(error)))

    while (message := wire.receive(sock)) is not None:
        number, request = message
        if journal:
            journal.arriving(request.clip_id)
        try:
            answer = engine.submit(request)
        except Exception as error:  # noqa: BLE001  whatever one request causes must not fail its neighbours
            answer = Future()
            answer.set_exception(error)
        if journal:
            journal.arriving()
        answer.add_done_callback(partial(say, number))


def _portable(error: BaseException) -> BaseException:
    """The error as it can cross, with its traceback where it is none that we raise on purpose."""
    if not isinstance(error, QwenRayError):
        error.add_note("In the engine's process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  classes of libraries that cannot be made again from their arguments
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
