"""The main path: planned inputs -> decode -> caption -> transcribe -> rows. Resources and pool sizes are decided here.

The product on one screen: `build` is the whole pipeline. Rows of every kind pass through every stage; a stage acts on
its own kind. The engine stages take one row per task and many tasks at once: a task that is run again can then
neither repeat nor lose a row, finished rows leave at once, and the engine makes its own batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.util.annotations import RayDeprecationWarning

from qwen_ray.config import CaptionConfig, JobConfig, SpeechConfig
from qwen_ray.engines.models import Model
from qwen_ray.errors import ConfigError
from qwen_ray.stages.caption import CaptionStage
from qwen_ray.stages.decode import TODO, DecodeStage
from qwen_ray.stages.rows import Row
from qwen_ray.stages.transcribe import TranscribeStage

CALLS_IN_FLIGHT = 2
"""Engine batches' worth of rows handed to an engine at once, so that the next batch is there when one is answered."""
MAX_TASK_RETRIES = 2
"""Times that a row is run again after its actor died; the actors themselves are restarted as often as it takes."""
LOST_SHARE = 0.01
"""Share of the inputs, at least `LEAST_LOST`, whose rows may get lost in a pass before the run stops."""
LEAST_LOST = 100


@dataclass(frozen=True, slots=True)
class Pool:
    """`size` actors, each with these shares."""

    size: int
    num_cpus: float
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Pools:
    """The actors of a run; a stage that is switched off has none."""

    decode: Pool
    caption: Pool | None
    speech: Pool | None


def build(
    todos: Sequence[Mapping[str, Any]],
    config: JobConfig,
    models: Mapping[str, Model],
    pools: Pools,
    *,
    careful: bool = False,
) -> Dataset:
    """The pipeline over rows of schema `decode.TODO`; nothing runs until it is iterated.

    When an engine's process dies, all rows in it are run again, and after `MAX_TASK_RETRIES` lost together. With
    `careful` an engine holds one row at a time, so that a row which kills it takes no other along.
    """
    blocks = _blocks(todos, pools.decode.size)
    rows = ray.data.from_arrow(blocks)
    rows = _stage(rows, DecodeStage, (config,), replace(pools.decode, size=min(pools.decode.size, len(blocks))))
    if config.caption is not None and pools.caption is not None:
        calls = 1 if careful else config.caption.batch_size * CALLS_IN_FLIGHT
        arguments = (config.caption, models["caption"])
        rows = _stage(rows, CaptionStage, arguments, pools.caption, calls=calls)
    if config.speech is not None and pools.speech is not None:
        batch_size = config.speech.batch_size if config.speech.engine == "whisper" else 1
        calls = 1 if careful else batch_size * CALLS_IN_FLIGHT
        rows = _stage(rows, TranscribeStage, (config.speech, models["speech"]), pools.speech, calls=calls)
    return rows


def build_summaries(
    rows: Sequence[Row], config: JobConfig, models: Mapping[str, Model], pools: Pools, *, careful: bool = False
) -> Dataset:
    """The second half of a run with summaries: rows of kind `summary` through the caption engines."""
    assert config.caption is not None
    assert pools.caption is not None
    calls = 1 if careful else config.caption.batch_size * CALLS_IN_FLIGHT
    blocks = ray.data.from_arrow([row.to_table() for row in rows])
    return _stage(blocks, CaptionStage, (config.caption, models["caption"]), pools.caption, calls=calls)


def execute(dataset: Dataset) -> Iterator[pa.Table]:
    """Rows of schema `rows.ROWS` as they are finished, in no order."""
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


def _stage(rows: Dataset, stage: type, arguments: tuple[Any, ...], pool: Pool, *, calls: int = 0) -> Dataset:
    with warnings.catch_warnings():
        # Ray 2.60 deprecates passing these two and has no other way to; left alone they are infinite, and an input
        # that kills its actor would be tried for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return _map(rows, stage, arguments, pool, calls)


def _map(rows: Dataset, stage: type, arguments: tuple[Any, ...], pool: Pool, calls: int) -> Dataset:
    engine = calls > 0
    threads: dict[str, Any] = {"max_concurrent_calls_per_actor": calls, "enable_true_multi_threading": True}
    return rows.map_batches(
        stage,
        fn_constructor_args=arguments,
        fn_constructor_kwargs={"cuda": pool.num_gpus > 0} if engine else {},
        batch_size=1,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=pool.size, **(threads if engine else {})),
        num_cpus=pool.num_cpus,
        num_gpus=pool.num_gpus,
        max_restarts=-1,
        max_task_retries=MAX_TASK_RETRIES,
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


def plan_pools(config: JobConfig, cluster: Mapping[str, float]) -> Pools:
    """Actors for what `cluster` has (`ray.cluster_resources()`).

    With GPUs, each holds as many pairs of engines as their shares allow; without, engines take about half of the
    cores. Decoders get the cores that are left. Where even one actor of each kind asks for more cores than there are,
    all shares shrink alike (Ray's cores are a budget, not a fence).

    Raises:
        ConfigError: a fixed number of replicas, or one engine of each kind, does not fit. Ray would wait for half an
        hour.
    """
    num_cpus, num_gpus = cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    if num_cpus <= 0:
        raise ConfigError("the cluster has no CPU cores: is any node up? (ray status)")
    caption = _engine_pool(config.caption, config, num_cpus, num_gpus)
    speech = _engine_pool(config.speech, config, num_cpus, num_gpus)
    _check_gpus(caption, speech, num_gpus)
    return _fit_cpus(config, caption, speech, num_cpus)


def _engine_pool(
    engine: CaptionConfig | SpeechConfig | None, config: JobConfig, num_cpus: float, num_gpus: float
) -> Pool | None:
    if engine is None:
        return None
    uses_gpu = num_gpus > 0 and engine.engine != "fake"
    if uses_gpu:
        shares = [part.num_gpus for part in (config.caption, config.speech) if part and part.engine != "fake"]
        automatic = int(num_gpus) * max(1, math.floor(1 / sum(shares) + 1e-9))
    else:
        automatic = max(1, int(num_cpus // 4))
    return Pool(engine.replicas or automatic, engine.num_cpus, engine.num_gpus if uses_gpu else 0.0)


def _check_gpus(caption: Pool | None, speech: Pool | None, num_gpus: float) -> None:
    """Place every engine on a GPU, as Ray must: shares that fit by their sum need not fit card by card."""
    pools = {name: pool for name, pool in (("caption", caption), ("speech", speech)) if pool and pool.num_gpus}
    left = [1.0] * int(num_gpus)
    for share in sorted((pool.num_gpus for pool in pools.values() for _ in range(pool.size)), reverse=True):
        home = next((card for card, free in enumerate(left) if free >= share - 1e-9), None)
        if home is None:
            asked = " + ".join(f"{name} {pool.size} x {pool.num_gpus:g}" for name, pool in pools.items())
            settings = ", ".join(f"{name}.num_gpus" for name in pools)
            needed = sum(pool.size * pool.num_gpus for pool in pools.values())
            raise ConfigError(
                f"{settings}: the engines ask for {needed:g} GPUs ({asked}), which do not fit on the cluster's "
                f"{num_gpus:g}; lower the shares or the replicas, or add GPUs"
            )
        left[home] -= share


def _fit_cpus(config: JobConfig, caption: Pool | None, speech: Pool | None, num_cpus: float) -> Pools:
    engines = [pool for pool in (caption, speech) if pool]
    taken = sum(pool.size * pool.num_cpus for pool in engines)
    decode = config.decode
    automatic = int((num_cpus - taken) / decode.num_cpus + 1e-9) if decode.num_cpus else int(num_cpus)
    size = decode.replicas or max(1, automatic)
    needed = taken + size * decode.num_cpus
    fixed = decode.replicas or any(part and part.replicas for part in (config.caption, config.speech))
    if fixed and needed > num_cpus + 1e-9:
        raise ConfigError(
            f"replicas: decode {size} x {decode.num_cpus:g} and engines ask for {needed:g} CPU cores and the cluster "
            f"has {num_cpus:g}; lower the replicas or num_cpus"
        )
    shrink = min(1.0, num_cpus / needed) if needed else 1.0

    def fitted(pool: Pool | None) -> Pool | None:
        return pool and Pool(pool.size, math.floor(pool.num_cpus * shrink * 100) / 100, pool.num_gpus)

    return Pools(Pool(size, math.floor(decode.num_cpus * shrink * 100) / 100), fitted(caption), fitted(speech))
