"""``ObjectStore``: the objects below one URL (``s3://bucket/prefix``), through fsspec.

An object is written whole or not at all, by one request or a multi-part upload; there is no rename. Transient errors
are retried, and every request has a stall timeout.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from drawbar.errors import ExitCode, UserError

logger = logging.getLogger("drawbar")

T = TypeVar("T")

_RETRY_DELAYS = (2.0, 8.0)
"""Seconds before the second and the third attempt. The store's library has made retries of its own by then."""
_STALL_SECONDS = 900.0
"""Seconds without progress (an answer, or further bytes) after which a request fails. Most libraries of stores have
shorter timeouts of their own."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"max_concurrency": 4},  # pieces of 50 MiB in flight at a time, all in memory
    "s3a": {"max_concurrency": 4},
    "file": {"auto_mkdir": True},
}
"""Options for fsspec by protocol. The user sets all others by ``FSSPEC_…`` and ``AWS_…``."""
_NOT_RETRIED = (PermissionError, NotImplementedError, TypeError, ValueError)
"""Errors that no retry changes. ``_request`` raises FileNotFoundError and FileExistsError before it looks here."""
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Class names of botocore's errors that no retry changes. Names, as botocore is imported only where it is needed."""


class ObjectStoreError(UserError):
    """The object store does not answer, or refuses a request."""


class ObjectStore:
    """The objects below ``url``. Their names are relative to it, and may contain ``/``. Any thread may use it.

    Raises:
        UserError: there is no such protocol, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._file_system, self._root = _open(self.url)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Size in bytes of every object below ``folder``, by its name relative to the folder.

        Raises:
            ObjectStoreError: the store does not answer, or refuses.
        """
        root = self._path(folder)

        def find(_: Any) -> dict[str, int]:
            self._file_system.invalidate_cache()
            found = self._file_system.find(root, detail=True)
            return {path.removeprefix(root).lstrip("/"): info.get("size", 0) for path, info in found.items()}

        try:
            return self._request(f"listing {self.url}/{folder}", find)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes:
        """The content of a small object. Raises FileNotFoundError where there is none; ObjectStoreError as ``sizes``
        does."""
        return self._request(f"reading {self.url}/{name}", lambda _: self._file_system.cat_file(self._path(name)))

    def exists(self, name: str) -> bool:
        """Whether there is an object of that name. Raises ObjectStoreError as ``sizes`` does."""
        return bool(
            self._request(f"looking for {self.url}/{name}", lambda _: self._file_system.exists(self._path(name)))
        )

    def modified(self, name: str) -> float | None:
        """When an object was written, in seconds since 1970; None where there is none, or the store does not say.
        Raises ObjectStoreError as ``sizes`` does."""
        try:
            found = self._request(f"reading {self.url}/{name}", lambda _: self._modified(self._path(name)))
        except FileNotFoundError:
            return None
        return None if found is None else float(found.timestamp())

    def _modified(self, path: str) -> Any:
        try:
            return self._file_system.modified(path)
        except NotImplementedError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Make a small object, or replace it. Raises ObjectStoreError as ``sizes`` does."""
        self._change(f"writing {self.url}/{name}", lambda _: self._file_system.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Make a small object unless it exists; return False if it exists with other content. Where the store has
        conditional writes (S3, GCS), exactly one of several concurrent processes succeeds. Raises as ``write`` does.
        """
        path = self._path(name)
        try:
            self._change(
                f"writing {self.url}/{name}", lambda _: self._file_system.pipe_file(path, content, mode="create")
            )
        except FileExistsError:
            return self.read(name) == content  # the answer to an earlier attempt may have been lost
        return True

    def put(self, name: str, source: Path) -> None:
        """Copy a file to the store. Raises FileNotFoundError where it is gone; ObjectStoreError as ``sizes`` does."""
        path = self._path(name)

        def copy(progress: Any) -> None:
            source.stat()  # first: a missing source must not look like a missing bucket
            self._file_system.put_file(str(source), path, callback=progress)

        self._change(f"copying {source} to {self.url}/{name}", copy, source)

    def get(self, name: str, target: Path) -> None:
        """Copy an object to a file. Raises FileNotFoundError where there is none; ObjectStoreError as ``sizes``
        does."""
        path = self._path(name)

        def copy(progress: Any) -> None:
            self._file_system.get_file(path, str(target), callback=progress)

        self._request(f"copying {self.url}/{name} to {target}", copy)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects one after the other; those that are gone are no error. Raises ObjectStoreError as ``sizes``
        does."""
        for name in names:
            with suppress(FileNotFoundError):
                self._delete(name)

    def _delete(self, name: str) -> None:
        self._request(f"deleting {self.url}/{name}", lambda _: self._file_system.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _change(self, what: str, call: Callable[[Any], None], source: Path | None = None) -> None:
        """Like ``_request``, for writes. If ``source`` exists, FileNotFoundError can only mean that the bucket is
        missing: it becomes an ObjectStoreError."""
        try:
            self._request(what, call)
        except FileNotFoundError as error:
            if source is not None and not source.exists():
                raise
            raise self._refused(what, error) from error

    def _request(self, what: str, call: Callable[[Any], T]) -> T:
        """Call ``call`` with an fsspec progress callback, with retries and the stall timeout, and return its result.

        Raises:
            FileNotFoundError, FileExistsError: at once, without a retry.
            ObjectStoreError: any other error, after the last attempt.
        """
        for pause in (*_RETRY_DELAYS, None):
            try:
                return _with_stall_limit(call)
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                is_final = isinstance(error, _NOT_RETRIED) or type(error).__name__ in _NO_CREDENTIALS
                if pause is None or is_final:
                    raise self._refused(what, error) from error
                logger.info("%s: %s; the next attempt follows in %d s", what, _reason(error), pause)
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _refused(self, what: str, error: Exception) -> ObjectStoreError:
        return ObjectStoreError(
            f"{what} failed: {_reason(error)}",
            where=self.url,
            remedy="see that the bucket exists, that this machine reaches it, and that credentials for it are where "
            "its library looks for them (for s3://: AWS_… variables, ~/.aws; AWS_ENDPOINT_URL for another server)",
            exit_code=ExitCode.FAILED,
        )


def _open(url: str) -> tuple[Any, str]:
    import fsspec  # here: a run without a remote folder does not need it

    protocol = url.partition("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(url, **_OPTIONS.get(protocol, {}))
    except ImportError as error:
        raise UserError(
            f"{protocol}:// needs a package that is not installed: {error}",
            where="checkpoint.remote",
            remedy="for s3://, pip install 'drawbar[object-store]'; else the package that the message names",
        ) from error
    except ValueError as error:
        raise UserError(
            f"there is no kind of store {protocol}://: {error}",
            where="checkpoint.remote",
            remedy="give a URL that fsspec knows, such as s3://bucket/folder or gs://bucket/folder",
        ) from error
    return files, str(root).rstrip("/")


def _with_stall_limit(call: Callable[[Any], T]) -> T:
    """Run ``call`` in a thread and return its result. Raises TimeoutError after ``_STALL_SECONDS`` without progress."""
    progress = _progress()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call(progress))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            done.set_exception(error)

    threading.Thread(target=run, name="object-store", daemon=True).start()
    while True:
        try:
            return done.result(timeout=1.0)
        except TimeoutError:
            if done.done():
                return done.result()  # the error of the call itself
            if time.monotonic() - progress.last > _STALL_SECONDS:
                raise TimeoutError(f"no answer for {_STALL_SECONDS:.0f} s") from None


def _progress() -> Any:
    from fsspec.callbacks import Callback

    class Progress(Callback):
        """Keeps the time at which the last bytes were copied."""

        def __init__(self) -> None:
            super().__init__()
            self.last = time.monotonic()

        def relative_update(self, inc: int = 1) -> None:
            self.last = time.monotonic()

    return Progress()


def _reason(error: Exception) -> str:
    """An error in one line. (The libraries' messages name hosts and objects, never credentials.)"""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
