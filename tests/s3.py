"""A real S3 protocol server (moto) on a free loopback port, which can also misbehave on request.

It answers one request at a time, so that its conditional writes are atomic, as those of S3 are.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from qwen_ray.config import StorageConfig

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
"""What a client of the server needs in its environment, also in other processes."""


class S3Server:
    """The server, with a fresh bucket for whoever asks."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._faults: list[tuple[str, int, bool]] = []
        self._break_after: int | None = None
        self._hold_after: int | None = None
        self.held, self.release = threading.Event(), threading.Event()
        self.requests: list[tuple[str, str]] = []
        self._asked = threading.Condition()
        self._server = make_server("127.0.0.1", 0, self, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def config(self) -> StorageConfig:
        return StorageConfig(endpoint_url=self.url, max_attempts=3)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def new_bucket(self) -> str:
        from qwen_ray.io.s3 import client

        name = f"bucket-{uuid.uuid4()}"  # moto keeps one state for all servers of a process
        client(self.config).create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object without asking over the network; for thousands of them."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, key, data)

    def fail_next(self, method: str, status: int, after: bool) -> None:
        """Answer the next such request with an error: `after` having done what it asks for, or instead."""
        self._faults.append((method, status, after))

    def break_next_body(self, after_bytes: int) -> None:
        """Close the connection in the middle of the next answer to a GET."""
        self._break_after = after_bytes

    def hold_next_body(self, after_bytes: int) -> None:
        """Stop in the middle of the next answer to a GET that is longer, and set `held`; `release` lets it go on."""
        self.held.clear()
        self.release.clear()
        self._hold_after = after_bytes

    def num_gets(self, name: str) -> int:
        """How often an object whose key ends so has been asked for."""
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.requests)

    def wait_for_gets(self, name: str, count: int) -> bool:
        """Wait until such an object has been asked for so often; whether it was."""
        with self._asked:
            return self._asked.wait_for(lambda: self.num_gets(name) >= count, timeout=60)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        with self._asked:
            self.requests.append((method, environ["PATH_INFO"]))
            self._asked.notify_all()
        for fault in self._faults:
            if fault[0] == method:
                self._faults.remove(fault)
                if fault[2]:
                    list(self._moto(environ, lambda *_: lambda _: None))
                start_response(f"{fault[1]} Fault", [("Content-Length", "0")])
                return [b""]
        body: Iterable[bytes] = self._moto(environ, start_response)
        if method == "GET" and self._break_after is not None:
            whole, self._break_after = b"".join(body)[: self._break_after], None
            return [whole]
        if method == "GET" and self._hold_after is not None:
            return self._held(b"".join(body))
        return body

    def _held(self, whole: bytes) -> Iterable[bytes]:
        if self._hold_after is None or len(whole) <= self._hold_after:
            yield whole
            return
        after, self._hold_after = self._hold_after, None
        yield whole[:after]
        self.held.set()
        self.release.wait(60)
        yield whole[after:]


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        return


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """A running server; the environment has its credentials while the block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        server = S3Server()
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server
