"""The complete description of a run: frozen dataclasses, nested by component, and the presets that fill them.

A run is Python returning a whole `JobConfig`; files and flags override single values by path (`caption.batch_size=8`).
Values are checked when a dataclass is built, before any cluster is touched. Fields marked `speed` change how fast a row
is made but not what stands in it, so they stay out of the fingerprints.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from qwen_ray import prompts
from qwen_ray.errors import ConfigError
from qwen_ray.prompts import Prompt

T = TypeVar("T")


def speed(default: T) -> T:
    """A field that changes only speed or placement, never the content of a row."""
    return field(default=default, metadata={"speed": True})


def _check(ok: bool, path: str, found: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{path} = {found!r}: allowed is {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """From a file to clips of frames."""

    windows: Literal["fixed", "shots"] = "fixed"
    """How a video is cut into clips: every `window_s` seconds, or where its picture cuts to another."""
    window_s: float = 12.0
    """Length of a clip in seconds; the last one may be shorter. With shots, the longest clip: a longer shot is cut into
    equal parts.
    """
    min_window_s: float = 1.0
    """Length in seconds of the shortest clip that a shot makes; a shorter shot joins the one before it."""
    sampling: Literal["uniform", "fps", "keyframes", "motion"] = "uniform"
    """Which frames of a clip are taken: `uniform`, `num_frames` evenly spaced in time; `fps`, so many a second;
    `keyframes`, those that the file stores whole; `motion`, more where the picture moves.
    """
    num_frames: int = 16
    """Most frames of a clip, and so most tokens; a clip with fewer different ones gives those."""
    fps: float = 2.0
    """Frames a second with `sampling=fps`; lower where a clip would take more than `num_frames`."""
    min_pixels: int = 4 * 28 * 28
    """Fewest pixels of a frame after resizing."""
    max_pixels: int = 360 * 640
    """Most pixels of a frame after resizing."""
    size_multiple: int = 28
    """Height and width are multiples of this: the model's patch size times its spatial merge."""
    max_repaired: float = 0.5
    """Largest share of a clip's frames that may be built on damaged data; a clip with more fails."""
    decoder: Literal["auto", "pyav", "ffmpeg", "torchcodec", "decord"] = "auto"
    """What decodes pictures. `auto` is `pyav`, and the `ffmpeg` command, where there is one, for a file of which that
    cannot decode a single picture; the others are for comparison and must be installed. Rows record which it was.
    """
    deadline_s: float = speed(120.0)
    """Longest time in seconds that a decoder may go without a sign of life before it is killed."""
    file_deadline_s: float = speed(7200.0)
    """Longest time in seconds that a decoder may work on one file, waiting for the models not counted."""
    memory_gb: float = speed(4.0)
    """Most memory of a decoding process, in units of 2**30 bytes; 0 is no bound."""
    num_cpus: float = speed(1.0)
    """CPU cores that each decode actor asks of Ray."""
    replicas: int = speed(0)
    """Decode actors; 0 sizes the pool from the cluster."""

    def __post_init__(self) -> None:
        _check(0 < self.window_s < math.inf, "decode.window_s", self.window_s, "more than 0 seconds")
        _check(self.num_frames >= 2, "decode.num_frames", self.num_frames, "2 or more")
        _check(
            self.size_multiple in (28, 32),
            "decode.size_multiple",
            self.size_multiple,
            "28 (Qwen2.5-VL) or 32 (Qwen3-VL)",
        )
        smallest = self.size_multiple**2
        _check(smallest <= self.min_pixels, "decode.min_pixels", self.min_pixels, f"{smallest} or more")
        _check(
            self.min_pixels <= self.max_pixels,
            "decode.max_pixels",
            self.max_pixels,
            f"min_pixels ({self.min_pixels}) or more",
        )
        for name in ("fps", "deadline_s", "file_deadline_s"):
            value = getattr(self, name)
            _check(0 < value < math.inf, f"decode.{name}", value, "more than 0")
        fits = 0 <= self.min_window_s <= self.window_s or self.windows == "fixed"
        _check(fits, "decode.min_window_s", self.min_window_s, f"0 to window_s ({self.window_s:g} s)")
        _check(0 <= self.max_repaired <= 1, "decode.max_repaired", self.max_repaired, "a share, 0 to 1")
        _check(self.memory_gb >= 0, "decode.memory_gb", self.memory_gb, "0 (no bound) or more")
        _check(self.num_cpus >= 0, "decode.num_cpus", self.num_cpus, "0 or more")
        _check(self.replicas >= 0, "decode.replicas", self.replicas, "0 (automatic) or more")

    @property
    def max_video_tokens(self) -> int:
        """Most tokens that the frames of one clip become, known before anything is decoded: a patch of the merged grid
        for each pair of frames. Qwen3-VL's timestamps come on top, about ten a pair.
        """
        return math.ceil(self.num_frames / 2) * (self.max_pixels // self.size_multiple**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionConfig:
    """From a clip's frames to its caption."""

    engine: Literal["qwen_vl", "fake"] = "qwen_vl"
    """Which engine answers: `qwen_vl`, or `fake` (instant, deterministic, for tests of everything around it)."""
    model: str = "builtin:tiny-qwen2.5-vl"
    """Checkpoint directory, `s3://` prefix, hub id, or `builtin:NAME` for one that ships with the package."""
    revision: str = speed("")
    """Hub branch, tag or commit, empty for the default branch; of a folder or prefix, the revision that it must have.
    What it resolves to is recorded with every row and decides whether a row is up to date.
    """
    prompts: tuple[Prompt, ...] = (Prompt(name="describe", text="Describe the video."),)
    """What the model is asked about each clip. The first answer is the clip's caption; all of them are in `answers`."""
    summary: Prompt | None = None
    """How a video's captions are merged into one; null for no summary."""
    max_new_tokens: int = 128
    """Most tokens of one caption."""
    temperature: float | None = None
    """0 decodes greedily; above, samples; null takes the checkpoint's own, as with the next three."""
    top_p: float | None = None
    """Nucleus sampling bound, used when temperature > 0; 1 is none."""
    top_k: int | None = None
    """Tokens to sample from, used when temperature > 0; 0 is all."""
    repetition_penalty: float | None = None
    """1 is none."""
    seed: int = 0
    """Seed of sampling; a clip's draw depends on it and on the clip's id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto`: bfloat16 on CUDA, float32 on CPU."""
    batch_size: int = speed(8)
    """Most clips that are answered at once."""
    reuse: bool = speed(True)
    """Compute what prompts have in common once: the same clip under several prompts is read once."""
    compile: bool = speed(True)
    """Compile the model and record its steps, on a GPU; without, an engine starts sooner and answers more slowly."""
    num_gpus: float = speed(0.7)
    """Share of a GPU, or number of GPUs, of each engine; ignored on a cluster without GPUs."""
    num_cpus: float = speed(1.0)
    """CPU cores of each engine, also its thread count, where there is no GPU."""
    replicas: int = speed(0)
    """Engines; 0 sizes the pool from the cluster."""

    def __post_init__(self) -> None:
        _check(bool(self.model), "caption.model", self.model, "a checkpoint directory, hub id or builtin:NAME")
        names = [prompt.name for prompt in self.prompts]
        _check(bool(names) and len(set(names)) == len(names), "caption.prompts", names, "one or more, each name once")
        prompts.check_placeholders(self.prompts, self.summary)
        _check(self.max_new_tokens >= 1, "caption.max_new_tokens", self.max_new_tokens, "1 or more")
        self._check_sampling()
        _check(self.batch_size >= 1, "caption.batch_size", self.batch_size, "1 or more")
        whole = self.num_gpus <= 1 or self.num_gpus == int(self.num_gpus)
        allowed = "a share of one GPU, or a whole number of them (CPU-only clusters ignore it)"
        _check(self.num_gpus > 0 and whole, "caption.num_gpus", self.num_gpus, allowed)
        _check(self.num_cpus > 0, "caption.num_cpus", self.num_cpus, "more than 0")
        _check(self.replicas >= 0, "caption.replicas", self.replicas, "0 (automatic) or more")

    def metadata(self) -> tuple[str, ...]:
        """Columns of the manifest that the prompts show to the model, in order of their names."""
        asked = (*self.prompts, *([self.summary] if self.summary else []))
        names = {name for prompt in asked for name in prompt.placeholders()}
        return tuple(sorted(names - prompts.RESERVED.keys()))

    def _check_sampling(self) -> None:
        """Each value, where it is given."""
        greedy, top_p, top_k, penalty = self.temperature, self.top_p, self.top_k, self.repetition_penalty
        for name, value, fits, allowed in (
            ("temperature", greedy, greedy is None or greedy >= 0, "0 (greedy) or more"),
            ("top_p", top_p, top_p is None or 0 < top_p <= 1, "more than 0, at most 1"),
            ("top_k", top_k, top_k is None or top_k >= 0, "0 (all) or more"),
            ("repetition_penalty", penalty, penalty is None or penalty > 0, "more than 0"),
        ):
            _check(fits, f"caption.{name}", value, f"{allowed}, or null for the checkpoint's own")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechConfig:
    """From a video's sound to its transcript."""

    engine: Literal["faster_whisper", "whisper", "fake"] = "faster_whisper"
    """Which engine transcribes: `faster_whisper` (CTranslate2; fastest on a CPU, needs CUDA 12 on a GPU), `whisper`
    (transformers; any CUDA that torch runs on, batches over videos), or `fake`.
    """
    model: str = "builtin:whisper-tiny.en"
    """Whisper: a size such as `large-v3-turbo`, a directory, an `s3://` prefix, a hub id, or `builtin:NAME`; in
    CTranslate2 form for `faster_whisper`, in transformers form for `whisper`.
    """
    revision: str = speed("")
    """As `caption.revision`."""
    language: str = ""
    """ISO 639-1 code such as `en`; empty detects it."""
    beam_size: int = 5
    """Beams of the decoder; 1 is greedy, which takes `whisper` a fraction of the time and memory."""
    max_new_tokens: int = 0
    """Most tokens that the model writes about a chunk in one go; 0 leaves Whisper's own bound, 448 with its prompt."""
    vad_threshold: float = 0.5
    """Speech probability from which a moment counts as speech, 0 to 1."""
    min_silence_s: float = 0.5
    """A pause of at least this many seconds ends a stretch of speech."""
    chunk_s: float = 30.0
    """Longest stretch handed to the model at once, cut at pauses; Whisper's own window is 30 s."""
    batch_size: int = speed(8)
    """Most chunks in one model call of `whisper`; `faster_whisper` takes them one by one."""
    num_gpus: float = speed(0.25)
    """GPU share of each engine; ignored on a cluster without GPUs."""
    num_cpus: float = speed(1.0)
    """CPU cores of each engine, also its thread count, where there is no GPU."""
    replicas: int = speed(0)
    """Engines; 0 sizes the pool from the cluster."""

    def __post_init__(self) -> None:
        _check(bool(self.model), "speech.model", self.model, "a directory, size, hub id or builtin:NAME")
        code = self.language
        is_code = code == "" or (code.isascii() and code.isalpha() and code.islower() and len(code) in (2, 3))
        _check(is_code, "speech.language", code, "a code such as en, or empty to detect it")
        _check(self.beam_size >= 1, "speech.beam_size", self.beam_size, "1 or more")
        _check(
            0 <= self.max_new_tokens <= 440, "speech.max_new_tokens", self.max_new_tokens, "0 (Whisper's own) to 440"
        )
        _check(self.batch_size >= 1, "speech.batch_size", self.batch_size, "1 or more")
        _check(0 < self.vad_threshold < 1, "speech.vad_threshold", self.vad_threshold, "between 0 and 1")
        _check(self.min_silence_s > 0, "speech.min_silence_s", self.min_silence_s, "more than 0 seconds")
        _check(1 <= self.chunk_s <= 30, "speech.chunk_s", self.chunk_s, "1 to 30 seconds")
        _check(
            0 <= self.num_gpus <= 1, "speech.num_gpus", self.num_gpus, "0 (on CPU) to 1 (CPU-only clusters ignore it)"
        )
        _check(self.num_cpus > 0, "speech.num_cpus", self.num_cpus, "more than 0")
        _check(self.replicas >= 0, "speech.replicas", self.replicas, "0 (automatic) or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """How object storage is reached; credentials come from the usual AWS variables, files or roles."""

    endpoint_url: str = speed("")
    """S3 endpoint, for stores other than AWS; empty for AWS."""
    max_attempts: int = speed(5)
    """Tries of one storage call before it counts as failed."""

    def __post_init__(self) -> None:
        _check(self.max_attempts >= 1, "storage.max_attempts", self.max_attempts, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig:
    """How a node comes by the models."""

    cache_dir: str = speed("")
    """Folder on every node for all that is downloaded. Empty: the folder in QWEN_RAY_CACHE, else ~/.cache/qwen_ray, and
    for the hub the cache of its own client."""
    offline: bool = speed(False)
    """Take models from folders and caches alone, and ask no hub or store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitConfig:
    """When finished rows become visible, and who may write."""

    every_s: float = speed(60.0)
    """Seconds between commits: the most work that a crash can cost."""
    max_bytes: int = speed(64 << 20)
    """Bytes of finished rows that force a commit earlier."""
    lease_ttl_s: float = speed(60.0)
    """A holder whose heartbeat is older than this is taken to be dead."""

    def __post_init__(self) -> None:
        _check(self.every_s > 0, "commit.every_s", self.every_s, "more than 0 seconds")
        _check(self.max_bytes > 0, "commit.max_bytes", self.max_bytes, "more than 0 bytes")
        _check(self.lease_ttl_s >= 1, "commit.lease_ttl_s", self.lease_ttl_s, "1 second or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """How long a run may go on and what it may cost. A run that stops has committed what it finished."""

    max_hours: float = speed(0.0)
    """Hours from the start after which the run stops; 0 is no bound."""
    max_cost: float = speed(0.0)
    """Cost, in the currency of the prices, after which the run stops; 0 is no bound."""
    gpu_hour_price: float = speed(0.0)
    """Price of an hour of each GPU that the cluster has while the run lasts."""
    cpu_hour_price: float = speed(0.0)
    """Price of an hour of each CPU core, likewise; 0 where a GPU's price includes them."""

    def __post_init__(self) -> None:
        for name in ("max_hours", "max_cost", "gpu_hour_price", "cpu_hour_price"):
            value = getattr(self, name)
            _check(0 <= value < math.inf, f"budget.{name}", value, "0 or more")
        priced = self.gpu_hour_price > 0 or self.cpu_hour_price > 0
        allowed = "0, unless budget.gpu_hour_price or budget.cpu_hour_price says what an hour costs"
        _check(self.max_cost == 0 or priced, "budget.max_cost", self.max_cost, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A whole run."""

    input: str = speed("")
    """File, folder, glob, `s3://` prefix, or a CSV, JSONL or Parquet manifest with a `uri` column."""
    output: str = speed("")
    """Folder or `s3://` prefix that holds the tables."""
    preset: str = speed("custom")
    """Name of the preset this configuration started from."""
    address: str = speed("")
    """Ray cluster to join; empty starts a private one on this machine."""
    gpus: int = speed(0)
    """GPUs to wait for before the run is planned, asked of Ray's autoscaler if there is one; 0 takes what is there."""
    gpus_wait_s: float = speed(900.0)
    """Longest wait in seconds for them."""
    stall_s: float = speed(1800.0)
    """Seconds without a finished row after which what has held a row for so long is ended and tried again."""
    limit: int = speed(0)
    """Most inputs to take, in listing order; 0 for all."""
    max_failed_fraction: float = speed(0.1)
    """Exit code 1 when more than this fraction of the run's videos failed."""
    max_attempts: int = speed(3)
    """Runs that try a failed, retryable video again before leaving it alone."""
    decode: DecodeConfig = DecodeConfig()
    """Frames."""
    caption: CaptionConfig | None = CaptionConfig()
    """Captions; null for none."""
    speech: SpeechConfig | None = SpeechConfig()
    """Transcripts; null for none."""
    storage: StorageConfig = StorageConfig()
    """Object storage."""
    weights: WeightsConfig = WeightsConfig()
    """Downloads of models."""
    commit: CommitConfig = CommitConfig()
    """Commits."""
    budget: BudgetConfig = BudgetConfig()
    """When to stop, whatever is left."""

    def __post_init__(self) -> None:
        _check(self.limit >= 0, "limit", self.limit, "0 (all) or more")
        _check(self.gpus >= 0, "gpus", self.gpus, "0 (what is there) or more")
        _check(self.gpus_wait_s >= 0, "gpus_wait_s", self.gpus_wait_s, "0 or more seconds")
        _check(self.stall_s >= 1, "stall_s", self.stall_s, "1 second or more")
        _check(0 <= self.max_failed_fraction <= 1, "max_failed_fraction", self.max_failed_fraction, "0 to 1")
        _check(self.max_attempts >= 1, "max_attempts", self.max_attempts, "1 or more")
        _check(
            self.caption is not None or self.speech is not None, "caption and speech", None, "at least one of the two"
        )


def _tiny(model: str, decode: DecodeConfig) -> JobConfig:
    """A model of 6 million parameters that ships with the package, and Whisper tiny.en: runs anywhere, sees only
    shapes.
    """
    return JobConfig(
        decode=decode,
        caption=CaptionConfig(model=f"builtin:{model}", max_new_tokens=48, num_gpus=0.1, num_cpus=0.5),
        speech=SpeechConfig(model="builtin:whisper-tiny.en", language="en", num_gpus=0.1, num_cpus=0.5),
    )


_QWEN2_5 = DecodeConfig(window_s=12.0, num_frames=16, min_pixels=4 * 28**2, max_pixels=360 * 640, size_multiple=28)
_QWEN3 = DecodeConfig(window_s=12.0, num_frames=16, min_pixels=4 * 32**2, max_pixels=360 * 640, size_multiple=32)
"""16 frames of about 360p in 12 s: some 2,400 prompt tokens (Qwen2.5-VL), 1,850 (Qwen3-VL)."""


def _qwen(hub_id: str, decode: DecodeConfig, *, num_gpus: float, batch_size: int, speech_gpus: float) -> JobConfig:
    """A checkpoint of the hub with Whisper large-v3-turbo beside it."""
    return JobConfig(
        decode=decode,
        caption=CaptionConfig(
            model=f"Qwen/{hub_id}-Instruct",
            prompts=(prompts.load("detailed"),),
            max_new_tokens=192,
            num_gpus=num_gpus,
            batch_size=batch_size,
        ),
        speech=_whisper(speech_gpus),
    )


def _whisper(num_gpus: float) -> SpeechConfig:
    """Whisper large-v3-turbo: on a GPU through transformers, which runs on any CUDA, else in int8 on the CPU."""
    if num_gpus:
        return SpeechConfig(engine="whisper", model="large-v3-turbo", beam_size=1, num_gpus=num_gpus)
    return SpeechConfig(model="large-v3-turbo", num_gpus=0, num_cpus=4)


PRESETS: dict[str, Callable[[], JobConfig]] = {
    "tiny": lambda: _tiny("tiny-qwen2.5-vl", DecodeConfig(num_frames=8, min_pixels=4 * 28**2, max_pixels=13_000)),
    "tiny-qwen3": lambda: _tiny(
        "tiny-qwen3-vl", DecodeConfig(num_frames=8, min_pixels=4 * 32**2, max_pixels=16_980, size_multiple=32)
    ),
    # Weights in bfloat16, GB: 7.5, 16.6, 147; 8.9, 17.5, 62.
    "qwen2.5-vl-3b": lambda: _qwen("Qwen2.5-VL-3B", _QWEN2_5, num_gpus=0.7, batch_size=256, speech_gpus=0.25),
    "qwen2.5-vl-7b": lambda: _qwen("Qwen2.5-VL-7B", _QWEN2_5, num_gpus=0.7, batch_size=256, speech_gpus=0.25),
    "qwen2.5-vl-72b": lambda: _qwen("Qwen2.5-VL-72B", _QWEN2_5, num_gpus=4, batch_size=16, speech_gpus=0),
    "qwen3-vl-4b": lambda: _qwen("Qwen3-VL-4B", _QWEN3, num_gpus=0.7, batch_size=256, speech_gpus=0.25),
    "qwen3-vl-8b": lambda: _qwen("Qwen3-VL-8B", _QWEN3, num_gpus=0.7, batch_size=256, speech_gpus=0.25),
    "qwen3-vl-30b-a3b": lambda: _qwen("Qwen3-VL-30B-A3B", _QWEN3, num_gpus=0.85, batch_size=128, speech_gpus=0.1),
}


def preset(name: str) -> JobConfig:
    """The named preset. Raises ConfigError with the nearest right name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{nearest(name, PRESETS)}; presets: {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name](), preset=name)


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def to_dict(config: JobConfig) -> dict[str, Any]:
    """The configuration as plain nested values, as it is written beside the output."""
    return dataclasses.asdict(config)


def to_yaml(config: JobConfig) -> str:
    """The configuration as a YAML file that `--config` takes."""
    import yaml

    values = json.loads(json.dumps(to_dict(config)))  # tuples become lists
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120))


def from_dict(values: Mapping[str, Any]) -> JobConfig:
    """The inverse of `to_dict`. Raises ConfigError on unknown keys and wrong types or values."""
    return override(JobConfig(), values)


def override(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """A copy with nested `values` laid over it. Raises ConfigError naming the field, what was found, what is
    allowed.
    """
    return _checked(_merge(to_dict(config), values, JobConfig, ""))


def _checked(merged: Mapping[str, Any]) -> JobConfig:
    from pydantic import (
        TypeAdapter,
        ValidationError,
    )  # 0.1 s to import: only where a configuration is made from outside

    try:
        return TypeAdapter(JobConfig).validate_python(merged)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        path = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} = {first['input']!r}: {first['msg']}") from None


def set_paths(config: JobConfig, assignments: list[str]) -> JobConfig:
    """Apply `path=value` assignments, values in YAML (`caption.temperature=0.7`, `speech=null`)."""
    import yaml

    merged = to_dict(config)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: expected path=value, such as caption.batch_size=8")
        try:
            nested: Any = text if _is_text(path.strip(), text) else yaml.safe_load(text)
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or "not a YAML value"
            raise ConfigError(f"--set {assignment!r}: {problem}; quote it as YAML does") from None
        for key in reversed(path.strip().split(".")):
            nested = {key: nested}
        merged = _merge(merged, nested, JobConfig, "")
    return _checked(merged)  # once, as values may need each other


def load_file(path: str) -> dict[str, Any]:
    """Nested values from a YAML or JSON file. Raises ConfigError if it cannot be read or is not a mapping."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: not a text file") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not YAML or JSON: {where}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: holds {type(values).__name__}, expected a mapping of fields to values")
    return values


def fingerprint(component: DecodeConfig | CaptionConfig | SpeechConfig, *more: str) -> str:
    """16 hex digits over every field that changes a row's content, and over `more` (model revision, versions)."""
    values = dataclasses.asdict(component)
    content = {f.name: values[f.name] for f in dataclasses.fields(component) if not f.metadata.get("speed")}
    text = json.dumps([type(component).__name__, content, *more], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _components() -> dict[str, type]:
    """The dataclasses that a `JobConfig` is made of, by field."""
    kinds = {name: (hint, *typing.get_args(hint)) for name, hint in typing.get_type_hints(JobConfig).items()}
    return {
        name: kind
        for name, some in kinds.items()
        for kind in some
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


_COMPONENTS = _components()


def _is_text(path: str, value: str) -> bool:
    """Whether the field at `path` takes `value` as it is typed: `no` is a language, and a prompt may hold colons."""
    if value == "null":
        return False
    if path in ("caption.prompts", "caption.summary"):
        return not value.lstrip().startswith(("[", "{"))
    first, _, second = path.partition(".")
    owner = _COMPONENTS.get(first, JobConfig) if second else JobConfig
    hint = typing.get_type_hints(owner).get(second or first)
    return hint is str or typing.get_origin(hint) is Literal


def _merge(base: dict[str, Any], values: Mapping[str, Any], cls: type, path: str) -> dict[str, Any]:
    known = {f.name: f for f in dataclasses.fields(cls)}
    merged = dict(base)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"unknown configuration key {path}{key}{nearest(str(key), known)}; known: {', '.join(known)}"
            )
        if cls is CaptionConfig:
            value = _with_prompts(key, value)
        if cls is JobConfig and key in _COMPONENTS and isinstance(value, Mapping):
            start = base[key] if base[key] is not None else dataclasses.asdict(_COMPONENTS[key]())
            value = _merge(start, value, _COMPONENTS[key], f"{path}{key}.")
        merged[key] = value
    return merged


def _with_prompts(key: str, value: Any) -> Any:
    """Prompts given by name, file or text as their fields."""
    if key == "prompts" and isinstance(value, str | Mapping):
        value = [value]
    if key == "prompts" and isinstance(value, list | tuple):
        return [dataclasses.asdict(prompt) for prompt in prompts.load_all(value)]
    if key == "summary" and isinstance(value, str | Mapping):
        return dataclasses.asdict(prompts.load(value))
    return value
