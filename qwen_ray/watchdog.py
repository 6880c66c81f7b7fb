"""A run that makes no progress: which rows of which stage are stuck, on which node, and an end to what holds them.

Decoders and engines have deadlines of their own; this is for what those do not see: a store that answers a byte a
minute, a worker in a native hang, a task that Ray has lost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from qwen_ray import work
from qwen_ray.errors import EngineError
from qwen_ray.nodes import living, on
from qwen_ray.work import LOADING, Desk

STAGES = ("decode", "caption", "speech")
"""In the order in which a row passes them: rows of a stage may wait for the stages behind it, and not the other way."""
IN_A_ROW = 3
"""Stalls without a row in between after which the run stops."""
EMPTY_LOOKS = 10
"""Looks, a second apart, at which no worker has a row: one alone may fall between two stages."""
_PATIENCE_S = 30.0
"""A node that does not answer for so long is left out."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Workers that had the same rows for too long, and were ended."""

    stage: str
    rows: tuple[str, ...]
    """Names of the rows."""
    videos: tuple[str, ...]
    """URIs of their videos; none where a worker was still loading its engine."""
    after_s: float
    stacks: str
    """Where each thread of them was."""

    def __str__(self) -> str:
        files = f" of {_some(self.videos)}" if self.videos else ""
        what = f"{len(self.rows)} rows{files}" if self.videos else "loading its engine"
        return f"no progress for {self.after_s:.0f} s: stage {self.stage} was stuck, {what}; ended it to try again"


class Watchdog:
    """Looks when nothing has come out of the pipeline for `stall_s` seconds.

    Args:
        run_id: of the run.
        stall_s: how long a row may be in one stage without any row coming out of the pipeline.
        uris: of the planned videos, by id.
        on_stall: told of every stall, after its workers were ended.
    """

    def __init__(self, run_id: str, stall_s: float, uris: Mapping[str, str], on_stall: Callable[[Stall], None]) -> None:
        self._run_id, self._stall_s, self._uris, self._on_stall = run_id, stall_s, uris, on_stall
        self._look_at, self._in_a_row, self._empty = time.monotonic() + stall_s, 0, 0

    def saw_rows(self) -> None:
        """Something came out of the pipeline."""
        self._look_at, self._in_a_row, self._empty = time.monotonic() + self._stall_s, 0, 0

    def look(self) -> None:
        """End what is stuck, if it is time to look.

        Raises:
            EngineError: nothing is in work anywhere, or ending what was stuck did not help several times.
        """
        if time.monotonic() < self._look_at:
            return
        desks = [(node, desk) for node in living("CPU") for desk in _ask(work.desks, node, self._run_id) or ()]
        stuck = _stuck(desks, self._stall_s)
        if stuck:
            self._on_stall(self._end(stuck))
            self._in_a_row += 1
        self._empty = 0 if desks else self._empty + 1
        if self._empty == EMPTY_LOOKS:
            raise EngineError(self._nothing_in_work())
        if self._in_a_row == IN_A_ROW:
            raise EngineError(f"the pipeline stopped: no progress after ending what was stuck {IN_A_ROW} times")
        self._look_at = time.monotonic() + self._next_look_s(desks, bool(stuck))

    def _next_look_s(self, desks: Sequence[tuple[str, Desk]], ended: bool) -> float:
        """Until the oldest row, which may only have gone from stage to stage so far, would be stuck."""
        oldest_s = 0.0 if ended else max((desk.rows[0][1] for _, desk in desks), default=self._stall_s)
        return min(max(self._stall_s - oldest_s, 1.0), self._stall_s)

    def _end(self, stuck: Sequence[tuple[str, Desk]]) -> Stall:
        shown = [f"node {node}, stage {d.stage}\n{_ask(_stacks_and_end, node, self._run_id, d)}" for node, d in stuck]
        rows = [row for _, desk in stuck for row in desk.stuck(self._stall_s) if row != LOADING]
        videos = dict.fromkeys(self._uris.get(row.partition("-")[0], row) for row in rows)
        return Stall(stuck[0][1].stage, tuple(rows), tuple(videos), self._stall_s, "\n".join(shown))

    def _nothing_in_work(self) -> str:
        return (
            f"the pipeline stopped: no row for {self._stall_s:.0f} s, and no worker on any node has one in work; Ray "
            "has lost a task or cannot place a worker (see `ray status`). What was finished is committed, and the same "
            "command goes on"
        )


def _stuck(desks: Sequence[tuple[str, Desk]], for_s: float) -> list[tuple[str, Desk]]:
    """The workers to end: those of the last stage that holds a row for so long; the stages before may wait for it."""
    old = [(node, desk) for node, desk in desks if desk.stuck(for_s)]
    last = max((STAGES.index(desk.stage) for _, desk in old), default=None)
    return [(node, desk) for node, desk in old if STAGES.index(desk.stage) == last]


def _stacks_and_end(run_id: str, desk: Desk) -> str:
    shown = work.stacks(run_id, desk)
    work.kill(desk)
    return shown


def _ask(act: Callable[..., Any], node: str, *arguments: Any) -> Any:
    """The answer of a function on a node; None where the node does not answer."""
    asked = _task(act).options(scheduling_strategy=on(node)).remote(*arguments)
    try:
        return ray.get(asked, timeout=_PATIENCE_S)
    except RayError:
        return None


@functools.cache
def _task(act: Callable[..., Any]) -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(act)


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
