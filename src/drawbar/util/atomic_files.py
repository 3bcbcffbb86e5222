"""Files and folders that appear whole or not at all, some durable after a power cut; file metadata that shows a change;
reads that are tried again after errors of network file systems."""

import errno
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from drawbar.util.processes import process_exists

T = TypeVar("T")

_TRANSIENT_ERRORS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)
"""Errors of network file systems that are often gone a moment later: a server restarts, a handle is out of date."""
_UNWRITABLE = {
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a disk",
    stat.S_IFLNK: "a link in a circle",  # else the file behind it would have been found
}
"""What is neither written to nor replaced."""
_RETRY_DELAYS = (0.5, 2.0)
"""Seconds before the second and the third attempt."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, without an fsync in between. Several processes, and nodes,
    may do so at the same time.

    Raises:
        OSError: it cannot be written, nor its folder made; see :func:`replacing`, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, one_writer=False, durable=False) as file:
        file.write(content)


def write_durably(path: Path, text: str) -> None:
    """Write a text file under another name, and rename it when it is on the disk. One process at a time may do so."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing(path: Path, *, one_writer: bool = True, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file, which takes the place of ``path`` at the end of the block; after an error ``path`` is as it was.

    drawbar replaces files only through this function. A link stays: the file behind it is replaced. If ``path`` is a
    stream (see :func:`is_stream`), it is written to directly.

    Args:
        one_writer: nobody else writes to a file of this name, or has one called ``NAME.tmp``.
        durable: what has been written is on the disk before it is renamed.

    Raises:
        OSError: the disk takes no more, or something at ``path`` cannot be written to: see :func:`unwritable`.
    """
    if is_stream(path):
        with _opened_stream(path) as stream:
            yield stream
        return
    if (reason := unwritable(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {reason}", str(path))
    place = Path(os.path.realpath(path))
    draft = place.with_name(f"{place.name}{'' if one_writer else f'.{secrets.token_hex(4)}'}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            draft.chmod(stat.S_IMODE(place.stat().st_mode))
        draft.replace(place)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        sync(place.parent)


def is_stream(path: Path) -> bool:
    """Whether ``path`` is, or leads to, what takes bytes as they come: a terminal or another device of characters, a
    pipe, or this process's own standard output, whatever that is (``/dev/stdout``)."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode) or _own_output(found) is not None


def unwritable(path: Path) -> str | None:
    """What there is at ``path`` that is neither a stream nor a file, and so is never written to; None for all else."""
    place = Path(os.path.realpath(path))
    try:
        mode = place.lstat().st_mode
    except OSError:
        return None
    return _UNWRITABLE.get(stat.S_IFMT(mode))


def _own_output(found: os.stat_result) -> int | None:
    """The descriptor of this process's standard output or error, where the file that was found is that."""
    for descriptor in (1, 2):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _opened_stream(path: Path) -> BinaryIO:
    own = _own_output(path.stat())
    # standard output in a file, opened anew, would be written from its beginning
    return path.open("wb") if own is None else os.fdopen(os.dup(own), "wb")


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
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


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


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write in. At the end of the block it is fsynced with all its files, and renamed to
    ``folder``; after an error it is removed. Temporary folders that killed processes of this machine have left are
    removed first.

    Args:
        folder: absolute; absent, or empty.

    Raises:
        OSError: the disk takes no more, or something else has taken the name meanwhile.
    """
    folder = folder.resolve()  # a link to an empty folder stays a link: the folder behind it is replaced
    draft = draft_of(folder)
    parent_existed = folder.parent.exists()
    try:
        draft.mkdir(parents=True)
        yield draft
        permissions = draft.stat().st_mode & 0o666
        for path in (*draft.rglob("*"), draft):
            if path.is_file():  # the user's umask decides who may read it: safetensors lets only the owner
                path.chmod(permissions)
            sync(path)
        draft.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if not parent_existed:
            with suppress(OSError):  # the folder is in it
                folder.parent.rmdir()


def draft_of(folder: Path) -> Path:
    """The temporary folder of this process for what is to be ``folder``, beside it; not made yet. Those that killed
    processes of this machine have left are removed."""
    _remove_drafts_of_killed(folder)
    return folder.with_name(f"{folder.name}{_suffix()}{os.getpid()}")


def _suffix() -> str:
    return f".tmp-{socket.gethostname()}-"


def _remove_drafts_of_killed(folder: Path) -> None:
    beginning = folder.name + _suffix()
    with suppress(OSError):  # the folder's own parent may be absent, or unreadable
        for path in folder.parent.iterdir():
            pid = path.name.removeprefix(beginning)
            if path.name.startswith(beginning) and pid.isdecimal() and not process_exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)
