"""Find checkpoints, check them against their manifests, and read them."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drawbar.checkpoint.format import (
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    STATE_FILE,
    STEP_NAME,
    Damaged,
    Manifest,
    Snapshot,
    Unusable,
    decode_state,
    describe,
    step_name,
)
from drawbar.distributed.process_group import Distributed
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.safetensors_reader import TensorFiles
from drawbar.util.atomic_files import identity, retried

T = TypeVar("T")

REPLACED = ".replaced"
"""Suffix of a checkpoint that stands aside while a new one of the same step takes its name."""


def read(path: Path) -> Snapshot:
    """Verify a checkpoint and open it: see ``open_snapshot``."""
    with explain_unusable(path):
        verify(path)
    return open_snapshot(path)


def read_together(path: Path, world: Distributed) -> Snapshot:
    """Like ``read``, on every rank; one of the ranks that see the same files verifies them."""
    with explain_unusable(path):
        leader = world.lowest_rank_with_same(
            [_look(name, partial(identity, path / name)) for name in check_sizes(path).files]
        )
    with world.barrier_after(f"reading {path}"), explain_unusable(path):
        if leader == world.rank:
            verify(path)
    return open_snapshot(path)


def open_snapshot(path: Path) -> Snapshot:
    """A checkpoint that was verified. Model and optimizer are read tensor by tensor, or part by part, when asked for:
    a rank may need little of them. Tied names stand for one stored tensor.

    The files stay open while the snapshot is used, so that the checkpoint may be deleted meanwhile.

    Raises:
        UserError: it is missing, damaged or of another format, or the disk cannot be read. The message names the file.
    """
    with explain_unusable(path):
        return Snapshot(
            step=check_sizes(path).step,
            model=_open_tensors(path / MODEL_FILE),
            optimizer=_open_tensors(path / OPTIMIZER_FILE),
            rng=dict(_open_tensors(path / RNG_FILE)),
            state=decode_state((path / STATE_FILE).read_bytes()),
        )


def read_state(path: Path) -> dict[str, Any]:
    """Verify and load ``state.json`` alone. Raises UserError as ``read`` does."""
    with explain_unusable(path):
        _check_content(path, STATE_FILE, check_sizes(path))
        return decode_state((path / STATE_FILE).read_bytes())


def _open_tensors(path: Path) -> TensorFiles:
    files = TensorFiles([path])
    return files.renamed({name: name for name in files} | json.loads(files.metadata["aliases"]))


@contextmanager
def explain_unusable(path: Path) -> Iterator[None]:
    """Turn what is wrong with the checkpoint ``path``, or with its disk, into a UserError."""
    with explain_read_errors(path):
        try:
            yield
        except Unusable as reason:
            raise refusal(path, reason) from None


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


def refusal(path: Path, reason: Unusable) -> UserError:
    """The refusal to use a checkpoint; it names the others that there are."""
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


def step_folders(directory: Path) -> Iterator[tuple[int, Path]]:
    """``(step, folder)``, newest first, of what is named as a checkpoint, complete or not.

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


def check_sizes(folder: Path) -> Manifest:
    """The manifest, once every file that it lists is there in the right size.

    Raises:
        Unusable: it is damaged, or of another format.
        OSError: the disk cannot be read.
    """
    manifest = Manifest.from_json(_look(MANIFEST_FILE, (folder / MANIFEST_FILE).read_bytes))
    for name, entry in manifest.files.items():
        size = _look(name, (folder / name).stat).st_size
        if size != entry.size:
            raise Damaged(f"{name} has {size} bytes instead of {entry.size}")
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest, once every file is as it was written, by size and SHA-256. Raises as ``check_sizes`` does."""
    manifest = check_sizes(folder)
    for name in manifest.files:
        _check_content(folder, name, manifest)
    return manifest


def _check_content(folder: Path, name: str, manifest: Manifest) -> None:
    found = _look(name, lambda: describe(folder / name))
    if found != manifest.files[name]:
        raise Damaged(f"{name} has the checksum {found.sha256[:16]}… instead of {manifest.files[name].sha256[:16]}…")


def _look(name: str, read: Callable[[], T]) -> T:
    """What ``read`` finds out about a file of a checkpoint. Raises Damaged where it is missing."""
    try:
        return retried(read)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{name} is missing") from None
    except IsADirectoryError:
        raise Damaged(f"{name} is a folder") from None
