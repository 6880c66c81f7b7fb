"""A run from start to end: list, plan, execute, commit, report.

The loop is plan -> stream -> commit, repeated until nothing is left, so it does not matter in which order rows come,
how often a piece is run again, or where the last run was killed.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qwen_ray.assemble import Assembler
from qwen_ray.budget import Budget
from qwen_ray.cluster import connected, gather
from qwen_ray.committer import Committer
from qwen_ray.config import JobConfig, fingerprint
from qwen_ray.engines import build
from qwen_ray.engines.models import Model
from qwen_ray.errors import BudgetSpentError, ConfigError, EngineError, LeaseLostError, QwenRayError
from qwen_ray.io.commits import CommitLog
from qwen_ray.io.lease import Lease
from qwen_ray.io.ledger import Fingerprints, Ledger, Plan, Todo, mark_changes, plan
from qwen_ray.io.source import Listing, list_sources, look_up
from qwen_ray.io.storage import Storage, open_storage
from qwen_ray.media.decoders import check_installed
from qwen_ray.pools import Cluster, plan_pools
from qwen_ray.records import Finished, Identity
from qwen_ray.report import RunFolder, RunReport
from qwen_ray.stages.decode import todo_row
from qwen_ray.stages.rows import Row, read_rows
from qwen_ray.tables import read_table

if TYPE_CHECKING:
    from ray.data import Dataset

    from qwen_ray.pipeline import Room
    from qwen_ray.watchdog import Stall, Watchdog

PASSES = 2
"""Times that what is missing is run before it is recorded as lost."""
SUMMARY_ROUND = 5_000
"""Videos that are captioned before their summaries are made: a few hundred megabytes on the driver, and hours of work
beside the half minute that starting the engines again takes.
"""
FETCHING = "fetching weights"
"""The phase in which bytes are counted."""
TICK_S = 1.0
"""Longest time in seconds between two looks at the clock while no row comes."""


@dataclass(slots=True)
class Progress:
    """Counts of a run so far, by kind of row."""

    phase: str = "listing"
    videos_planned: int = 0
    videos: int = 0
    clips: int = 0
    speech: int = 0
    summaries: int = 0
    failed: int = 0
    bytes_ready: int = 0
    bytes_wanted: int = 0
    notes: list[str] = field(default_factory=list)
    """What people should know at once, such as stalls; in order."""

    def count(self, row: Row) -> None:
        """Add a row that came out of the pipeline."""
        if row.kind == "video":
            self.videos += 1
            self.failed += row.body["error"] is not None
        elif row.kind == "summary":
            self.summaries += 1
            self.failed += row.body.get("status") == "failed"
        elif row.kind == "clip":
            self.clips += 1
            self.failed += row.body.get("status") == "failed"
        else:
            self.speech += 1
            self.failed += row.body.get("status") == "failed"


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checked configuration with its models found and its input listed; no cluster has been touched."""

    config: JobConfig
    models: dict[str, Model]
    fingerprints: Fingerprints
    listing: Listing


def prepare(config: JobConfig, failed_in: Storage | None = None) -> Recipe:
    """Find the models and list the input; with `failed_in`, the inputs of that output which failed in whole or part.

    Raises:
        ConfigError: no such input or model.
    """
    if not config.input or not config.output:
        raise ConfigError("input and output: both are needed, such as: qwen-ray run ./videos ./out --preset tiny")
    check_installed(config.decode)
    components = {"caption": config.caption, "speech": config.speech}
    models = {name: build.resolve(part, config) for name, part in components.items() if part is not None}
    if config.caption is not None:
        build.check(models["caption"], config)
        config = dataclasses.replace(config, caption=build.settle(config.caption, models["caption"]))
    if failed_in is None:
        listing = list_sources(config.input, config.storage, config.limit)
    else:
        listing = look_up(_failed(failed_in), config.storage)
    prints = fingerprints(config, models)
    _check_metadata(prints.metadata, listing)
    return Recipe(config, models, prints, listing)


def _check_metadata(names: Sequence[str], listing: Listing) -> None:
    """Refuse a placeholder that no input has a value for: a wrong name would fail every clip."""
    for name in names:
        if not any(source.metadata.get(name) is not None for source in listing.sources):
            known = sorted({column for source in listing.sources for column in source.metadata})
            has = f"columns are {', '.join(known)}" if known else "this input is no manifest with columns"
            raise ConfigError(f"caption.prompts: {{{name}}} names no column of the input; {has}")


def _failed(storage: Storage) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in read_table(storage, "videos", ["uri", "metadata", "status", "vanished_at"]).to_pylist():
        if row["status"] != "ok" and row["vanished_at"] is None:
            yield row["uri"], json.loads(row["metadata"] or "{}")


def fingerprints(config: JobConfig, models: Mapping[str, Model]) -> Fingerprints:
    """What each component's rows depend on; None for one that is switched off."""
    caption = speech = None
    decode, metadata = "", ()  # type: str, tuple[str, ...]
    if config.caption is not None:
        decode = fingerprint(config.decode)
        caption = fingerprint(config.caption, models["caption"].revision)
        metadata = config.caption.metadata()
    if config.speech is not None:
        speech = fingerprint(config.speech, models["speech"].revision)
    return Fingerprints(decode=decode, caption=caption, speech=speech, metadata=metadata)


def plan_run(recipe: Recipe, storage: Storage, *, retry_all: bool = False) -> Plan:
    """Compare the input with what the output holds."""
    ledger = Ledger.load(storage)
    return plan(
        recipe.listing.sources,
        ledger,
        recipe.fingerprints,
        max_attempts=recipe.config.max_attempts,
        retry_all=retry_all,
        root=recipe.listing.root,
    )


def run(config: JobConfig, *, on_progress: OnProgress | None = None, retry: bool = False) -> RunReport:
    """Caption and transcribe `config.input` into the tables under `config.output`.

    Args:
        config: the whole description of the run.
        on_progress: called now and then with the counts so far.
        retry: instead of the input, take every video of the output that failed in whole or part, also those that are
            not retryable by themselves or have used up their attempts.

    Returns:
        Counts; `exit_code` 1 when more videos failed than `max_failed_fraction` allows.

    Raises:
        ConfigError: wrong configuration, input or output, or the output is held by another run (LeaseHeldError).
        LeaseLostError: another run took the output over; nothing of this run is half-written.
        EngineError: the pipeline stopped; what was finished is committed, and the same command goes on.
    """
    budget = Budget(config.budget)
    storage = open_storage(config.output, config.storage)
    recipe = prepare(config, storage if retry else None)
    identity = Identity(_new_run_id(), recipe.fingerprints)
    storage.check_writable()
    with Lease.acquire(storage, identity.run_id, config.commit.lease_ttl_s) as lease:
        log = CommitLog(storage, lease)
        log.recover()
        planned = plan_run(recipe, storage, retry_all=retry)
        report = _new_report(recipe, planned, identity)
        folder = RunFolder(storage, identity)
        for change in mark_changes(storage, planned, datetime.now(UTC)):
            log.commit([change])
        try:
            if planned.todo:
                output = _Output(storage, lease, log, folder)
                _Execution(recipe, identity, output, report, budget, on_progress or (lambda _: None)).run(planned.todo)
            else:
                folder.start(recipe.config)
            log.save_open(None)
            report.finished = True
        except BudgetSpentError as spent:
            report.stopped = str(spent)
        finally:
            report.elapsed_s, report.gpu_hours, report.cost = budget.spent()
            if not lease.lost.is_set():
                folder.finish(report)
    return report


@dataclass(frozen=True, slots=True)
class _Output:
    """Where a run writes."""

    storage: Storage
    lease: Lease
    log: CommitLog
    folder: RunFolder


class _Execution:
    """The part of a run that needs a cluster."""

    def __init__(
        self,
        recipe: Recipe,
        identity: Identity,
        output: _Output,
        report: RunReport,
        budget: Budget,
        on_progress: OnProgress,
    ) -> None:
        self._recipe, self._identity, self._output, self._report = recipe, identity, output, report
        self._budget = budget
        self._committer = Committer(output.log, output.storage, recipe.config.commit, self._committed)
        self._progress, self._on_progress = Progress(), on_progress

    def run(self, todos: list[Todo]) -> None:
        """Execute until every planned input is committed."""
        caption = self._recipe.config.caption
        assembler = Assembler(todos, self._identity, summaries=caption is not None and caption.summary is not None)
        saved = self._output.log.load_open()
        self._report.num_recovered_rows = assembler.load(saved) if saved else 0
        self._progress.videos_planned = len(todos)
        self._phase("starting Ray")
        with connected(self._recipe.config.address) as found, self._kept(assembler):
            cluster = self._gather(found)
            self._budget.runs_on(cluster)
            self._watchdog = self._watch(todos)
            pools = plan_pools(self._recipe.config, cluster)  # refuses before anything is written
            self._fetch_weights(todos, on_gpu=bool(pools.cards))
            self._output.folder.start(self._recipe.config)
            for part in _rounds(todos, assembler.summaries):
                for nth in range(PASSES):
                    self._one_pass(part, assembler, cluster, careful=nth > 0)
                    self._summary_pass(assembler, cluster, careful=nth > 0)
            assembler.give_up()
            self._phase("committing")
            self._committer.commit(assembler, everything=True)

    @contextmanager
    def _kept(self, assembler: Assembler) -> Iterator[None]:
        """Whatever ends the block early, Ctrl-C and failures alike: what is finished is committed, and only then the
        engines are ended, which takes seconds that whoever asked may not give.
        """
        try:
            yield
        except LeaseLostError:
            raise  # the output belongs to another run: not one more write
        except BaseException:
            with suppress(QwenRayError):  # the first error is the one to tell
                self._committer.commit(assembler, everything=True)
            raise

    def _fetch_weights(self, todos: list[Todo], *, on_gpu: bool) -> None:
        """Have the models on every node that may hold an engine, before an engine could fail for want of them."""
        from qwen_ray import prefetch

        wanted = _only_wanted(self._recipe.config, todos)
        models = [model for name, model in self._recipe.models.items() if getattr(wanted, name) is not None]
        self._progress.phase = FETCHING
        for ready in prefetch.fetch(models, on_gpu=on_gpu):
            self._progress.bytes_ready, self._progress.bytes_wanted = ready
            self._on_progress(self._progress)

    def _one_pass(self, part: list[Todo], assembler: Assembler, cluster: Cluster, *, careful: bool) -> None:
        """Decode, caption and transcribe what of `part` is not here yet."""
        from qwen_ray import pipeline

        todos = assembler.unfinished(part)
        if not todos:
            return
        config, models = _only_wanted(self._recipe.config, todos), self._recipe.models
        shown = self._identity.fingerprints.metadata
        rows = [todo_row(todo, *assembler.done_items(todo.source.video_id), shown) for todo in todos]
        with self._room(config, cluster, len(rows), careful=careful) as room:
            self._drain(pipeline.build(rows, config, models, room, careful=careful), assembler)

    def _summary_pass(self, assembler: Assembler, cluster: Cluster, *, careful: bool) -> None:
        """Merge the captions of the videos of which all else is here."""
        from qwen_ray import pipeline

        rows = assembler.to_summarise()
        if not rows:
            return
        config, models = dataclasses.replace(self._recipe.config, speech=None), self._recipe.models
        with self._room(config, cluster, len(rows), careful=careful) as room:
            self._drain(pipeline.build_summaries(rows, config, models, room, careful=careful), assembler)

    @contextmanager
    def _room(self, config: JobConfig, cluster: Cluster, num_rows: int, *, careful: bool) -> Iterator[Room]:
        """Actors planned, cards reserved, Ray Data set up."""
        from qwen_ray import pipeline  # imports ray, whose settings `connected` makes before it is imported

        pools = plan_pools(config, cluster)
        pipeline.configure(config, pools, cluster.object_store_bytes, num_rows, careful=careful)
        with pipeline.reserved(pools, self._identity.run_id) as room:
            yield room

    def _drain(self, dataset: Dataset, assembler: Assembler) -> None:
        """Take rows as they come, and commit now and then."""
        from qwen_ray import pipeline

        self._phase("loading models")
        self._watchdog.saw_rows()
        for table in _with_ticks(pipeline.execute(dataset)):
            if table is not None:
                self._watchdog.saw_rows()
            for row in read_rows(table) if table is not None else ():
                if assembler.add(row):
                    self._progress.phase = "running"
                    self._progress.count(row)
            if self._output.lease.lost.is_set():
                raise LeaseLostError(f"{self._recipe.config.output}: another run has taken over")
            self._committer.tick(assembler)
            self._on_progress(self._progress)
            self._budget.check()
            self._watchdog.look()

    def _gather(self, found: Cluster) -> Cluster:
        """The cluster with the GPUs that the configuration waits for."""
        config, cluster = self._recipe.config, found
        for cluster in gather(config.gpus, config.gpus_wait_s):
            self._phase(f"waiting for GPUs ({cluster.num_gpus} of {config.gpus})")
        return cluster

    def _watch(self, todos: list[Todo]) -> Watchdog:
        from qwen_ray.watchdog import Watchdog

        uris = {todo.source.video_id: todo.source.uri for todo in todos}
        return Watchdog(self._identity.run_id, self._recipe.config.stall_s, uris, self._stalled)

    def _stalled(self, stall: Stall) -> None:
        self._progress.notes.append(str(stall))
        self._report.stalls.append(str(stall))
        self._on_progress(self._progress)
        self._output.folder.write_stacks(stall.stacks)

    def _phase(self, name: str) -> None:
        self._progress.phase = name
        self._on_progress(self._progress)

    def _committed(self, finished: list[Finished]) -> None:
        self._report.count(finished)
        self._output.folder.add(finished)


def _rounds(todos: list[Todo], summaries: bool) -> Iterator[list[Todo]]:
    """All at once; with summaries, in rounds: a video waits in memory until its captions have been merged."""
    size = SUMMARY_ROUND if summaries else max(1, len(todos))
    for start in range(0, len(todos), size):
        yield todos[start : start + size]


def _with_ticks(tables: Iterator[pa.Table]) -> Iterator[pa.Table | None]:
    """The same tables, and None whenever none came for `TICK_S`, so that the clock is looked at even then."""
    arrived: queue.Queue[pa.Table | BaseException | None] = queue.Queue(maxsize=256)
    over = threading.Event()

    def hand_over(item: pa.Table | BaseException | None) -> None:
        while not over.is_set():
            with suppress(queue.Full):
                arrived.put(item, timeout=TICK_S)
                break

    def pull() -> None:
        try:
            for table in tables:
                hand_over(table)
                if over.is_set():
                    return
            hand_over(None)
        except BaseException as error:  # noqa: BLE001  handed to the caller's thread
            hand_over(error)

    threading.Thread(target=pull, name="rows", daemon=True).start()
    try:
        yield from _arriving(arrived)
    finally:
        over.set()


def _arriving(arrived: queue.Queue[pa.Table | BaseException | None]) -> Iterator[pa.Table | None]:
    while True:
        try:
            got = arrived.get(timeout=TICK_S)
        except queue.Empty:
            yield None
            continue
        if got is None:
            return
        if isinstance(got, BaseException):
            last_line = str(got).strip().rpartition("\n")[2]  # Ray's message is a traceback of several processes
            raise EngineError(f"the pipeline stopped: {type(got).__name__}: {last_line}") from got
        yield got


def _only_wanted(config: JobConfig, todos: list[Todo]) -> JobConfig:
    """The configuration without engines that nothing planned needs, so that they are not started."""
    caption = config.caption if any(todo.want_caption for todo in todos) else None
    speech = config.speech if any(todo.want_speech for todo in todos) else None
    return dataclasses.replace(config, caption=caption, speech=speech)


def _new_report(recipe: Recipe, planned: Plan, identity: Identity) -> RunReport:
    return RunReport(
        run_id=identity.run_id,
        output=recipe.config.output,
        num_inputs=len(recipe.listing.sources),
        num_duplicates=recipe.listing.num_duplicates,
        num_vanished=len(planned.vanished),
        num_returned=len(planned.returned),
        planned=dict(planned.counts),
        max_failed_fraction=recipe.config.max_failed_fraction,
    )


def _new_run_id() -> str:
    """Sorts by time; the random end keeps two runs of one second apart."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
