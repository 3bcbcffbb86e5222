"""Disk space and write permission for checkpoints: checked before a run starts, before each save, and when a save
fails."""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drawbar.errors import ExitCode, UserError
from drawbar.util.byte_sizes import readable

REMEDIES = {
    errno.ENOSPC: "free some space there, keep fewer checkpoints (checkpoint.keep), or use another disk (run.dir)",
    errno.EDQUOT: "your quota there is used up: delete files of yours, or use another disk (run.dir)",
    errno.EFBIG: "files are limited in size: raise the limit (ulimit -f unlimited), or use another disk (run.dir)",
    errno.EACCES: "make the folder writable, or use another one (run.dir)",
    errno.EPERM: "make the folder writable, or use another one (run.dir)",
    errno.EROFS: "the disk can only be read: use another one (run.dir)",
}
"""Remedies for failed writes, by errno."""


class DiskFault(UserError):
    """A file of a run could not be written: its disk is full, read-only or failing."""


def required_bytes(checkpoint_bytes: int, keep: int, existing: int = 0) -> int:
    """Free space that a run needs for the ``keep`` newest checkpoints, the best one and the one being written, less
    those that exist.

    Args:
        checkpoint_bytes: size of one checkpoint.
        keep: how many of the newest checkpoints stay.
        existing: number of complete checkpoints already on the disk.
    """
    return checkpoint_bytes * max(1, keep + 2 - existing)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises UserError where the file system of ``folder``, which need not exist yet, is known to have less room than
    needed."""
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise UserError(
            f"not enough disk space for the checkpoints: {readable(needed_bytes)} needed, {readable(free)} free",
            where=str(folder),
            remedy=REMEDIES[errno.ENOSPC],
        )


def ensure_free_space(folder: Path, name: str, needed_bytes: int, delete_older: Callable[[], None]) -> None:
    """Check that the checkpoint ``name`` fits on the disk beside the existing ones, which stay until it is complete
    (also an older one of the same step).

    Args:
        delete_older: deletes what need not be kept; called only where space is lacking.

    Raises:
        DiskFault: the file system of ``folder`` is known to have less free space than needed.
    """
    free = free_bytes(folder)
    if free is None or free >= needed_bytes:
        return
    delete_older()
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise DiskFault(
            f"{name} was not begun, as it does not fit: {readable(needed_bytes)} needed, {readable(free)} free",
            where=str(folder),
            remedy=REMEDIES[errno.ENOSPC],
            exit_code=ExitCode.FAILED,
        )


def check_writable(folder: Path) -> None:
    """Try to write a temporary file in the folder, or in the nearest parent that exists; the folder is not made. Raises
    UserError where that fails."""
    existing = _nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = "is a file, not a folder" if existing.is_file() else f"is not writable ({error.strerror})"
        raise UserError(
            f"cannot write to the folder {folder}: {existing} {reason}",
            where=str(folder),
            remedy="use another folder (run.dir), or make that one writable",
        ) from error


@contextmanager
def rust_errors_as_oserror(path: Path) -> Iterator[None]:
    """safetensors and tokenizers report a failed write to ``path`` as text alone: raise it as an OSError."""
    try:
        yield
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError such as ENOSPC, from any file of the run, into a UserError with a remedy.

    Raises:
        UserError: with exit code 1, for the errors in ``REMEDIES``; the others pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise UserError(
            f"cannot write {error.filename or 'a file of the run'}: {error.strerror}{free_text(folder)}",
            where=str(folder),
            remedy=f"{REMEDIES[error.errno]}; then the same command resumes",
            exit_code=ExitCode.FAILED,
        ) from error


def free_bytes(folder: Path) -> int | None:
    """Free space on the file system that holds ``folder`` or will hold it, in bytes; None where that is not known.

    Some file systems have no such number, and report 0 for everything (FUSE's default; tmpfs without a limit), or a
    fixed one, as if they were empty (AFS): so a number counts only where less than the total is free, as the run's own
    files take some of it. A number that is too large refuses nothing; for quotas, which most file systems do not
    count here, the write itself will fail.
    """
    try:
        found = os.statvfs(_nearest_existing(folder))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_bfree < found.f_blocks else None


def free_text(folder: Path) -> str:
    """For messages: `` (1.5 GiB free)``, or nothing where that is not known."""
    free = free_bytes(folder)
    return "" if free is None else f" ({readable(free)} free)"


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))
