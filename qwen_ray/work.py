"""What every worker of a run is doing, told on its node: a row in work is an empty file, a process a folder of them.

So whoever stands outside can tell which rows a process has, and since when, whatever it hangs in and also after its
death. Ray's own account of tasks needs its dashboard and knows no rows. A row costs 60 us.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

STACKS = "QWEN_RAY_STACKS"
"""Environment variable: the folder in which a worker's own processes show their stacks."""
SHOW = signal.SIGUSR2
"""Asks a process for its stacks. Sent only to those that have said that they listen: it ends any other."""
LOADING = "loading"
"""Stands for a row while a worker makes its engine."""
_ANSWER_S = 2.0
_FORGOTTEN_S = 86_400.0
_open: list[IO[bytes]] = []


@dataclass(frozen=True, slots=True)
class Work:
    """Where the processes of a stage note their rows; with no run they note nothing."""

    run_id: str = ""
    stage: str = ""

    @contextmanager
    def on(self, row: str) -> Iterator[None]:
        """While the block lasts, this process works on the row of this name (ids, joined by `-`)."""
        if not self.run_id:
            yield
            return
        path = _desk(self.run_id, self.stage) / row
        path.touch()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


NOWHERE = Work()
"""For a stage outside of a run."""


@dataclass(frozen=True, slots=True)
class Desk:
    """A process and its rows: name and age in seconds, oldest first."""

    stage: str
    pid: int
    rows: tuple[tuple[str, float], ...]

    def stuck(self, for_s: float) -> list[str]:
        """Rows that it has had for so long."""
        return [row for row, age_s in self.rows if age_s >= for_s]


def desks(run_id: str) -> list[Desk]:
    """The living processes of a run on this node that have rows."""
    found = []
    for folder in _folders(_root() / run_id):
        stage, _, pid = folder.name.rpartition("-")
        if _alive(int(pid)) and (rows := tuple(sorted(_rows(folder), key=lambda row: -row[1]))):
            found.append(Desk(stage, int(pid), rows))
    return found


def runs() -> list[str]:
    """Ids of the runs that have, or had, workers on this node."""
    return [folder.name for folder in _folders(_root())]


def show_stacks() -> None:
    """Listen: on `SHOW`, write the stacks of all threads to a file in the folder that `STACKS` names. For children."""
    if folder := os.environ.get(STACKS):
        _listen(Path(folder))


def stacks(run_id: str, desk: Desk) -> str:
    """What every thread of a worker and of its own processes is at; works on native hangs too."""
    folder = _root() / run_id / f"{desk.stage}-{desk.pid}"
    files = {int(path.name.rpartition("-")[2]): path for path in folder.glob(".stacks-*")}
    asked = {pid: path for pid, path in files.items() if _alive(pid)}
    before = {pid: path.stat().st_size for pid, path in asked.items()}
    for pid in asked:
        with suppress(ProcessLookupError):
            os.kill(pid, SHOW)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and any(path.stat().st_size == before[pid] for pid, path in asked.items()):
        time.sleep(0.05)
    return "\n".join(f"process {pid}:\n{_since(path, before[pid])}" for pid, path in asked.items())


def kill(desk: Desk) -> None:
    """End a process and, by that, those that it started."""
    with suppress(ProcessLookupError):
        os.kill(desk.pid, signal.SIGKILL)


@functools.cache
def _desk(run_id: str, stage: str) -> Path:
    """This process's folder, made at its first row; those of processes that are dead go."""
    for run in _folders(_root()):
        for folder in _folders(run):
            if not _alive(int(folder.name.rpartition("-")[2])):
                shutil.rmtree(folder, ignore_errors=True)
        if time.time() - run.stat().st_mtime > _FORGOTTEN_S:
            with suppress(OSError):
                run.rmdir()  # when it is empty
    folder = _root() / run_id / f"{stage}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[STACKS] = str(folder)
    _listen(folder)
    return folder


def _listen(folder: Path) -> None:
    with suppress(OSError):  # the folder of a parent that is gone
        _open.append((folder / f".stacks-{os.getpid()}").open("wb"))  # kept open: the handler may not open files
        faulthandler.register(SHOW, _open[-1], all_threads=True)


def _root() -> Path:
    return Path(tempfile.gettempdir()) / f"qwen_ray-{os.getuid()}"


def _folders(folder: Path) -> Sequence[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _rows(folder: Path) -> Iterator[tuple[str, float]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # done in this very moment
            if not path.name.startswith("."):
                yield path.name, max(0.0, time.time() - path.stat().st_mtime)


def _since(path: Path, start: int) -> str:
    with suppress(FileNotFoundError):
        return path.read_bytes()[start:].decode(errors="replace")
    return ""


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
