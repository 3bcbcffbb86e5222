"""Atomic writes, some durable after a power cut; file metadata that shows a change; reads that are tried again after
errors of network file systems."""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

_TRANSIENT_ERRORS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)
"""Errors of network file systems that are often gone a moment later: a server restarts, a handle is out of date."""
_RETRY_DELAYS = (0.5, 2.0)
"""Seconds before the second and the third attempt."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, without an fsync in between. Several processes, and nodes,
    may do so at the same time.

    Raises:
        OSError: it cannot be written, nor its folder made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_durably(path: Path, text: str) -> None:
    """Write a text file under another name, and rename it when it is on the disk. One process at a time may do so."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of ``path`` at the end of the block; after an error ``path`` is as it was."""
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders; there is nothing more to do on them.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name; where the file system has no such links, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
        sync(Path(target))


def identity(path: Path) -> tuple[int, int, int, int]:
    """Metadata that changes when a file's content does: size, mtime and ctime in nanoseconds,
    and inode. A program can set mtime back, but not ctime."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def retried(read: Callable[[], T]) -> T:
    """What ``read`` returns, at the third attempt if need be. Raises OSError where the disk stays unreadable."""
    for pause in _RETRY_DELAYS:
        try:
            return read()
        except OSError as error:
            if error.errno not in _TRANSIENT_ERRORS:
                raise
            time.sleep(pause)
    return read()
