"""Find checkpoints, check them against their manifests, and read them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from drawbar.checkpoint.checked_files import check_content, check_sizes, read_checked
from drawbar.checkpoint.format import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    REPLACED,
    RNG_FILE,
    STATE_FILE,
    STEP_NAME,
    Damaged,
    Manifest,
    Snapshot,
    Unusable,
    decode_state,
    step_name,
)
from drawbar.checkpoint.part_files import PartFiles
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.safetensors_reader import TensorFiles
from drawbar.util.atomic_files import retried
from drawbar.util.strict_json import read_json


def read(path: Path) -> Snapshot:
    """Verify a checkpoint (of part files only the sizes), and open it: see ``open_snapshot``."""
    with explain_unusable(path):
        verify_except_parts(path)
    return open_snapshot(path)


def open_snapshot(path: Path) -> Snapshot:
    """Open a checkpoint that was verified. Its tensors are read lazily, whole or by region, as a rank may need few of
    them. Tied names refer to one stored tensor.

    The files stay open while the snapshot is used, so that the checkpoint may be deleted meanwhile (see ``PartFiles``).
    Of a checkpoint in parts, each block is verified when it is read: that may raise ``Damaged`` (``explain_unusable``).

    Raises:
        UserError: it is missing, damaged or of another format, or the disk cannot be read. The message names the file.
    """
    with explain_unusable(path):
        return open_snapshot_folder(path)


def open_snapshot_folder(folder: Path) -> Snapshot:
    """As ``open_snapshot``, but raises Unusable and OSError."""
    manifest = check_sizes(folder)
    parts = PartFiles(folder) if manifest.parts is not None else None
    return Snapshot(
        step=manifest.step,
        model=_open_tensors(folder / MODEL_FILE) if parts is None else parts.model,
        optimizer=_open_tensors(folder / OPTIMIZER_FILE) if parts is None else parts.optimizer,
        rng=_read_tensors(folder / RNG_FILE),
        state=decode_state(read_checked(folder, STATE_FILE, manifest)),
    )


def read_state(path: Path) -> dict[str, Any]:
    """Verify and load ``state.json`` alone. Raises UserError as ``read`` does."""
    with explain_unusable(path):
        return decode_state(read_checked(path, STATE_FILE, check_sizes(path)))


def _open_tensors(path: Path) -> TensorFiles:
    """The tensors of a file under all their names, read lazily. Raises Damaged for a file that cannot be parsed."""
    with _damaged_if_unparsable(path):
        files = TensorFiles([path])
        return files.renamed({name: name for name in files} | read_json(files.metadata["aliases"]))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The same, read into memory; tied tensors are read once."""
    with _damaged_if_unparsable(path):
        files = TensorFiles([path])
        stored = dict(files)
        return stored | {name: stored[first] for name, first in read_json(files.metadata["aliases"]).items()}


@contextmanager
def _damaged_if_unparsable(path: Path) -> Iterator[None]:
    """Raise Damaged for a parse error."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f": {error}" if isinstance(error, ValueError) else ""
        raise Damaged(f"{path.name} is not a file of a checkpoint{reason}") from None


@contextmanager
def explain_unusable(path: Path) -> Iterator[None]:
    """Turn Unusable and OSError from reading the checkpoint ``path`` into a UserError."""
    with explain_read_errors(path):
        try:
            yield
        except Unusable as reason:
            raise unusable_error(path, reason) from None


@contextmanager
def explain_read_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a UserError: an I/O error does not mean that a checkpoint is damaged or missing.

    Raises:
        UserError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename or folder}: {error.strerror or error}",
            where=str(folder),
            remedy="nothing was changed: run the same command again once the disk can be read; "
            "move away what stays unreadable, or restore it from a copy",
            exit_code=ExitCode.FAILED,
        ) from error


def unusable_error(path: Path, reason: Unusable) -> UserError:
    """The error for a checkpoint that cannot be used; it lists the others."""
    if not path.is_dir():
        what = f"there is no checkpoint {path}"
    else:
        what = f"the checkpoint {path.absolute().name} cannot be used: {reason}"
    others = [folder.name for folder in complete_checkpoints(path.parent).values() if folder != path]
    if others:
        remedy = f"use another checkpoint of {path.parent}: {', '.join(others)}"
    else:
        remedy = f"name another one, or restore it from a copy; there is no other complete checkpoint in {path.parent}"
    return UserError(what, where=str(path), remedy=remedy)


def run_given_error(folder: Path) -> UserError:
    """The error for a run directory where one of its checkpoints is asked for."""
    newest = list(complete_checkpoints(folder / "checkpoints").values())[-1:]
    return UserError(
        f"{folder} is a run, and not one of its checkpoints",
        where=str(folder),
        remedy=f"give its newest: {newest[0]}" if newest else "it has no complete one yet",
    )


def step_folders(directory: Path) -> Iterator[tuple[int, Path]]:
    """``(step, folder)`` of all folders with a checkpoint's name, complete or not, newest first.

    Raises:
        OSError: nobody can tell what is there.
    """
    names = folders_in(directory)
    steps = {int(match[1]) for name in names if (match := STEP_NAME.fullmatch(name.removesuffix(REPLACED)))}
    for step in sorted(steps, reverse=True):
        for name in (step_name(step), step_name(step) + REPLACED):
            if name in names:
                yield step, directory / name


def folders_in(directory: Path) -> set[str]:
    """Names of the folders in a folder, which need not exist. Raises OSError where nobody can tell."""

    def scan() -> set[str]:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries if entry.is_dir()}

    try:
        return retried(scan)
    except (FileNotFoundError, NotADirectoryError):
        return set()


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Step → folder, ascending, of the checkpoints that have all their files in the right size.

    Only their manifests are read. A checkpoint that cannot be read at the moment is left out.

    Raises:
        OSError: nobody can tell what is there.
    """
    found: dict[int, Path] = {}
    for step, folder in step_folders(directory):
        try:
            check_sizes(folder)
        except (Unusable, OSError):
            continue
        found.setdefault(step, folder)
    return dict(reversed(found.items()))


def verify_except_parts(folder: Path) -> Manifest:
    """Check every file by size and SHA-256, and return the manifest. Of part files only the size is checked: their
    blocks are verified when they are read. Raises as ``check_sizes`` does."""
    manifest = check_sizes(folder)
    for name in manifest.files:
        check_content(folder, name, manifest)
    return manifest
