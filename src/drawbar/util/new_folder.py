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
