"""`qwen-ray` that dies or falls asleep in its commits: `python -m tests.faults.driver NOTE STEP SIGNAL ARGS`.

A step is an operation on the output's storage, seen by Python's audit events: a rename, link or removal on disk, a
request to S3. Nothing of the product is replaced. The signal comes right before the operation and while workers have
rows; NOTE then says how many.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from qwen_ray import cli, work

STEPS = {
    "lease": r"(PUT|link|rename) .*_runs/_lease\.json",
    "record": r"(PUT|link) .*_commits/\d+-\d+\.arrow",
    "clips": r"(PUT|link|rename) .*clips/part-[^/]*\.parquet",
    "segments": r"(PUT|link|rename) .*segments/part-[^/]*\.parquet",
    "videos": r"(PUT|link|rename) .*videos/part-[^/]*\.parquet",
    "delete": r"(DELETE|remove) .*_commits/\d+-\d+\.arrow",
    "open": r"(PUT|link|rename|DELETE|remove) .*_commits/open\.arrow",
}
"""In the order of a commit: the process ends after what is above a step and before what it names."""


class Fault:
    """An audit hook that ends this process once."""

    def __init__(self, note: Path, step: str, number: signal.Signals) -> None:
        self._note, self._pattern, self._number = note, re.compile(STEPS[step]), number
        self._done = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self._done or not (operation := _operation(event, args)) or not self._pattern.match(operation):
            return
        rows = num_rows_in_work()
        if rows:
            self._done = True
            self._note.write_text(json.dumps({"operation": operation, "rows_in_flight": rows}))
            os.kill(os.getpid(), self._number)


def num_rows_in_work() -> int:
    """Rows that workers of the newest run on this machine have at this moment."""
    run_id = max(work.runs(), default="")
    return sum(row != work.LOADING for desk in work.desks(run_id) for row, _ in desk.rows)


def _operation(event: str, args: tuple[Any, ...]) -> str:
    """Method and target of a storage operation; empty for anything else."""
    if event in ("os.link", "os.rename"):
        return f"{event.removeprefix('os.')} {os.fsdecode(args[1])}"
    if event == "os.remove":
        return f"remove {os.fsdecode(args[0])}"
    if event == "http.client.send" and isinstance(args[1], bytes):
        return args[1].partition(b" HTTP/1.1\r\n")[0][:500].decode(errors="replace")
    return ""


def main() -> None:
    """Arm the fault, then be `qwen-ray`."""
    note, step, number, *arguments = sys.argv[1:]
    sys.addaudithook(Fault(Path(note), step, signal.Signals(int(number))))
    cli.main(arguments=arguments)


if __name__ == "__main__":
    main()
