"""The folders that a run writes to."""

import errno
import os
import shlex
from collections.abc import Iterator

from drawbar.doctor.finding import Finding, Fix, Level, size
from drawbar.launch.folder_facts import MIB, FolderFacts

SECTION = "Storage"


def check_folder(folder: FolderFacts, enough: int, trouble: Level = Level.PROBLEM) -> Iterator[Finding]:
    """Args:
    enough: bytes, below which there is a warning.
    trouble: the level of the finding if the folder cannot be written, or has no locks.
    """
    new = "" if folder.place == folder.path else ", not made yet"
    network = " (a network file system)" if folder.is_on_network else ""
    what = f"{folder.path}{new}: {size(folder.free)} free, {folder.kind or 'unknown file system'}{network}"
    quoted = shlex.quote(folder.place)
    if folder.is_full or (not folder.error and folder.free < 64 * MIB):
        fix = Fix(f"df -h {quoted}", f"free some space there, or {folder.change}")
        yield Finding(SECTION, folder.name, trouble, f"{folder.path}: the disk is full", folder.error, fix)
    elif folder.error:
        fix = Fix(f"ls -ld {quoted}", f"make it yours (sudo chown $USER …), or {folder.change}")
        if folder.error == os.strerror(errno.EFBIG):
            fix = Fix("ulimit -f unlimited")
        what = f"{folder.path} cannot be written: {folder.error}"
        yield Finding(SECTION, folder.name, trouble, what, fix=fix)
    elif not folder.locks:
        why = "two runs could write to one folder, or two processes encode the same data"
        fix = Fix("", f"mount it with locks (NFS: without nolock; Lustre: -o flock), or {folder.change}")
        yield Finding(SECTION, folder.name, trouble, f"{what}; flock does not work", why, fix)
    elif folder.free < enough:
        fix = Fix(f"df -h {quoted}", f"free some space there, or {folder.change}")
        yield Finding(SECTION, folder.name, Level.WARNING, what, f"{size(enough)} are soon used", fix)
    else:
        yield Finding(SECTION, folder.name, Level.OK, what, "writable, flock works")
