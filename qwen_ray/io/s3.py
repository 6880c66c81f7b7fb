"""Objects in S3, or in a store that speaks its protocol. Imported only once an `s3://` URI is met (boto3 takes 0.15 s).

botocore retries; it therefore may repeat a conditional PUT whose first try had succeeded, and see that refused. Whoever
was refused after a retry reads back and compares: the same bytes mean that it was us.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NoReturn

import boto3
import botocore.exceptions as boto
from botocore.config import Config

from qwen_ray.config import StorageConfig
from qwen_ray.errors import ConfigError, TransientError
from qwen_ray.io.objects import TEMP, Conflict, Denied, Entry, NotFound, Object, check_conditional

_CHUNK = 1 << 20
_ABANDONED_S = 3600.0
_PUT_TRIES = 6
_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
)
_MALFORMED = (boto.ParamValidationError, boto.NoRegionError, boto.InvalidRegionError)


@functools.lru_cache(maxsize=8)
def client(config: StorageConfig) -> Any:
    """One client per process and configuration: making one takes 50 ms and many threads may share it.

    Raises:
        ConfigError: the endpoint is not a URL.
    """
    options: dict[str, Any] = {}
    if config.endpoint_url:  # stores other than AWS often reject the newer checksums, which AWS itself wants
        options = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    settings = Config(
        retries={"mode": "standard", "total_max_attempts": config.max_attempts},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=64,
        **options,
    )
    session = boto3.session.Session()  # the default session is not safe to share between threads
    with _boto_errors("s3"):
        try:
            return session.client("s3", endpoint_url=config.endpoint_url or None, config=settings)
        except ValueError as error:
            raise ConfigError(f"storage.endpoint_url = {config.endpoint_url!r}: {error}") from error


class S3Storage:
    """Storage under a bucket's prefix."""

    def __init__(self, bucket: str, prefix: str, config: StorageConfig) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client = client(config)
        self._max_attempts = config.max_attempts

    def read(self, key: str) -> Object:
        for attempt in range(self._max_attempts):
            try:
                with _boto_errors(self._name(key)):
                    answer = self._client.get_object(**self._at(key))
                    return Object(answer["Body"].read(), _bare(answer["ETag"]))
            except TransientError as error:
                if attempt + 1 == self._max_attempts or not _broke_off(error):
                    raise
                _back_off(attempt)
        raise AssertionError("unreachable: max_attempts is 1 or more")

    def head(self, key: str) -> str | None:
        try:
            return _bare(self._head(key)["ETag"])
        except NotFound:
            return None

    def exists(self, key: str) -> bool:
        return self.head(key) is not None

    def write(self, key: str, data: bytes) -> str:
        with _boto_errors(self._name(key)):
            return _bare(self._client.put_object(**self._at(key), Body=data)["ETag"])

    def write_new(self, key: str, data: bytes) -> str:
        return self._write_when(key, data, IfNoneMatch="*")

    def write_if(self, key: str, data: bytes, etag: str) -> str:
        return self._write_when(key, data, IfMatch=f'"{etag}"')

    def delete(self, key: str) -> None:
        with _boto_errors(self._name(key)):
            self._client.delete_object(**self._at(key))

    def list(self, prefix: str) -> Iterator[Entry]:
        for entry in list_bucket(self._client, self.bucket, self.prefix + prefix):
            yield Entry(entry.key.removeprefix(self.prefix), entry.size_bytes, entry.version, entry.modified_at)

    def age_s(self, key: str) -> float:
        answer = self._head(key)
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age_s: float = (now - answer["LastModified"]).total_seconds()
        return max(0.0, age_s)

    def sweep(self) -> None:
        for entry in list(self.list(TEMP)):
            if self.age_s(entry.key) > _ABANDONED_S:  # only probes lie here: a PUT itself leaves nothing behind
                self.delete(entry.key)

    def check_writable(self) -> None:
        check_conditional(self)

    def _write_when(self, key: str, data: bytes, **condition: str) -> str:
        """A conditional PUT, with its two ambiguities resolved: 412 after a retry, and 409 for two writes at once."""
        retried = False
        for attempt in range(_PUT_TRIES):
            try:
                with _boto_errors(self._name(key)):
                    return _bare(self._client.put_object(**self._at(key), Body=data, **condition)["ETag"])
            except NotFound as error:  # If-Match on what is gone
                raise Conflict(f"{self._name(key)} is gone") from error
            except Conflict as conflict:
                answer = _answer(conflict)
                retried = retried or answer.get("RetryAttempts", 0) > 0
                if answer.get("HTTPStatusCode") == 409:  # nobody has won yet, says S3: ask again
                    retried = True
                    time.sleep(0.05 * 2**attempt)
                    continue
                if retried and (etag := self._etag_if_holds(key, data)):
                    return etag
                raise
        raise TransientError("storage", f"{self._name(key)}: two writers kept colliding")

    def _etag_if_holds(self, key: str, data: bytes) -> str | None:
        try:
            found = self.read(key)
        except NotFound:
            return None
        return found.etag if found.data == data else None

    def _head(self, key: str) -> dict[str, Any]:
        return head_object(self._client, self.bucket, self.prefix + key)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + key}

    def _name(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{key}"


def list_bucket(s3: Any, bucket: str, prefix: str) -> Iterator[Entry]:
    """All objects whose key starts with `prefix`, page by page. Raises ConfigError: no such bucket, or no access."""
    with _boto_errors(f"s3://{bucket}/{prefix}"):
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                yield Entry(item["Key"], item["Size"], _bare(item["ETag"]), item["LastModified"].timestamp())


def head_object(s3: Any, bucket: str, key: str) -> dict[str, Any]:
    """The answer to HEAD. Raises NotFound, and ConfigError if access is denied."""
    with _boto_errors(f"s3://{bucket}/{key}"):
        answer: dict[str, Any] = s3.head_object(Bucket=bucket, Key=key)
        return answer


def download(
    config: StorageConfig,
    bucket: str,
    key: str,
    version: str,
    target: Path,
    on_chunk: Callable[[bytes], None] | None = None,
) -> None:
    """Copy one version of an object to a file; a broken connection goes on where it stopped.

    Args:
        version: the ETag it must have; empty for any.
        on_chunk: given each piece after it was written, in order.

    Raises:
        NotFound: it is gone.
        Conflict: it has another ETag.
        TransientError: the store did not answer. ConfigError: it refused us.
    """
    s3, name = client(config), f"s3://{bucket}/{key}"
    with target.open("wb") as file:
        for attempt in range(config.max_attempts):
            try:
                with _boto_errors(name):
                    version = _append(s3, bucket, key, version, file, on_chunk)
                return
            except TransientError as error:
                if attempt + 1 == config.max_attempts or not _broke_off(error):
                    raise
                _back_off(attempt)


def _append(s3: Any, bucket: str, key: str, version: str, file: Any, on_chunk: Callable[[bytes], None] | None) -> str:
    condition = {"IfMatch": f'"{version}"'} if version else {}
    if start := file.tell():
        condition["Range"] = f"bytes={start}-"
    answer = s3.get_object(Bucket=bucket, Key=key, **condition)
    for chunk in answer["Body"].iter_chunks(_CHUNK):
        file.write(chunk)
        if on_chunk is not None:
            on_chunk(chunk)
    return _bare(answer["ETag"])


def _broke_off(error: TransientError) -> bool:
    """Whether an answer's body did not arrive whole: botocore has repeated requests by itself, but not those."""
    return isinstance(error.__cause__, (boto.ResponseStreamingError, boto.IncompleteReadError, boto.ReadTimeoutError))


def _back_off(attempt: int) -> None:
    time.sleep(min(5.0, 0.1 * 2**attempt))


def _bare(etag: str) -> str:
    return etag.strip('"')


def _answer(error: Conflict) -> dict[str, Any]:
    cause = error.__cause__
    return cause.response["ResponseMetadata"] if isinstance(cause, boto.ClientError) else {}  # type: ignore[return-value]


@contextmanager
def _boto_errors(name: str) -> Iterator[None]:
    """The one place where boto's failures become ours."""
    try:
        yield
    except boto.ClientError as error:
        _raise_mapped(error, name)
    except _CREDENTIALS as error:
        raise ConfigError(f"{name}: no usable credentials: {error}") from error
    except _MALFORMED as error:
        raise ConfigError(f"{name}: {error}") from error
    except boto.BotoCoreError as error:
        raise TransientError("storage", f"{name}: {error}") from error


def _raise_mapped(error: boto.ClientError, name: str) -> NoReturn:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status in (409, 412):
        raise Conflict(f"{name}: {code}") from error
    if code == "NoSuchBucket":
        raise ConfigError(f"{name}: there is no such bucket") from error
    if status == 404:
        raise NotFound(name) from error
    if status in (401, 403):
        raise Denied(f"{name}: access denied ({code}); check the credentials and what they may do") from error
    if 300 <= status < 500 and status not in (408, 429):
        raise ConfigError(f"{name}: the store rejects the request: {error}") from error
    raise TransientError("storage", f"{name}: {error}") from error
