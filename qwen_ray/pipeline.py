"""The main path: planned inputs -> decode -> caption -> transcribe -> rows, on the actors that `pools` has planned.

The product on one screen: `build` is the whole pipeline. Rows of every kind pass through every stage; a stage acts on
its own kind. The engine stages take one row per task and many tasks at once: a task that is run again can then
neither repeat nor lose a row, finished rows leave at once, and the engine makes its own batches.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.exceptions import GetTimeoutError
from ray.util.annotations import RayDeprecationWarning
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qwen_ray.config import JobConfig
from qwen_ray.engines.models import Model
from qwen_ray.errors import ConfigError
from qwen_ray.pools import Pool, Pools
from qwen_ray.stages.caption import CaptionStage
from qwen_ray.stages.decode import TODO, DecodeStage
from qwen_ray.stages.rows import Row
from qwen_ray.stages.transcribe import TranscribeStage
from qwen_ray.work import Work

MORE_CALLS = 64
"""Rows handed to an engine beyond those that it answers at once, so that the next are there when one is answered."""
MAX_TASK_RETRIES = 2
"""Times that a row is run again after its actor died; the actors themselves are restarted as often as it takes."""
LOST_SHARE = 0.01
"""Share of the inputs, at least `LEAST_LOST`, whose rows may get lost in a pass before the run stops."""
LEAST_LOST = 100
RESERVE_S = 30.0
"""Longest wait for cards that the cluster has and something else still holds, such as the engines of a run before."""


@dataclass(frozen=True, slots=True)
class Room:
    """The actors of a run and the cards that are reserved for them; no reservation where no engine uses a GPU."""

    pools: Pools
    run_id: str
    group: PlacementGroup | None = None


@contextmanager
def reserved(pools: Pools, run_id: str) -> Iterator[Room]:
    """Hold the planned cards, each as one bundle of a placement group, until the actors on them are done.

    Raises:
        ConfigError: something else holds what the cluster has.
    """
    if not pools.cards:
        yield Room(pools, run_id)
        return
    bundles = [pools.shares(card) for card in pools.cards]
    group = placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=RESERVE_S)
        yield Room(pools, run_id, group)
    except GetTimeoutError:
        free = ray.available_resources()
        needed = ", ".join(f"{bundle['GPU']:g} GPU + {bundle['CPU']:g} CPU" for bundle in bundles)
        raise ConfigError(
            f"the cluster's GPUs are in use: the engines need {needed}, and {free.get('GPU', 0):g} GPU and "
            f"{free.get('CPU', 0):g} CPU are free after {RESERVE_S:g} s; wait for the other job, or see `ray status`"
        ) from None
    finally:
        remove_placement_group(group)


def build(
    todos: Sequence[Mapping[str, Any]],
    config: JobConfig,
    models: Mapping[str, Model],
    room: Room,
    *,
    careful: bool = False,
) -> Dataset:
    """The pipeline over rows of schema `decode.TODO`; nothing runs until it is iterated.

    When an engine's process dies, all rows in it are run again, and after `MAX_TASK_RETRIES` lost together. With
    `careful` an engine holds one row at a time, so that a row which kills it takes no other along.
    """
    decode = room.pools.decode
    blocks = _blocks(todos, decode.size)
    rows = _map(
        ray.data.from_arrow(blocks),
        DecodeStage,
        (config, Work(room.run_id, "decode")),
        replace(decode, size=min(decode.size, len(blocks))),
    )
    if config.caption is not None:
        rows = _caption(rows, config, models, room, careful=careful)
    if config.speech is not None:
        batch_size = config.speech.batch_size if config.speech.engine == "whisper" else 1
        calls = 1 if careful else batch_size + min(batch_size, MORE_CALLS)
        rows = _engines(rows, TranscribeStage, (config.speech, models["speech"]), "speech", room, calls)
    return rows


def build_summaries(
    rows: Sequence[Row], config: JobConfig, models: Mapping[str, Model], room: Room, *, careful: bool = False
) -> Dataset:
    """The second half of a run with summaries: rows of kind `summary` through the caption engines."""
    blocks = ray.data.from_arrow([row.to_table() for row in rows])
    return _caption(blocks, config, models, room, careful=careful)


def _caption(rows: Dataset, config: JobConfig, models: Mapping[str, Model], room: Room, *, careful: bool) -> Dataset:
    assert config.caption is not None
    calls = 1 if careful else config.caption.batch_size + min(config.caption.batch_size, MORE_CALLS)
    return _engines(rows, CaptionStage, (config.caption, models["caption"]), "caption", room, calls)


def execute(dataset: Dataset) -> Iterator[pa.Table]:
    """Rows of schema `rows.ROWS` as they are finished, in no order."""
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def _engines(rows: Dataset, stage: type, arguments: tuple[Any, ...], name: str, room: Room, calls: int) -> Dataset:
    """A stage of engines, each answering `calls` rows at once, on the cards that are reserved for them."""
    pool = dict(room.pools.engines())[name]
    return _map(
        rows,
        stage,
        (*arguments, Work(room.run_id, name)),
        pool,
        {"max_concurrent_calls_per_actor": calls, "enable_true_multi_threading": True},
        fn_constructor_kwargs={"cuda": pool.num_gpus > 0},
        ray_remote_args_fn=_pinned(room.group, room.pools.homes(name)) if pool.num_gpus else None,
    )


def _pinned(group: PlacementGroup | None, homes: Sequence[int]) -> Callable[[], dict[str, Any]]:
    """Where the next actor of a pool goes: one on each of its homes in turn.

    Ray Data asks once for each actor as it starts the pool, and later for other reasons too. By then every home but a
    dead actor's is full, so -1, which is wherever there is room, finds it.
    """
    turns = itertools.chain(homes, itertools.repeat(-1))

    def arguments() -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=next(turns))
        return {"scheduling_strategy": strategy}

    return arguments


def _map(
    rows: Dataset,
    stage: type,
    arguments: tuple[Any, ...],
    pool: Pool,
    threads: Mapping[str, Any] | None = None,
    **more: Any,
) -> Dataset:
    with warnings.catch_warnings():
        # Ray 2.60 deprecates passing remote arguments and has no other way to. Left alone, retries are infinite, and
        # an input that kills its actor would be tried for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return rows.map_batches(
            stage,
            fn_constructor_args=arguments,
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=pool.size, **(threads or {})),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
            max_restarts=-1,
            max_task_retries=MAX_TASK_RETRIES,
            **more,
        )


def _blocks(todos: Sequence[Mapping[str, Any]], num_decoders: int) -> list[pa.Table]:
    """Small blocks, a task each: the last videos then spread over all decoders, and a lost task repeats little."""
    size = max(1, min(16, len(todos) // (8 * num_decoders)))
    table = pa.Table.from_pylist(list(todos), schema=TODO)
    return [table.slice(start, size) for start in range(0, len(todos), size)]


def configure(
    config: JobConfig, pools: Pools, object_store_bytes: float, num_todos: int, *, careful: bool = False
) -> None:
    """Set Ray Data up for large rows: one row a block, a bound on bytes in flight, errors instead of endless waits."""
    context = DataContext.get_current()
    # A clip of a real model is larger than 1 MiB, so each is a block of its own and leaves alone; with `careful` even
    # the smallest row is, and what is lost with it is nothing else.
    context.target_max_block_size = 1 << 10 if careful else 1 << 20
    in_flight_bytes = min(_bytes_in_flight(config, pools), 0.4 * object_store_bytes)
    limits = context.execution_options.resource_limits
    context.execution_options.resource_limits = limits.copy(object_store_memory=in_flight_bytes)
    # By default a decode task hands over 2 blocks per scheduling step, about 13 a second, and the engine starves. More
    # are parked beside the bound above, so in a small store they must stay a part of it.
    parked_bytes = 4 * pools.decode.size * _clip_bytes(config)
    context._max_num_blocks_in_streaming_gen_buffer = max(2, min(8, int(in_flight_bytes // parked_bytes)))
    context.actor_init_retry_on_errors = True
    context.max_errored_blocks = max(LEAST_LOST, int(LOST_SHARE * num_todos))  # their rows are missed, and run again
    context.wait_for_min_actors_s = 600
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _bytes_in_flight(config: JobConfig, pools: Pools) -> float:
    """Twice what the engines and decoders hold when all are busy, at least 256 MiB."""
    engine_rows = pools.caption.size * config.caption.batch_size * 4 if config.caption and pools.caption else 0
    return max(256 << 20, 2.0 * _clip_bytes(config) * (engine_rows + 8 * pools.decode.size))


def _clip_bytes(config: JobConfig) -> int:
    return config.decode.num_frames * config.decode.max_pixels * 3
