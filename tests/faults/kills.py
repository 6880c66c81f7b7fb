"""Seeded kills of everything that a run consists of, while rows are in flight, and the count of what came of them.

    python -m tests.faults.kills --per-point 10 --seed 0

A run over small videos is killed again and again, each time elsewhere: the driver at random moments and before each
operation of a commit, a driver that sleeps through the loss of its lease, nodes, workers and their child processes.
When a run gets through, its tables must be those of an undisturbed run; a reader looks for rows that stand twice all
the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qwen_ray
from jobs.conformance.assets import x264
from jobs.conformance.recipe import render
from qwen_ray import work
from qwen_ray.errors import QwenRayError
from tests.faults.driver import STEPS, num_rows_in_work
from tests.tables import content, duplicates, rows

NUM_VIDEOS, NUM_CLIPS = 40, 6
LEASE_TTL_S = 2.0
SETTINGS = (
    *("caption.engine=fake", "caption.model=slow:0.15", "caption.batch_size=4", "speech=null"),
    *("decode.window_s=0.5", "commit.every_s=0.3", f"commit.lease_ttl_s={LEASE_TTL_S}"),
)
COMMIT_POINTS = tuple(f"commit:{step}" for step in STEPS)
WORKER_POINTS = ("decode actor", "decode child", "engine actor", "engine child")
POINTS = ("driver", *COMMIT_POINTS, "zombie", *WORKER_POINTS, "node")
DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One that happened, and the rows that workers had at that moment."""

    point: str
    rows_in_flight: int
    videos_missing: int
    """Planned videos that were not in the tables yet."""


@dataclass(slots=True)
class Tally:
    """What happened, and what was wrong: `problems` is empty where every table came out right."""

    kills: list[Kill] = field(default_factory=list)
    outputs: int = 0
    looks: int = 0
    problems: list[str] = field(default_factory=list)

    def by_point(self) -> dict[str, list[Kill]]:
        """Kills of each point."""
        found: dict[str, list[Kill]] = defaultdict(list)
        for kill in self.kills:
            found[kill.point].append(kill)
        return dict(found)


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs read and write: folders or prefixes of a store."""

    source: str
    root: str
    address: str
    endpoint_url: str = ""

    def arguments(self, output: str) -> list[str]:
        """Those of `qwen-ray`."""
        command = ["run", self.source, output, "--preset", "tiny", "--address", self.address]
        for setting in SETTINGS:
            command += ["--set", setting]
        return [*command, *(["--endpoint-url", self.endpoint_url] if self.endpoint_url else [])]

    def num_videos(self, output: str) -> int:
        """Videos in the tables now."""
        return len(rows(output, "videos", self.endpoint_url, ["video_id"]))


class Nodes:
    """A cluster of two worker nodes on this machine, of which one can be killed and comes back."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=0)
        self._workers = [self._cluster.add_node(num_cpus=2) for _ in range(2)]
        self.address = self._cluster.address

    def kill_one(self) -> None:
        """SIGKILL to the raylet of one, and another in its place."""
        lost = self._workers.pop(0)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._workers.append(self._cluster.add_node(num_cpus=2))

    def stop(self) -> None:
        """End all of them."""
        self._cluster.shutdown()


class Driver:
    """A process that runs `qwen-ray`, perhaps with a fault armed, in a process group of its own."""

    def __init__(self, arguments: Sequence[str], fault: tuple[str, signal.Signals] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="driver-", ignore_cleanup_errors=True)
        self._note = Path(self._folder.name) / "note"
        armed = ["tests.faults.driver", str(self._note), fault[0], str(int(fault[1]))] if fault else ["qwen_ray"]
        with (Path(self._folder.name) / "said").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *armed, *arguments],
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    @property
    def said(self) -> str:
        """What it has written to standard error."""
        return (Path(self._folder.name) / "said").read_text()

    @property
    def runs(self) -> bool:
        """Whether it is not over."""
        return self._process.poll() is None

    def note(self) -> int | None:
        """Rows in flight when its own fault came; None while that has not."""
        try:
            return int(json.loads(self._note.read_text())["rows_in_flight"])
        except (FileNotFoundError, ValueError):
            return None

    def wait(self) -> int:
        """Its exit code; negative for a signal."""
        return self._process.wait(DEADLINE_S)

    def wait_for(self, moment: Callable[[], bool]) -> bool:
        """Wait until `moment`; False if it was over before."""
        deadline = time.monotonic() + DEADLINE_S
        while self.runs:
            if moment():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"the moment did not come in {DEADLINE_S:g} s:\n{self.said}")
            time.sleep(0.05)
        return False

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wake(self) -> None:
        """Go on after SIGSTOP."""
        os.kill(self._process.pid, signal.SIGCONT)


class Campaign:
    """Kills by a list of points, in an order that the seed settles, over as many outputs as it takes."""

    def __init__(self, place: Place, points: Sequence[str], seed: int, nodes: Nodes | None = None) -> None:
        self._place, self._nodes, self._random = place, nodes, random.Random(seed)
        self._left = list(points)
        self._random.shuffle(self._left)
        self._output = ""
        self.tally = Tally()

    def run(self) -> Tally:
        """Until every point has had its kill."""
        calm = f"{self._place.root}/calm"
        self._finish(calm)
        expected = content(calm, self._place.endpoint_url)
        if (len(expected["videos"]), len(expected["clips"])) != (NUM_VIDEOS, NUM_VIDEOS * NUM_CLIPS):
            raise AssertionError("the undisturbed run is not what it should be")
        most = 5 + 2 * len(self._left)
        while self._left:
            if self.tally.outputs == most:
                raise AssertionError(f"{most} outputs did not bring these moments: {self._left}")
            self._output = f"{self._place.root}/out-{self.tally.outputs}"
            with self._watched():
                while self._left and self._missing():
                    self._life()
                self._finish(self._output)
            self._compare(expected)
            self.tally.outputs += 1
        return self.tally

    def _missing(self) -> int:
        return NUM_VIDEOS - self._place.num_videos(self._output)

    def _finish(self, output: str) -> None:
        driver = Driver(self._place.arguments(output))
        if driver.wait():
            raise AssertionError(f"an undisturbed run failed:\n{driver.said}")

    def _life(self) -> None:
        """One driver, and the faults that it lives to see."""
        point = self._left.pop()
        if point == "zombie":
            self._zombie()
        elif point.startswith("commit:"):
            self._at_step(point)
        else:
            self._from_outside(point)

    def _at_step(self, point: str) -> None:
        driver = Driver(self._arguments, (point.partition(":")[2], signal.SIGKILL))
        driver.wait()
        self._count(point, driver.note())

    def _zombie(self) -> None:
        """A driver that falls asleep in the middle of a commit, and wakes when another has taken over."""
        zombie = Driver(self._arguments, (self._random.choice([*STEPS]), signal.SIGSTOP))
        if not zombie.wait_for(lambda: zombie.note() is not None):
            self._left.insert(0, "zombie")
            return
        missing = self._missing()
        time.sleep(LEASE_TTL_S + 1)  # that of the lease, by the store's clock
        other = Driver(self._arguments)
        other.wait_for(lambda: self._missing() < missing or not other.runs)
        zombie.wake()
        code = zombie.wait()
        if code != 2:
            self.tally.problems.append(f"zombie: exit code {code}, said:\n{zombie.said}")
        other.kill()
        self._count("zombie", zombie.note())

    def _from_outside(self, point: str) -> None:
        """Kills of the driver, of nodes and of workers, some time after the first rows are in work."""
        driver = Driver(self._arguments)
        while True:
            pause_s = time.monotonic() + self._random.uniform(0.0, 1.5)
            ready = driver.wait_for(lambda until=pause_s: time.monotonic() > until and num_rows_in_work() > 0)
            if not ready or not (in_flight := self._strike(point, driver)):
                break
            self._count(point, in_flight)
            following = next((p for p in reversed(self._left) if p in WORKER_POINTS), None)
            if point == "driver" or not following or not driver.runs:
                driver.kill()
                return
            self._left.remove(following)
            point = following
        self._left.insert(0, point)
        driver.kill()

    def _strike(self, point: str, driver: Driver) -> int:
        """Rows in flight at the kill; 0 if there was nothing to kill."""
        if point in WORKER_POINTS:
            return _kill_worker(point, self._random)
        in_flight = num_rows_in_work()
        if point == "driver":
            driver.kill()
        elif self._nodes is not None:
            self._nodes.kill_one()
        return in_flight

    def _count(self, point: str, in_flight: int | None) -> None:
        if in_flight is None:
            self._left.insert(0, point)  # the run was over before
        else:
            self.tally.kills.append(Kill(point, in_flight, self._missing()))
            print(f"{len(self.tally.kills)}: {point}, {in_flight} rows in flight", file=sys.stderr, flush=True)

    @property
    def _arguments(self) -> list[str]:
        return self._place.arguments(self._output)

    def _compare(self, expected: dict[str, list[tuple[Any, ...]]]) -> None:
        found = content(self._output, self._place.endpoint_url)
        for table, wanted in expected.items():
            if found[table] != wanted:
                lost, more = set(wanted) - set(found[table]), set(found[table]) - set(wanted)
                self.tally.problems.append(f"{self._output}: {table} lacks {sorted(lost)}, has {sorted(more)}")
        problems = qwen_ray.verify(self._output, endpoint_url=self._place.endpoint_url)
        self.tally.problems += [f"{self._output}: {problem}" for problem in problems]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Read all three tables all the time, as readers would, and keep every look that saw an id twice."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                with suppress(QwenRayError):  # a moto server drops a connection now and then under this load
                    twice = duplicates(self._output, self._place.endpoint_url)
                    self.tally.looks += 1
                    self.tally.problems += [f"seen twice: {twice}"] if any(twice.values()) else []

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _kill_worker(point: str, chance: random.Random) -> int:
    """SIGKILL to a worker that has rows, or to the process that it started; returns the rows it had."""
    stage = {"decode": "decode", "engine": "caption"}[point.partition(" ")[0]]
    desks = [desk for desk in work.desks(max(work.runs(), default="")) if desk.stage == stage]
    chance.shuffle(desks)
    for desk in desks:
        num_rows = sum(row != work.LOADING for row, _ in desk.rows)
        victims = [desk.pid] if point.endswith("actor") else _children(desk.pid)
        if num_rows and victims:
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return num_rows
    return 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def make_videos(folder: Path) -> None:
    """Small videos of six clips each, every clip different from every other."""
    for number in range(NUM_VIDEOS):
        render(folder / f"{number:02d}.mp4", num_frames=90, size=(160, 120), video=x264(), first=100 * number)


def show(tallies: dict[str, Tally]) -> None:
    """A table of kills by point and store, and what was wrong."""
    print(f"{'point':16} {'store':6} {'kills':>5}  {'rows in flight: least':>21} {'median':>6}  {'videos missing':>14}")
    for store, tally in tallies.items():
        for point in POINTS:
            kills = tally.by_point().get(point, [])
            if kills:
                flight = [kill.rows_in_flight for kill in kills]
                missing = statistics.median(kill.videos_missing for kill in kills)
                middle = statistics.median(flight)
                print(f"{point:16} {store:6} {len(kills):5}  {min(flight):21} {middle:6g}  {missing:14g}")
    for store, tally in tallies.items():
        print(f"{store}: {len(tally.kills)} kills, {tally.outputs} outputs, {tally.looks} looks at the tables")
        for problem in tally.problems:
            print(f"WRONG {problem}")


@contextmanager
def places(nodes: Nodes, folder: Path, stores: Sequence[str]) -> Iterator[dict[str, Place]]:
    """A place for runs on local disk, on an S3 server on loopback, or both."""
    from tests.s3 import serve_s3

    (folder / "in").mkdir()
    make_videos(folder / "in")
    with serve_s3() as server:
        bucket = server.new_bucket()
        for path in (folder / "in").iterdir():
            server.put(bucket, f"in/{path.name}", path.read_bytes())
        root = f"s3://{bucket}"
        known = {
            "local": Place(str(folder / "in"), str(folder), nodes.address),
            "s3": Place(f"{root}/in/", root, nodes.address, server.url),
        }
        yield {store: known[store] for store in stores}


def main() -> None:
    """Print the counts; exit code 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-point", type=int, default=10, help="kills of each point on each store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("local", "s3"), action="append", help="both by default")
    parser.add_argument("--point", choices=POINTS, action="append", help="all by default")
    asked = parser.parse_args()
    points = [point for point in asked.point or POINTS for _ in range(asked.per_point)]
    nodes = Nodes()
    tallies: dict[str, Tally] = {}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kills-") as folder,
            places(nodes, Path(folder), asked.store or ("local", "s3")) as found,
        ):
            for store, place in found.items():
                campaign = Campaign(place, points, asked.seed, nodes)
                tallies[store] = campaign.tally
                campaign.run()
    finally:
        show(tallies)
        nodes.stop()
    sys.exit(any(tally.problems for tally in tallies.values()))


if __name__ == "__main__":
    os.environ["RAY_AUTH_MODE"] = "disabled"  # drivers join from other processes
    main()
