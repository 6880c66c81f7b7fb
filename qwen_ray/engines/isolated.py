"""A caption engine in a process of its own: a CUDA fault, a native crash, a hang or leaked memory ends with it.

One thread owns all that is known of the process and its requests; callers, answers and deaths reach it through one
queue, so nothing here is shared and nothing locked. When the process dies, those requests that its journal names are
asked alone, one after another, before the others are sent again: a request that kills engines costs two of them and
fails; no other does. Frames cross a socket uncopied by pickle: 11 MB take 5 ms, 2.7 ms of CPU on either side. Shared
memory would take 0.7 ms, but only in buffers that are kept and lent; made anew for each clip it takes 11 ms.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from qwen_ray import wire
from qwen_ray.engines.process import END_S, Answered, Died, EngineProcess
from qwen_ray.engines.protocol import Caption, CaptionEngine, CaptionRequest
from qwen_ray.errors import EngineError, RequestError

BOOT_TRIES = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request, as it goes over the socket, and its answer to be."""

    number: int
    key: str
    parts: list[bytes | memoryview]
    answer: Future[Caption] = field(default_factory=Future)


class _Close:
    """Nothing more will be asked."""


_Event = _Asked | Answered | Died | _Close


class IsolatedEngine:
    """The engine that `make` makes, in a process that is replaced when it dies.

    Args:
        make: makes the engine, in that process; it is pickled. Where the engine has an attribute `on_step`, that is set
            to a function to be called with the `clip_id` of each request that it is about to work on; otherwise it
            counts as working on all that it has.
        deadline_s: seconds without an answer or a step after which a process with requests counts as hung.
        boot_deadline_s: seconds that making the engine may take.

    Raises:
        EngineError: the process does not come up, tried several times.
        Exception: what `make` raised.
    """

    def __init__(
        self, make: Callable[[], CaptionEngine], *, deadline_s: float = 600.0, boot_deadline_s: float = 3600.0
    ) -> None:
        self._make, self._deadline_s, self._boot_deadline_s = make, deadline_s, boot_deadline_s
        self._numbers = itertools.count()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._waiting: deque[_Asked] = deque()
        self._suspects: deque[_Asked] = deque()  # asked alone; the first is the one in work
        self._sent: dict[int, _Asked] = {}
        self._process: EngineProcess | None = None
        self._heard_s = 0.0
        self._dying: str | None = None  # set where no more is sent: why we killed it, or nothing
        self._broken: EngineError | None = None
        booted: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, args=(booted,), name="isolated-engine", daemon=True)
        self._thread.start()
        try:
            self.precision = booted.result()
        except BaseException:
            self._events.put(_Close())  # an interrupt leaves no process behind
            raise

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """See `CaptionEngine.submit`. RequestError `engine_crashed` also stands for: its process died of it alone."""
        number = next(self._numbers)
        asked = _Asked(number, request.clip_id, wire.pack((number, request)))
        asked.answer.set_running_or_notify_cancel()  # it cannot be taken back
        self._events.put(asked)
        if self._broken is not None:
            self._refuse(self._broken)
        return asked.answer

    def close(self) -> None:
        """See `CaptionEngine.close`."""
        self._events.put(_Close())
        self._thread.join()

    def _run(self, booted: Future[str]) -> None:
        """The thread: until closed, or until a process can no longer be had."""
        broken = EngineError("the engine is closed")
        try:
            self._process, precision = self._boot(again=False)
            booted.set_result(precision)
            self._serve()
            if self._process is not None:
                self._process.close()
        except Exception as error:  # noqa: BLE001  nobody may wait for a thread that is gone
            broken = error if isinstance(error, EngineError) else EngineError(f"isolating the engine failed: {error!r}")
            if not booted.done():
                booted.set_exception(error)
            if self._process is not None:
                self._process.end()
        for asked in (*self._sent.values(), *self._suspects, *self._waiting):
            if not asked.answer.done():
                asked.answer.set_exception(broken)
        self._broken = broken
        self._refuse(broken)

    def _refuse(self, broken: EngineError) -> None:
        """Fail what came too late: called after `_broken` is set, and by whoever queued something after that."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, _Asked):
                    event.answer.set_exception(broken)

    def _boot(self, *, again: bool) -> tuple[EngineProcess, str]:
        """A process that has made its engine, and the engine's precision."""
        for _ in range(BOOT_TRIES):
            process = EngineProcess()
            told = process.boot(self._make, self._boot_deadline_s)
            if isinstance(told, str):
                process.listen(self._events.put)
                return process, told
            process.end()
            if not again and not isinstance(told, EngineError):
                raise told
            log.warning("an engine's process did not come up: %s", told)
        raise EngineError(f"the engine's process did not come up in {BOOT_TRIES} tries; the last time: {told}")

    def _serve(self) -> None:
        closing = False
        while not closing or self._sent or self._suspects or self._waiting:
            self._send()
            match self._next():
                case _Asked() as asked:
                    self._waiting.append(asked)
                case Answered(number, result):
                    self._settle(number, result)
                case Died(how):
                    self._bury(self._dying or how)
                case _Close():
                    closing = True

    def _send(self) -> None:
        """Hand over what the process may have now: one suspect, or else everything. A dead one is replaced for it."""
        if self._process is None and (self._suspects or self._waiting):
            self._process, _ = self._boot(again=True)
        if self._suspects and not self._sent:
            self._hand_over(self._suspects[0])
        while self._waiting and not self._suspects and self._dying is None:
            self._hand_over(self._waiting.popleft())

    def _hand_over(self, asked: _Asked) -> None:
        assert self._process is not None
        if not self._sent:
            self._heard_s = time.monotonic()
        self._sent[asked.number] = asked
        try:
            self._process.send(asked.parts, self._deadline_s)
        except BlockingIOError:
            self._kill(f"a hang: it took nothing in for {self._deadline_s:g} s")
        except OSError:
            self._dying = ""

    def _kill(self, why: str) -> None:
        assert self._process is not None
        self._dying = why
        self._process.kill()

    def _next(self) -> _Event:
        """The next event. A process that hangs is killed, and its death is an event."""
        while self._process is not None and self._sent and self._dying is None:
            step_s, _ = self._process.working()
            left_s = max(self._heard_s, step_s) + self._deadline_s - time.monotonic()
            if left_s <= 0:
                self._kill(f"a hang: no answer and no step for {self._deadline_s:g} s")
                break
            with suppress(queue.Empty):
                return self._events.get(timeout=left_s)
        try:
            return self._events.get(timeout=None if self._dying is None else END_S)
        except queue.Empty:
            raise EngineError(f"the engine's process cannot be killed ({self._dying})") from None

    def _settle(self, number: int, result: Caption | Exception) -> None:
        """Pass an answer on, unless it says that the process is broken."""
        self._heard_s = time.monotonic()
        if isinstance(result, EngineError):
            self._kill(f"an error: {result}")
            return
        asked = self._sent.pop(number)
        if self._suspects:
            self._suspects.popleft()
        if isinstance(result, Exception):
            asked.answer.set_exception(result)
        else:
            asked.answer.set_result(result)

    def _bury(self, how: str) -> None:
        """Sort what a dead process leaves: the one that it died of, those that it may have died of, the others."""
        assert self._process is not None
        _, keys = self._process.working()
        self._process.end()
        log.warning("an engine's process died by %s with %d requests in it", how, len(self._sent))
        left = list(self._sent.values())
        self._process, self._dying = None, None
        self._sent.clear()
        if self._suspects:
            culprit = self._suspects.popleft()
            text = f"the engine's process died of this request, asked alone, by {how}"
            culprit.answer.set_exception(RequestError("engine_crashed", text))
            return
        suspects = [one for one in left if one.key in keys] or left
        self._suspects.extend(suspects)
        self._waiting.extendleft(one for one in reversed(left) if one not in suspects)
