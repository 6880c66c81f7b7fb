"""What the files of a checkpoint must hold: their list, their digests, and the revision that follows from both.

A manifest is a file `SHA256SUMS` as the tool `sha256sum` writes it, beside the files. The revision is a hash over the
files that an engine reads, so the same checkpoint has the same revision in a folder and in an object store.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from qwen_ray.errors import ConfigError

MANIFEST = "SHA256SUMS"
MAKE_MANIFEST = f"sha256sum * > {MANIFEST}"
"""The command that makes one, run in the checkpoint's folder."""
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_NOT_A_MODEL = ("training_args.bin", "optimizer*.bin", "scheduler*.bin")
_READ_BYTES = 1 << 20

OnBytes = Callable[[int], None]
"""Told how many more bytes are done; may be called from several threads."""


def unheard(_: int) -> None:
    """The `OnBytes` of whoever does not want to know."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint.

    `digest` is `sha256:HEX`, or `git:HEX` (the hash git gives a blob), which is what a hub knows of small files; empty
    where nothing is known.
    """

    name: str
    size_bytes: int
    digest: str

    @property
    def kind(self) -> str:
        """How the digest was made: `sha256` or `git`."""
        return self.digest.partition(":")[0] or "sha256"


def needed(names: Collection[str]) -> list[str]:
    """Those of a checkpoint's files that an engine reads, sorted: settings, tokenizer, and the weights in one form.

    Safetensors are taken over `.bin` files, and `model.safetensors` over other precisions of the same beside it.
    """
    top = sorted(name for name in names if "/" not in name and not name.startswith("."))
    small = [name for name in top if any(fnmatch(name, pattern) for pattern in _SMALL)]
    return small + _weights(top)


def _weights(top: list[str]) -> list[str]:
    if "model.safetensors" in top:
        return ["model.safetensors"]
    for pattern in ("model-*-of-*.safetensors", "*.safetensors", "*.bin"):
        if found := [name for name in top if fnmatch(name, pattern) and not _is_leftover(name)]:
            return found
    return []


def _is_leftover(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _NOT_A_MODEL)


def has_weights(files: Iterable[File]) -> bool:
    """Whether any of the files holds weights."""
    return any(file.name.endswith((".safetensors", ".bin")) for file in files)


def parse(text: str, where: str) -> dict[str, str]:
    """Name -> `sha256:HEX` from the text of a manifest. Raises ConfigError on a line that is not of its form."""
    digests = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise ConfigError(
                f"{where}, line {number}: {line[:80]!r} is not `HASH  NAME`; make the file with: {MAKE_MANIFEST}"
            )
        digests[match[2]] = f"sha256:{match[1].lower()}"
    digests.pop(MANIFEST, None)  # `*` takes the manifest along when it is made a second time
    return digests


def revision_of(files: Iterable[File]) -> str:
    """`sha256-` and 16 hex digits over names and digests."""
    lines = "".join(sorted(f"{file.digest}  {file.name}\n" for file in files))
    return f"sha256-{hashlib.sha256(lines.encode()).hexdigest()[:16]}"


def hasher(file: File) -> Any:
    """A running hash of the kind of the file's digest."""
    if file.kind == "git":
        return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    return hashlib.sha256()


def digest_path(path: Path, file: File, on_bytes: OnBytes = unheard) -> str:
    """The digest of what lies at `path`, of the kind of the file's own."""
    running = hasher(file)
    with path.open("rb") as opened:
        while block := opened.read(_READ_BYTES):
            running.update(block)
            on_bytes(len(block))
    return f"{file.kind}:{running.hexdigest()}"


def digest_bytes(data: bytes, file: File) -> str:
    """The digest of `data`, of the kind of the file's own."""
    running = hasher(file)
    running.update(data)
    return f"{file.kind}:{running.hexdigest()}"


def mismatch(name: str, file: File, where: str, found: str, remedy: str) -> ConfigError:
    """The refusal of a file that is not what it must be; tells both hashes and what to do."""
    return ConfigError(f"model {name!r}: {file.name} is corrupt: {where} has {found}, expected {file.digest}; {remedy}")
