"""Find out before a run starts whether its checkpoints can be written."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drawbar.errors import ExitCode, UserError

REMEDIES = {
    errno.ENOSPC: "free some space there, keep fewer checkpoints (checkpoint.keep), or use another disk (run.dir)",
    errno.EDQUOT: "your quota there is used up: delete files of yours, or use another disk (run.dir)",
    errno.EFBIG: "files are limited in size: raise the limit (ulimit -f unlimited), or use another disk (run.dir)",
    errno.EACCES: "make the folder writable, or use another one (run.dir)",
    errno.EPERM: "make the folder writable, or use another one (run.dir)",
    errno.EROFS: "the disk can only be read: use another one (run.dir)",
}
"""What to do about a disk that takes no more, by the error number."""


def required_bytes(checkpoint_bytes: int, keep: int, existing: int = 0) -> int:
    """Free space that a run needs: the ``keep`` newest, the best one and the one being written, less what is there.

    Args:
        checkpoint_bytes: size of one checkpoint.
        keep: how many of the newest checkpoints stay.
        existing: number of complete checkpoints that already take up their room.
    """
    return checkpoint_bytes * max(1, keep + 2 - existing)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises UserError where the file system of ``folder``, which need not exist yet, has less room than needed."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise UserError(
            f"not enough disk space for the checkpoints: {readable(needed_bytes)} needed, {readable(free)} free",
            where=str(folder),
            remedy=REMEDIES[errno.ENOSPC],
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
def rust_errors(path: Path) -> Iterator[None]:
    """safetensors and tokenizers report a failed write to ``path`` as text alone: raise it as an OSError."""
    try:
        yield
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Any file of a run may be the one that no longer fits: turn that into an error which says what to do.

    Raises:
        UserError: with exit code 1, for the errors in ``REMEDIES``; the others pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise UserError(
            f"cannot write {error.filename or 'a file of the run'}: {error.strerror} "
            f"({readable(free_bytes(folder))} free)",
            where=str(folder),
            remedy=f"{REMEDIES[error.errno]}; then the same command goes on",
            exit_code=ExitCode.FAILED,
        ) from error


def free_bytes(folder: Path) -> int:
    """Free space, in bytes, on the file system that holds ``folder`` or will hold it."""
    return shutil.disk_usage(_nearest_existing(folder)).free


def readable(size: int) -> str:
    """A number of bytes for people: ``1.5 GiB``, ``12.0 MiB``, ``3.4 KiB``."""
    for unit, bits in (("GiB", 30), ("MiB", 20)):
        if size >= 2**bits:
            return f"{size / 2**bits:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))
