"""One process with an engine in it, seen from outside: started, asked, listened to, and buried when it is dead.

That it is dead is told by the process itself, not by its socket, which something that it forked may hold open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qwen_ray import children, wire
from qwen_ray.engines import journal
from qwen_ray.engines.protocol import Caption, CaptionEngine
from qwen_ray.errors import EngineError

END_S = 60.0
"""What a process may take to end: when asked, before it is killed; when killed, before it counts as unkillable."""
STDERR = 2


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine's answer, or its error, to the request of this number."""

    number: int
    result: Caption | Exception


@dataclass(frozen=True, slots=True)
class Died:
    """The process is dead, and `how`; all its answers came before this."""

    how: str


class EngineProcess:
    """Starts at once. It ends with the thread that made it, at the latest."""

    def __init__(self) -> None:
        self._journal = os.memfd_create("journal")
        self._process, self._socket = children.start(
            "qwen_ray.engines.child", [str(self._journal)], fds=[self._journal], stdout=STDERR
        )
        self._reaper = threading.Thread(target=self._reap, name="engine-reaper", daemon=True)
        self._reaper.start()
        self._listener: threading.Thread | None = None

    def boot(self, make: Callable[[], CaptionEngine], deadline_s: float) -> str | Exception:
        """Have it make its engine: that one's precision, or what went wrong."""
        try:
            wire.send(self._socket, make)
            told: str | Exception = wire.receive(self._socket, deadline_s)
        except TimeoutError:
            return EngineError(f"the engine was not made within {deadline_s:g} s")
        except (EOFError, ConnectionError):
            return EngineError(f"it died by {self._cause()} while making the engine")
        self._socket.settimeout(None)
        return told

    def listen(self, tell: Callable[[Answered | Died], None]) -> None:
        """From now on, `tell` its answers, and its death."""
        self._listener = threading.Thread(target=self._listen, args=(tell,), name="engine-listener", daemon=True)
        self._listener.start()

    def send(self, parts: Sequence[bytes | memoryview], patience_s: float) -> None:
        """Hand it a message that `wire.pack` made.

        Raises:
            BlockingIOError: it took nothing of it for `patience_s` seconds.
            OSError: it is dead or dying.
        """
        whole_s = int(patience_s)
        limit = struct.pack("ll", whole_s, int(1e6 * (patience_s - whole_s)) or 1)
        # The socket's own timeout would bind the listener as well.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        for part in parts:
            self._socket.sendall(part)

    def working(self) -> tuple[float, frozenset[str]]:
        """See `journal.read`; also after its death."""
        return journal.read(self._journal)

    def kill(self) -> None:
        """End it; its death is told as any other."""
        if self._reaper.is_alive():
            children.kill_group(self._process)

    def close(self) -> None:
        """Let its engine close, then end it."""
        with contextlib.suppress(OSError):
            wire.send(self._socket, None)
        self._reaper.join(END_S)
        self.end()

    def end(self) -> None:
        """End it and free what we hold of it."""
        self.kill()
        for thread in (self._reaper, self._listener):
            if thread is not None:
                thread.join(END_S)
        self._socket.close()
        os.close(self._journal)

    def _reap(self) -> None:
        """Wait for its death, and end what it has started before its id is free for others."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        children.kill_group(self._process)
        self._process.wait()

    def _listen(self, tell: Callable[[Answered | Died], None]) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    tell(Answered(*wire.receive(self._socket)))
        finally:
            tell(Died(self._cause()))

    def _cause(self) -> str:
        """How it died, now that it has hung up; one that lingers is killed."""
        self._reaper.join(5)
        self.kill()
        self._reaper.join()
        return children.cause(self._process.returncode)
