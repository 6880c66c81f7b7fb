"""Decoding in a process of its own, which may hang, crash or outgrow its memory without taking the worker along.

Native decoders do all three on damaged files, and a hang inside them heeds no exception and no signal but SIGKILL. The
process serves file after file, since starting one costs 0.3 s; it is replaced when it failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from qwen_ray import children, wire
from qwen_ray.config import DecodeConfig
from qwen_ray.errors import ResourceError, RowError, TransientError
from qwen_ray.media.events import DecodeRequest, Done, Event

FRAME = re.compile(rb'File "(?:[^"]*/)?([^"/]+)", line (\d+),? in (\S+)')
"""A line of faulthandler's report."""


NO_MEMORY = (b"MemoryError", b"bad_alloc", b"Cannot allocate memory")
"""What Python, C++ and the system say where memory is refused."""

SPARED = "900"
"""Score by which the system's killer takes this process, at most; Ray gives its workers 1000, the decoder's too."""


class DecodeBug(RuntimeError):  # noqa: N818 (a bug is not an error that callers are meant to expect)
    """The decoding code itself is wrong: which exception, and where. `report` is the whole traceback."""

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message, report)
        self.message, self.report = message, report

    def __str__(self) -> str:
        return self.message


class Decoder:
    """A decoding process, started at the first request and kept for the following ones. One request at a time."""

    def __init__(self, *, memory_bytes: int = 0) -> None:
        """Prepare; `memory_bytes` bounds what the process may allocate, 0 leaves it unbounded."""
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def decode(self, request: DecodeRequest) -> Iterator[Event]:
        """The events of `decode.decode_events(request)`, as soon as each is ready.

        Leaving the iterator before its end ends the process.

        Raises:
            InputError, TransientError: As `decode_events` does.
            RowError: `decode_timeout` after `decode.deadline_s` seconds without a sign of life or
                `decode.file_deadline_s` of work, `decode_crashed` where the process died.
            ResourceError: `decode_memory` where it ran out of memory.
            DecodeBug: The decoding code failed in a way of its own.
        """
        finished = False
        try:
            sock = self._ready()
            self._ask(sock, request)
            patience = _Patience(request.decode)
            while not finished:
                event = self._next(sock, request, patience)
                finished = isinstance(event, Done)
                yield event
        except RowError as error:
            finished = error.error_type not in ("decode_timeout", "decode_crashed", "decode_memory")
            raise
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        """End the process; the next request starts another. Safe to call twice."""
        if self._process is not None:
            self._kill()
        for resource in (self._socket, self._stderr):
            if resource is not None:
                resource.close()
        self._process = self._socket = self._stderr = None

    def _kill(self) -> int:
        """End the process and those that it started; returns its exit code."""
        assert self._process is not None
        children.kill_group(self._process)
        return self._process.wait()

    def _ready(self) -> socket.socket:
        """The socket to a living process, with its log emptied."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._socket is not None
        assert self._stderr is not None
        os.ftruncate(self._stderr.fileno(), 0)
        self._socket.settimeout(None)
        return self._socket

    def _start(self) -> None:
        self._stderr = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (closed by close)
        self._process, self._socket = children.start(
            "qwen_ray.media.child",
            [str(self._memory_bytes)],
            environment={"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
        )
        spare_ourselves()

    def _ask(self, sock: socket.socket, request: DecodeRequest) -> None:
        try:
            wire.send(sock, request)
        except ConnectionError:
            raise self._death(Path(request.path).name) from None

    def _next(self, sock: socket.socket, request: DecodeRequest, patience: _Patience) -> Event:
        """The next event; beats push the deadline of one sign of life, not that of the file."""
        name = Path(request.path).name
        while True:
            try:
                message = patience.receive(sock)
            except TimeoutError:
                raise TransientError("decode_timeout", f"{name}: {patience.exceeded()}") from None
            except (EOFError, ConnectionError):
                raise self._death(name) from None
            if isinstance(message, RowError):
                raise message
            if message is not None:
                return cast(Event, message)

    def _death(self, name: str) -> RowError | DecodeBug:
        """What became of a process that hung up."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = self._kill()
        assert self._stderr is not None
        self._stderr.seek(0)
        report = self._stderr.read()
        if any(word in report for word in NO_MEMORY):
            return out_of_memory(name, self._memory_bytes)
        if code == -signal.SIGKILL:
            text = f"{name}: the decoder was killed (signal 9), most likely because the machine ran out of memory"
            return ResourceError("decode_memory", text)
        if b"Traceback (most recent call last)" in report:
            last = report.strip().rpartition(b"\n")[2].decode(errors="replace")
            where = FRAME.findall(report)[-1]
            text = f"{name}: bug in the decoding code: {last} (at {_place(where)})"
            return DecodeBug(text, report.decode(errors="replace"))
        text = f"{name}: the decoder died by {children.cause(code)}{_last_words(report)}"
        return TransientError("decode_crashed", text)


class _Patience:
    """How long one file's events are waited for; what the taker does between two events does not count."""

    def __init__(self, decode: DecodeConfig) -> None:
        self._decode, self._left_s = decode, decode.file_deadline_s

    def receive(self, sock: socket.socket) -> object:
        """The next message. Raises TimeoutError when it or the whole file takes too long, else as `wire.receive`."""
        began = time.monotonic()
        try:
            return wire.receive(sock, min(self._decode.deadline_s, self._left_s))
        finally:
            self._left_s -= time.monotonic() - began

    def exceeded(self) -> str:
        """Which deadline passed, and what to do."""
        decode = self._decode
        if self._left_s <= 0:
            return f"the decoder worked on it for {decode.file_deadline_s:g} s; decode.file_deadline_s allows more"
        return f"the decoder gave no sign of life for {decode.deadline_s:g} s; decode.deadline_s allows more"


def out_of_memory(name: str, memory_bytes: int) -> ResourceError:
    """The error of a file that takes more memory than it may."""
    bound = f"the {memory_bytes / 2**30:g} GiB of decode.memory_gb" if memory_bytes else "the machine has"
    return ResourceError("decode_memory", f"{name}: decoding it takes more memory than {bound}")


def spare_ourselves() -> None:
    """Have the system, where memory runs out, kill the decoding process rather than this one, which holds the rows.

    That process asks for the highest score. Ray gives its workers the same; one may take back what was added to it.
    """
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        if int(score.read_text()) > int(SPARED):
            score.write_text(SPARED)


def _last_words(report: bytes) -> str:
    """What a crashed process said last, and where in our code it was, without the machine's paths."""
    before, _, fault = report.partition(b"Fatal Python error")
    said = [line.strip() for line in before.splitlines() if line.strip()][-2:]
    where = FRAME.search(fault.partition(b"Current thread")[2])
    told = [line.decode(errors="replace") for line in said]
    return "".join(f"; {text}" for text in [*told, *([f"at {_place(where.groups())}"] if where else [])])


def _place(frame: tuple[bytes, ...]) -> str:
    file, line, function = (part.decode(errors="replace") for part in frame)
    return f"{file}:{line} in {function}"
