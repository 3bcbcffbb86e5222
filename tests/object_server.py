"""A real S3 server (moto), in threads of this process, which fails when a test wants it to."""

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from drawbar.checkpoint import object_store

BUCKET = "bucket"
Fault = Callable[[int, str, str], int | None]
"""Number of a request that changes something (from 1; 0 for others), its method and its path; the status to answer
with, or None for the real answer."""


class ObjectServer:
    """S3 at ``url``, with one bucket."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would name every request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=MotoRequestHandler)
        self._lock = Lock()
        self._fault: Fault | None = None
        self._count = 0
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.env = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # drawbar asks again; its library need not
        }
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.s3: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="somebody",
            aws_secret_access_key="x",
            region_name="us-east-1",
        )
        self.s3.create_bucket(Bucket=BUCKET)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process and its children find the server; this process asks again at once where it fails."""
        monkeypatch.setattr(object_store, "_RETRY_DELAYS", (0.01, 0.01))
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # those of another server

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            changes = method != "GET" and method != "HEAD"
            self._count += changes
            number, fault = self._count if changes else 0, self._fault
        status = None if fault is None else fault(number, method, path)
        if status is None:
            return self._app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{status} Fault", [("Content-Type", "application/xml"), ("Content-Length", "0")])
        return [b""]

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Within the block, ask ``fault`` what to answer; requests are counted from its beginning."""
        with self._lock:
            self._fault, self._count = fault, 0
        try:
            yield
        finally:
            self._fault = None

    @property
    def count(self) -> int:
        """Requests that change something, since the last ``failing`` began."""
        return self._count

    def names(self, prefix: str) -> list[str]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"].removeprefix(prefix) for page in pages for found in page.get("Contents", [])]

    def read(self, key: str) -> bytes:
        content: bytes = self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def write(self, key: str, content: bytes) -> None:
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=content)

    def steps(self, run: str) -> list[int]:
        """The checkpoints in the folder of a run that have a manifest."""
        names = self.names(f"{run}/checkpoints/")
        return [int(name[5:13]) for name in names if name.endswith("/manifest.json")]


def killing(pid: Callable[[], int], at: int) -> Fault:
    """SIGKILL the process group of ``pid`` when request number ``at`` comes, or when the process gives its ownership
    of the folder back, which is its last request; the request is not carried out. The number of requests before that
    differs by a few from run to run."""
    claimed = False

    def fault(number: int, method: str, path: str) -> int | None:
        nonlocal claimed
        is_owner = method == "PUT" and "/owner/" in path
        released, claimed = is_owner and claimed, is_owner or claimed
        if released or number >= at:
            os.killpg(pid(), signal.SIGKILL)
            return 503
        return None

    return fault
