"""Processes of our own beside this one: how they start, and how they end.

Each is started fresh (never forked: a fork of a process with threads may deadlock), leads a process group, so that what
it starts goes with it, and is spoken to over a socket (`wire`), which closes when either side is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def start(
    module: str,
    arguments: Sequence[str] = (),
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | IO[bytes] | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `python -m MODULE FD ARGUMENTS`; returns the process and our end of its socket FD.

    Args:
        fds: further files that it inherits, under the same numbers.
        environment: variables that differ from ours.
        stdout, stderr: as for `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[theirs.fileno(), *fds],
            env={**os.environ, **_python_path(), **(environment or {})},
            process_group=0,
        )
    return process, ours


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process that nobody has waited for yet, and to those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def cause(code: int) -> str:
    """How a process died, by its exit code as `subprocess` tells it: `signal 11 (SIGSEGV)`, `exit code 1`."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in {number.value for number in signal.Signals}
    return f"signal {-code} ({signal.Signals(-code).name})" if known else f"signal {-code}"


def end_with_parent(fd: int) -> None:
    """Have this process and those it started killed as soon as the other end of the socket `fd` closes.

    PR_SET_PDEATHSIG would be shorter, but it fires when the parent's *thread* that started us ends.
    """
    threading.Thread(target=_watch, args=(fd,), name="end-with-parent", daemon=True).start()


def _watch(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _python_path() -> dict[str, str]:
    """A module path that has this very package."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
