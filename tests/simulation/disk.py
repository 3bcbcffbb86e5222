"""The simulated disk: a real folder, at each of whose operations the scheduler may go on with other threads.

Python announces its file operations to an audit hook before it makes them. There, the thread waits as for a disk; a
process that is killed meanwhile has not made the operation. So the source is run as it is.
"""

import fcntl
import os
import re
import sys
from pathlib import Path
from typing import Any

from world import Process, World, worlds

_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.scandir", "os.listdir"}
_READS = {"os.scandir", "os.listdir"}
_COMMIT = re.compile(r".*/checkpoints/step-\d{8}")
_SECONDS = 0.0002, 0.006
"""What an operation takes, between these."""


class Room(World):
    """A world with a disk.

    Args:
        folder: everything in ``folder/disk`` is on the disk that all nodes share.
    """

    def __init__(self, seed: int, folder: Path, shown: dict[str, str], tracing: bool = False) -> None:
        super().__init__(seed, shown, tracing)
        self.folder = folder
        self.disk = str(folder / "disk")
        self.disk_errors: dict[int, tuple[float, int]] = {}
        """Rank → until when writing fails for it, and with which error number."""
        self.makers: dict[str, str] = {}
        """Folder that is being written → the number of the command that has made it."""
        self.mixed: set[str] = set()
        """Those in which another command has written, too."""
        self.disk_delays: dict[int, float] = {}
        """Rank → the seconds that its next operation takes longer."""

    def operate(self, process: Process, operation: str, path: str, writes: bool, target: str = "") -> None:
        """Called before a file operation of a process. Raises OSError."""
        seconds = self.random.uniform(*_SECONDS) + self.disk_delays.pop(process.rank or 0, 0.0)
        thread = self.running
        assert thread is not None
        if self.tracing:
            self.note(process.name, f"{operation} {path.removeprefix(self.disk)} {target.removeprefix(self.disk)}")
        thread.is_in_disk = True
        try:
            self.block(None, seconds, interruptible=False)
        finally:
            thread.is_in_disk = False
        until, number = self.disk_errors.get(-1 if process.rank is None else process.rank, (0.0, 0))
        if writes and self.now < until:
            self.on_disk_error(process)
            raise OSError(number, os.strerror(number), path)
        self._note_mixed(process, operation, path, writes)
        if operation == "os.rename" and path.endswith(".tmp") and _COMMIT.fullmatch(target):
            self.after(0.0, self.on_commit, process, Path(target))

    def _note_mixed(self, process: Process, operation: str, path: str, writes: bool) -> None:
        if operation == "os.mkdir" and path.endswith(".tmp"):
            self.makers[path] = process.environ["number"]
        folder = os.path.dirname(path)
        if writes and self.makers.get(folder, process.environ["number"]) != process.environ["number"]:
            self.mixed.add(os.path.basename(folder).removesuffix(".tmp"))

    def on_disk_error(self, process: Process) -> None:
        """A write of this process has failed."""

    def on_commit(self, process: Process, folder: Path) -> None:
        """This process has given a checkpoint its name, or tried to."""

    def unlock(self, file: Any) -> None:
        if not file.closed:
            fcntl.flock(file, fcntl.LOCK_UN)


def watch_disk() -> None:
    """Let the simulated world know of this process's file operations. Python has no way to undo this; without a world,
    it does nothing."""
    if not getattr(sys, "_drawbar_watches_disk", False):
        sys._drawbar_watches_disk = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not worlds or event not in _OPERATIONS:
        return
    room = worlds[-1]
    if room.running is None or room.is_over or not isinstance(room, Room):
        return
    path = arguments[0]
    if isinstance(path, int) or path is None:
        return
    text = os.fsdecode(path)
    if not text.startswith(room.disk):
        descriptor = arguments[-1]
        if event not in ("os.remove", "os.rmdir") or descriptor == -1:  # else relative to an open folder: rmtree
            return
    writes = event not in _READS and (event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
    target = os.fsdecode(arguments[1]) if event == "os.rename" else ""
    room.operate(room.running.process, event, text, writes, target)


_hook.__cantrace__ = True  # type: ignore[attr-defined] - other threads run inside of it
