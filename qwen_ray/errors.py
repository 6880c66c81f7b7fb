"""The error tree, and the closed set of `error_type` codes that rows carry.

An error is either about the recipe (ConfigError: raised on the driver before work starts), or about one input, one
request or one process; the latter become rows. Whether a failed row is worth another try follows from its code alone,
so that the decision can be taken from a Parquet table years later.
"""

from __future__ import annotations

from typing import Any

RETRYABLE: dict[str, bool] = {
    # inputs that will not change by themselves
    "empty_file": False,  # zero bytes
    "unreadable": False,  # no demuxer recognises it, or its index is missing
    "no_streams": False,  # a container with neither a picture nor a sound track
    "no_frames": False,  # a video track from which not one frame could be decoded
    "no_samples": False,  # an audio track from which not one sample could be decoded
    "damaged": False,  # more of a clip's frames than allowed were built on damaged data
    "unsupported_codec": False,  # no decoder for it in this build
    "too_long": False,  # more tokens than the model's context holds
    "no_metadata": False,  # the prompt asks for a value that this video's metadata lacks
    # the outside world
    "not_found": True,  # listed, then gone when it was read
    "changed": True,  # listed with one version, read with another
    "storage": True,  # network, credentials, throttling
    # the machine
    "decode_timeout": True,  # the decoder gave no sign of life until its deadline
    "decode_crashed": True,  # the decoder's process died
    "decode_memory": True,  # the decoder's process outgrew its bound
    "out_of_memory": True,  # the engine could not fit the request
    "engine_crashed": True,  # the engine's process or call failed
    "lost": True,  # planned, yet no row came back in two passes
}


class QwenRayError(Exception):
    """Root of every error this project raises on purpose."""


class ConfigError(QwenRayError, ValueError):
    """The recipe or the command is wrong; the message says which field, what was found and what is allowed."""


class LeaseHeldError(ConfigError):
    """Another run holds the output; the message names the holder and the age of its heartbeat."""


class LeaseLostError(QwenRayError):
    """This run held the output and lost it to another; nothing more may be written."""


class BudgetSpentError(QwenRayError):
    """The time or money of a run is used up; what it finished is committed."""


class RowError(QwenRayError):
    """An error that ends in a row. `error_type` is a key of `RETRYABLE`."""

    def __init__(self, error_type: str, message: str) -> None:
        if error_type not in RETRYABLE:
            raise AssertionError(f"unknown error_type {error_type!r}; known: {', '.join(RETRYABLE)}")
        sound = message.encode("utf-8", "replace").decode()  # a file name may hold what no table can
        super().__init__(error_type, sound)
        self.error_type = error_type
        self.message = sound

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.error_type, self.message))


class InputError(RowError):
    """This input will never work as it is: corrupt, empty, no usable stream. Recorded, not retried by itself."""


class TransientError(RowError):
    """Storage or network. Retried with backoff at the boundary that raised it, then recorded as retryable."""


class ResourceError(RowError):
    """One request did not fit into memory or context; the engine has already tried with less beside it."""


class RequestError(RowError):
    """The engine failed on this one request, asked alone; its process is sound."""


class EngineError(QwenRayError):
    """The process of an engine is broken, or the pipeline stopped: never one row's fault, so never caught per row."""
