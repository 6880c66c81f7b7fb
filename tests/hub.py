"""The few endpoints of a model hub that its client uses, on a free loopback port; it counts what is asked for.

Git stores small files, known by its hash of a blob; large ones (`.safetensors`) are known by SHA-256, as on a hub.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """One repository, `acme/tiny`, with one commit on `main`.

    `files` is what it states, `served` what it sends; a test that wants them to differ changes the latter.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.served = dict(self.files)
        self.gets: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.05)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def etag(self, name: str) -> str:
        data = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def info(self) -> dict[str, Any]:
        return {"id": "acme/tiny", "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]}

    def _sibling(self, name: str) -> dict[str, Any]:
        data, etag = self.files[name], self.etag(name)
        found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": etag}
        if name.endswith(".safetensors"):
            found |= {"blobId": "f" * 40, "lfs": {"size": len(data), "sha256": etag, "pointerSize": 134}}
        return found


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path.lstrip("/")
            if path in ("api/models/acme/tiny", "api/models/acme/tiny/revision/main"):
                self._send(200, json.dumps(hub.info()).encode(), {}, with_body)
            elif path.startswith("api/models/acme/tiny/revision/") and not path.endswith(COMMIT):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
            elif path.startswith("api/models/acme/tiny/revision/"):
                self._send(200, json.dumps(hub.info()).encode(), {}, with_body)
            elif path.startswith(f"acme/tiny/resolve/{COMMIT}/"):
                self._file(path.rpartition("/")[2], with_body)
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)

        def _file(self, name: str, with_body: bool) -> None:
            if with_body:
                hub.gets[name] += 1
            size = str(len(hub.files[name]))
            headers = {"ETag": f'"{hub.etag(name)}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": size}
            if name.endswith(".safetensors"):
                headers["X-Linked-Etag"] = f'"{hub.etag(name)}"'
            self._send(200, hub.served[name], headers, with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    return Handler


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """A running hub whose repository holds the files of a folder."""
    hub = Hub(folder)
    thread = threading.Thread(target=hub.serve, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stop()
        thread.join()
