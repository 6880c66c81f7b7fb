"""What the command line and a notebook call: plain functions over paths, returning plain values."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_ray.config import JobConfig, StorageConfig, WeightsConfig, load_file, override, set_paths, to_dict
from qwen_ray.config import preset as preset_named
from qwen_ray.errors import ConfigError
from qwen_ray.io.lease import LEASE, read_lease
from qwen_ray.io.storage import Storage, canonical_uri, fetch, open_storage
from qwen_ray.prompts import Prompt, load_all

if TYPE_CHECKING:
    import pyarrow as pa

    from qwen_ray.engines.models import Model
    from qwen_ray.media.events import ClipFrames
    from qwen_ray.media.info import VideoInfo

SAMPLES = Path(__file__).parent / "assets" / "samples"
"""The sample videos of `qwen-ray demo`; `truth.json` beside them says what they show and say."""


def configure(
    input: str,
    output: str,
    *,
    preset: str = "",
    config: str = "",
    set: Sequence[str] = (),
    prompts: Sequence[str | Prompt] = (),
) -> JobConfig:
    """A run's whole configuration: a preset, a file laid over it, prompts, then single values (`caption.batch_size=8`).

    Raises:
        ConfigError: naming the field, what was found, what is allowed, and the nearest right name.
    """
    job = preset_named(preset) if preset else JobConfig()
    if config:
        job = override(job, load_file(config))
    if prompts:
        job = override(job, {"caption": {"prompts": [asdict(prompt) for prompt in load_all(prompts)]}})
    return dataclasses.replace(set_paths(job, list(set)), input=_absolute(input), output=_absolute(output))


def _absolute(path: str) -> str:
    """Local paths from the root, so that the configuration of a run means the same from any folder."""
    return path if not path or "://" in path else os.path.abspath(path)  # noqa: PTH100  links stay as they were given


def plan(job: JobConfig) -> dict[str, Any]:
    """What a run would do: inputs, how many of them by reason, and what is gone from the input."""
    from qwen_ray.runner import plan_run, prepare

    recipe = prepare(job)
    planned = plan_run(recipe, open_storage(job.output, job.storage))
    return {
        "input": job.input,
        "output": job.output,
        "num_inputs": len(recipe.listing.sources),
        "num_duplicates": recipe.listing.num_duplicates,
        "num_todo": len(planned.todo),
        "planned": dict(planned.counts),
        "num_vanished": len(planned.vanished),
        "max_video_tokens": recipe.config.decode.max_video_tokens,
        "models": {
            name: {"location": model.location, "revision": model.revision, "size_bytes": model.size_bytes}
            for name, model in recipe.models.items()
        },
        "fingerprints": asdict(recipe.fingerprints),
        "config": to_dict(recipe.config),
    }


def read_table(output: str, table: str, columns: list[str] | None = None, *, endpoint_url: str = "") -> pa.Table:
    """One of the tables `videos`, `clips`, `segments` of an output, or some of its columns."""
    from qwen_ray import tables

    return tables.read_table(_existing(output, endpoint_url), table, columns)


def status(output: str, endpoint_url: str = "") -> dict[str, Any]:
    """Counts by status and error, the newest run's report, and the holder of the output."""
    storage = _existing(output, endpoint_url)
    columns = ["status", "caption_status", "speech_status", "error_type", "num_clips", "num_segments", "vanished_at"]
    from qwen_ray import report, tables

    videos = tables.read_table(storage, "videos", columns)
    counts = {name: dict(Counter(videos.column(name).drop_null().to_pylist())) for name in columns[:4]}
    return {
        "output": output,
        "num_videos": videos.num_rows,
        "num_clips": sum(videos.column("num_clips").drop_null().to_pylist()),
        "num_segments": sum(videos.column("num_segments").drop_null().to_pylist()),
        "num_vanished": videos.num_rows - videos.column("vanished_at").null_count,
        **counts,
        "holder": _holder(storage),
        "last_report": report.last_report(storage),
    }


def verify(output: str, *, endpoint_url: str = "") -> list[dict[str, Any]]:
    """Broken promises of an output's tables; empty when all hold."""
    from qwen_ray.io import verify as checks

    return [asdict(problem) for problem in checks.verify(_existing(output, endpoint_url))]


def last_config(output: str, endpoint_url: str = "") -> dict[str, Any]:
    """The resolved configuration of the newest run of an output. Raises ConfigError when it has had none."""
    from qwen_ray import report

    values = report.last_config(_existing(output, endpoint_url))
    if values is None:
        raise ConfigError(f"{output}: no run has written here yet, so there is nothing to try again")
    return values | {"output": _absolute(output)}


def fetch_model(
    model: str,
    revision: str = "",
    *,
    endpoint_url: str = "",
    cache_dir: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Download a model into this machine's cache and verify it; there already, it is only verified.

    Args:
        model: a hub id, `s3://` prefix, folder or `builtin:NAME`.
        revision: as `caption.revision`.
        on_progress: called now and then with bytes ready and bytes in all.

    Returns:
        The model, its `location` the folder of its files.

    Raises:
        ConfigError: there is none, or a file is not what it must be.
        TransientError: the hub or store does not answer.
    """
    from qwen_ray.engines import models, weights

    settings = StorageConfig(endpoint_url=endpoint_url), WeightsConfig(cache_dir=cache_dir)
    found = models.resolve(model, revision, *settings)
    for ready_bytes in weights.fetch([found]):
        if on_progress is not None:
            on_progress(ready_bytes, found.size_bytes)
    return weights.local(found)


def probe(file: str, *, endpoint_url: str = "") -> VideoInfo:
    """Facts of one video file or object. Raises InputError when it is not a readable one."""
    from qwen_ray.media.probe import probe as probe_file

    with fetch(_one_file(file), "", StorageConfig(endpoint_url=endpoint_url)) as path:
        return probe_file(str(path))


def frames(file: str, start_s: float, end_s: float, job: JobConfig) -> ClipFrames:
    """The frames that the model would see of the clip [start_s, end_s) under `job.decode`, and their true times.

    Raises:
        InputError: the file is not readable, or no frame of the clip is.
        ConfigError: the clip is empty or lies outside the video, or this machine lacks the decoder asked for.
    """
    from qwen_ray.media.decode import decode_clip
    from qwen_ray.media.decoders import check_installed

    check_installed(job.decode)
    with fetch(_one_file(file), "", job.storage) as path:
        return decode_clip(str(path), start_s, end_s, job.decode)


def save_frames(file: str, start_s: float, end_s: float, directory: Path, job: JobConfig) -> list[Path]:
    """Write `frames` as PNG files in order, and `frames.json` with `frame_times_s`."""
    from PIL import Image

    clip = frames(file, start_s, end_s, job)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"frame-{k:03d}.png" for k in range(len(clip.frames_THWC))]
    for path, frame_HWC in zip(paths, clip.frames_THWC, strict=True):
        Image.fromarray(frame_HWC).save(path)
    facts = {
        "file": file,
        "start_s": clip.start_s,
        "end_s": clip.end_s,
        "frame_times_s": list(clip.frame_times_s),
        "num_frames_requested": clip.num_requested,
        "num_frames_decoded": clip.num_decoded,
        "num_repaired_frames": clip.num_repaired,
        "padded": clip.padded,
        "files": [path.name for path in paths],
    }
    (directory / "frames.json").write_text(json.dumps(facts, indent=2))
    return paths


class Captioner:
    """A caption engine in this process, to try prompts on single clips; it answers as a run with `job` would.

    Args:
        job: which model, and how clips are decoded.

    Raises:
        ConfigError: no such model, or none that the engine runs.
    """

    def __init__(self, job: JobConfig) -> None:
        from qwen_ray.engines import build
        from qwen_ray.stages.caption import CaptionStage

        if job.caption is None:
            raise ConfigError("caption = null: this configuration makes no captions")
        model = build.resolve(job.caption, job)
        build.check(model, job)
        self._job = job
        self._prompts = job.caption.prompts
        self._stage = CaptionStage(build.settle(job.caption, model), model, cuda=_has_cuda())

    def ask(
        self,
        file: str,
        start_s: float,
        end_s: float,
        prompts: Sequence[str | Prompt] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """What the model answers about the clip [start_s, end_s) of a file.

        Args:
            prompts: each a name, a file, a text or a `Prompt`; by default those of the job.
            metadata: values for the prompts' placeholders.

        Returns:
            One mapping per prompt with the fields of the column `answers` of the table `clips`.

        Raises:
            InputError: the file is not readable, or no frame of the clip is.
            ConfigError: a wrong prompt, or the clip is empty or lies outside the video.
        """
        from qwen_ray.stages.decode import clip_row

        row = clip_row(frames(file, start_s, end_s, self._job), metadata or {})
        return self._stage.answers(row, load_all(prompts) if prompts else self._prompts)

    def close(self) -> None:
        """Free the model."""
        self._stage.close()

    def __enter__(self) -> Captioner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def subtitles(output: str, directory: Path, endpoint_url: str = "") -> list[Path]:
    """Write one .srt file per video that has sound; returns their paths."""
    from qwen_ray.subtitles import write_subtitles

    return write_subtitles(_existing(output, endpoint_url), directory)


def _existing(output: str, endpoint_url: str) -> Storage:
    storage = open_storage(output, StorageConfig(endpoint_url=endpoint_url))
    runs = (entry for entry in storage.list("_runs/") if entry.key != LEASE)
    if next(iter(storage.list("videos/")), None) is None and next(runs, None) is None:
        raise ConfigError(f"{output}: no tables here; `qwen-ray run INPUT {output}` makes them")
    return storage


def _one_file(file: str) -> str:
    if "://" not in file and not Path(file).is_file():
        raise ConfigError(f"{file}: no such file")
    return canonical_uri(file)


def _holder(storage: Storage) -> str | None:
    """Who is writing, in words; None when nobody is."""
    found = read_lease(storage)
    if found is None or found[0].released:
        return None
    return found[0].describe(storage.age_s(LEASE))
