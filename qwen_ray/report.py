"""What a run did: counts for people and machines, and the run's folder beside the tables."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from qwen_ray.config import JobConfig, to_dict
from qwen_ray.errors import RETRYABLE, ConfigError
from qwen_ray.io.storage import Storage
from qwen_ray.records import Finished, Identity

_PACKAGES = ("qwen-ray", "ray", "torch", "transformers", "av", "faster-whisper", "ctranslate2", "pyarrow", "numpy")


@dataclass(slots=True)
class RunReport:
    """Counts of one run. `planned` is by reason (new, changed, ...), the others by status or error type.

    `finished` is False where the run was stopped or failed; the counts are then of what it committed.
    """

    run_id: str
    output: str
    finished: bool = False
    num_inputs: int = 0
    num_duplicates: int = 0
    num_vanished: int = 0
    num_returned: int = 0
    planned: dict[str, int] = field(default_factory=dict)
    videos: dict[str, int] = field(default_factory=dict)
    clips: dict[str, int] = field(default_factory=dict)
    num_segments: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    num_recovered_rows: int = 0
    max_failed_fraction: float = 1.0
    elapsed_s: float = 0.0
    gpu_hours: float = 0.0
    """Hours of the GPUs that the cluster had while the run lasted."""
    cost: float = 0.0
    """By the prices of the configuration."""
    stalls: list[str] = field(default_factory=list)
    """What was stuck, and ended to be tried again."""
    stopped: str = ""
    """Which budget ended the run before all was done."""

    @property
    def failed_fraction(self) -> float:
        """Failed videos of those this run finished; 0 when it finished none."""
        total = sum(self.videos.values())
        return self.videos.get("failed", 0) / total if total else 0.0

    @property
    def exit_code(self) -> int:
        """0 done, 1 more failures than `max_failed_fraction` allows, 3 stopped by its budget."""
        failed = int(self.failed_fraction > self.max_failed_fraction)
        return 3 if self.stopped and not failed else failed

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in `report.json`."""
        return asdict(self) | {"failed_fraction": self.failed_fraction, "exit_code": self.exit_code}

    def count(self, finished: Iterable[Finished]) -> None:
        """Add committed videos."""
        videos, clips, errors = Counter(self.videos), Counter(self.clips), Counter(self.errors)
        for one in finished:
            videos[one.video["status"]] += 1
            clips.update(clip["status"] for clip in one.clips)
            self.num_segments += len(one.segments)
            if one.video["error_type"]:
                errors[one.video["error_type"]] += 1
        self.videos, self.clips, self.errors = dict(videos), dict(clips), dict(errors)


class RunFolder:
    """`_runs/<run_id>/`: resolved configuration, versions, report, and the inputs that failed."""

    def __init__(self, storage: Storage, identity: Identity) -> None:
        self._storage = storage
        self._prefix = f"_runs/{identity.run_id}"
        self._identity = identity
        self._started = False
        self._num_stalls = 0
        self._dead_letters: list[dict[str, Any]] = []

    def start(self, config: JobConfig) -> None:
        """Write what is known before the first row."""
        self._started = True
        self._write("config.json", to_dict(config))
        self._write("versions.json", versions() | {"fingerprints": asdict(self._identity.fingerprints)})

    def add(self, finished: Iterable[Finished]) -> None:
        """Remember the failures among committed videos."""
        for one in finished:
            if one.video["error_type"]:
                names = ("video_id", "uri", "version", "status", "error_type", "error_message", "attempts")
                letter = {name: one.video[name] for name in names}
                self._dead_letters.append(letter | {"retryable": RETRYABLE.get(one.video["error_type"], False)})

    def write_stacks(self, stacks: str) -> None:
        """Keep where the threads of stuck workers were: `stall-1.txt`, `stall-2.txt`, ..."""
        self._num_stalls += 1
        self._storage.write(f"{self._prefix}/stall-{self._num_stalls}.txt", stacks.encode())

    def finish(self, report: RunReport) -> None:
        """Write the report and the dead letters, unless the run never started."""
        if not self._started:
            return
        lines = "".join(json.dumps(letter, ensure_ascii=False) + "\n" for letter in self._dead_letters)
        self._storage.write(f"{self._prefix}/dead_letters.jsonl", lines.encode())
        self._write("report.json", report.to_dict())

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._storage.write(f"{self._prefix}/{name}", json.dumps(value, indent=2, default=str).encode())


def versions() -> dict[str, str]:
    """Versions of what makes the rows."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def last_config(storage: Storage) -> dict[str, Any] | None:
    """The resolved configuration of the newest run, or None. Raises ConfigError if it is damaged."""
    return _newest(storage, "config.json")


def last_report(storage: Storage) -> dict[str, Any] | None:
    """The newest report, or None. Raises ConfigError if it is damaged."""
    return _newest(storage, "report.json")


def _newest(storage: Storage, name: str) -> dict[str, Any] | None:
    """Run ids sort by time."""
    keys = sorted(entry.key for entry in storage.list("_runs/") if entry.key.endswith(f"/{name}"))
    if not keys:
        return None
    try:
        values: dict[str, Any] = json.loads(storage.read(keys[-1]).data)
    except ValueError as error:
        raise ConfigError(f"{storage.uri}/{keys[-1]}: not JSON ({error}); delete it, or mend it") from None
    return values
