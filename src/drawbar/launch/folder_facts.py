"""Facts about the folders that a run writes to: file system, free space, write permission."""

import errno
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from drawbar.errors import UserError

MIB, GIB = 2**20, 2**30
MIN_FREE_BYTES = 64 * MIB
"""Bytes that even the smallest run needs."""
NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs",
    "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class FolderFacts:
    """Facts about a folder; if it does not exist, about the nearest folder above it that does."""

    name: str
    """What messages call it: the setting or variable that names it (``run.dir``), or ``temporary files``."""
    path: str
    change: str
    """How to make a run use another folder, for error messages: ``set run.dir=ANOTHER_FOLDER``."""
    place: str
    """The folder itself, or where it does not exist the nearest that does."""
    kind: str
    """Of the file system: ``ext4``; empty where that is not known."""
    free: int
    """Bytes."""
    error: str
    """Why it cannot be written; empty where it can."""
    is_full: bool
    locks: bool
    """Whether flock works."""

    @property
    def is_on_network(self) -> bool:
        return self.kind in NETWORK


def collect_folder(name: str, path: str | Path, change: str) -> FolderFacts:
    """Facts about a folder. To see if it is writable, 1 MiB is written and removed: permissions do not show quotas."""
    wanted = Path(path).expanduser().absolute()
    place = wanted
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    error, is_full, locks = "", False, False
    try:
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a folder")
        with tempfile.TemporaryFile(dir=place) as file:
            locks = _lock(file.fileno())
            file.write(bytes(MIB))
            file.flush()
            os.fsync(file.fileno())
    except OSError as trouble:
        error, is_full = trouble.strerror or str(trouble), trouble.errno in _FULL
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        free = 0
    return FolderFacts(name, str(wanted), change, str(place), _kind(place), free, error, is_full, locks)


def check_run_folder(run_dir: Path) -> None:
    """Check that the run's folder can be written, and has space for another checkpoint of the size of its newest (if
    any).

    Raises:
        UserError: the folder cannot be written, or the disk is nearly full.
    """
    folder = collect_folder("run.dir", run_dir, "set run.dir=ANOTHER_FOLDER")
    if folder.error:
        raise UserError(
            f"the folder of the run cannot be written: {folder.error}",
            where=folder.place,
            remedy=f"free some space there or make it yours, or {folder.change}",
        )
    needed = max(MIN_FREE_BYTES, _newest_checkpoint(run_dir))
    if folder.free < needed:
        raise UserError(
            f"the disk is nearly full: {folder.free // MIB:,} MiB free, and at least {needed // MIB:,} MiB needed",
            where=folder.place,
            remedy=f"free some space there, or {folder.change}",
        )


def _newest_checkpoint(run_dir: Path) -> int:
    """Bytes; 0 where there is none."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step-*[0-9]"))
    return sum(path.stat().st_size for path in checkpoints[-1].rglob("*") if path.is_file()) if checkpoints else 0


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _kind(path: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that holds ``path``: of the last mount with the longest matching mount point."""
    try:
        lines = Path(mounts).read_text().splitlines()
        real = path.resolve()
    except OSError:
        return ""
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if len(point.parts) >= longest and real.is_relative_to(point):
            longest, kind = len(point.parts), after.split()[0]
    return kind
