"""Renames and deletions in a run's ``checkpoints/`` folder. A suffix marks each folder that is being written, replaced
or deleted, so that a folder without one is a complete checkpoint, whenever the process is killed."""

import logging
import shutil
from pathlib import Path

from drawbar.checkpoint.format import REPLACED

logger = logging.getLogger("drawbar")

TMP = ".tmp"
"""Suffix of what is still being written."""
DELETING = ".deleting"
"""Suffix of what is being deleted, so that half of a checkpoint never carries the name of a whole one."""


def rename_to_replaced(final: Path) -> Path | None:
    """Rename the checkpoint ``final``, if it exists, so that a new one can take its name. Returns its new path, under
    which readers still find it; None where there was no such checkpoint."""
    if not final.exists():
        return None
    replaced = with_suffix(final, REPLACED)
    if replaced.exists():
        delete(replaced)
    final.rename(replaced)
    return replaced


def delete(path: Path) -> None:
    """Delete a folder or file. Only warns where it cannot: that is no reason to end a run."""
    try:
        if path.name.endswith((TMP, DELETING)):
            remove(path)
            return
        doomed = with_suffix(path, DELETING)
        remove(doomed)
        path.rename(doomed)
        remove(doomed)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error.strerror)


def remove(path: Path) -> None:
    """Remove a folder or file, if there is one. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def with_suffix(path: Path, suffix: str) -> Path:
    """``step-00000004`` → ``step-00000004.tmp``."""
    return path.with_name(path.name + suffix)
