"""A folder that appears with all its files on the disk, or not at all."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drawbar.util.atomic_files import sync


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
    _remove_drafts_of_killed(folder)
    draft = folder.with_name(f"{folder.name}{_suffix()}{os.getpid()}")
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


def _suffix() -> str:
    return f".tmp-{socket.gethostname()}-"


def _remove_drafts_of_killed(folder: Path) -> None:
    beginning = folder.name + _suffix()
    with suppress(OSError):  # the folder's own parent may be absent, or unreadable
        for path in folder.parent.iterdir():
            pid = path.name.removeprefix(beginning)
            if path.name.startswith(beginning) and pid.isdecimal() and not _exists(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
