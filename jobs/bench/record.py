"""Where a measurement is kept, and what must stand beside its figures."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qwen_ray.report import versions

RESULTS = Path(__file__).parent / "results"


def about(what: str, module: str, commit: str = "") -> dict[str, Any]:
    """What was measured, and with which command, code, versions and machine.

    Args:
        what: in words.
        module: that was run; its arguments are this process's.
        commit: of the code, where it is no git checkout.
    """
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    return {
        "what": what,
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "commit": commit or subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "versions": versions(),
    }


def path_of(name: str, folder: Path = RESULTS) -> Path:
    """The dated file of a result."""
    return folder / f"{datetime.now(UTC):%Y-%m-%d}-{name}.json"
