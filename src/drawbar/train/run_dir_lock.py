"""The lock of a run directory, so that only one process at a time trains a run, and writes only while it holds it."""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

from drawbar.checkpoint.space import check_writable
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import logger, told_while_waiting
from drawbar.util.run_dir import LOCK_FILE

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
"""Error numbers that flock raises on a file system without locks."""
_TOKEN = uuid.uuid4().hex
"""Tells this process from one of the same number elsewhere: containers number theirs alike, and may be named alike."""


def lock_run_dir(folder: Path, patience: float = 5.0) -> IO[str]:
    """Lock an existing run directory for this process, until it ends or the file is closed.

    Args:
        patience: seconds to wait for a process that is about to end; the ranks of a killed run take a moment to exit.

    Raises:
        UserError: another process is training this run.
    """
    lock = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 - held until the run ends
    end = time.monotonic() + patience

    def holder() -> str:
        lock.seek(0)
        return _holder(lock.read())

    with told_while_waiting(lambda: f"{holder()}, which trains the run {folder.name}; up to {patience:g} s"):
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    logger.warning("%s is on a file system without locks: make sure only one process trains it", folder)
                    break
                if time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                raise UserError(
                    f"the run {folder.name} is being trained now, by {holder()}",
                    where=str(folder),
                    remedy="wait for it, stop it, or choose another run.name",
                ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n{_TOKEN}\n")
    lock.flush()
    return lock


def _holder(text: str) -> str:
    """The process that a lock file names in its first line."""
    return text.strip().partition("\n")[0] or "another process"


class RunDirLost(UserError):
    """The run directory was deleted, or is another process's now."""


class RunDirLock:
    """This process's lock of a run directory: taken once, held until released."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file: IO[str] | None = None
        self._written = ""
        self.rescue_name = f"{run_dir.name}-rescued-{uuid.uuid4().hex[:8]}"
        """Name of the run in which this process saves if its own directory is lost."""

    def take(self) -> None:
        """Create the directory of a new run and lock it, unless this process already holds the lock.

        Raises:
            UserError: as ``lock_run_dir``; or another process has started the run since ``take_if_run``.
        """
        if self._file is not None:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._lock()
        if (self._run_dir / "config.yaml").exists():
            self.release()
            raise UserError(
                f"another process has just started the run {self._run_dir.name}",
                where=str(self._run_dir),
                remedy="run the command again to resume that run, or choose another run.name",
            )

    def take_if_run(self) -> None:
        """Lock the directory of an existing run. Also raises UserError if its parent is not writable."""
        check_writable(self._run_dir.parent)
        if self._file is None and (self._run_dir / "config.yaml").exists():
            self._lock()

    def _lock(self) -> None:
        self._file = lock_run_dir(self._run_dir)
        self._file.seek(0)
        self._written = self._file.read()

    def check(self) -> None:
        """Call before each write to the directory: it may have been deleted, and begun again by another process, or a
        file system without locks may have let another process in.

        Raises:
            RunDirLost: this process must not write there any more.
        """
        if self._file is None:
            return
        try:
            found = (self._run_dir / LOCK_FILE).read_text("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            raise self._lost("was deleted (or its .lock)") from None
        except OSError:
            return  # whatever is written next meets the error of the disk
        if found != self._written:
            raise self._lost(f"was taken over by {_holder(found)}")

    def is_still_held(self, on_loss: Callable[[UserError], None]) -> bool:
        """Whether ``check`` passes. If not, ``on_loss`` gets its error."""
        try:
            self.check()
        except RunDirLost as error:
            on_loss(error)
            return False
        return True

    def release(self) -> None:
        """Unlock the directory; ``take`` can lock it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lost(self, what: str) -> RunDirLost:
        return RunDirLost(
            f"the run directory {what} while this process trained the run",
            where=str(self._run_dir),
            remedy="if it has made a step since its last save, its state is saved as the run "
            f"{self.rescue_name}: resume it with run.name={self.rescue_name}",
            exit_code=ExitCode.FAILED,
        )
