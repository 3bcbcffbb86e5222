"""Find checkpoints, check them against their manifests, and read them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    decode_state,
    describe,
    step_name,
)
from drawbar.errors import UserError
from drawbar.runtime.tensors import TensorFiles

REPLACED = ".replaced"
"""Suffix of a checkpoint that stands aside while a new one of the same step takes its name."""


def read(path: Path) -> Snapshot:
    """Verify a checkpoint and open it. Model and optimizer are read tensor by tensor, or part by part, when asked for:
    a rank may need little of them. Tied names stand for one stored tensor.

    The files stay open while the snapshot is used, so that the checkpoint may be deleted meanwhile.

    Raises:
        UserError: it is missing, incomplete or damaged. The message names the file and what differs.
    """
    try:
        manifest = verify(path)
        return Snapshot(
            step=manifest.step,
            model=_open_tensors(path / MODEL_FILE),
            optimizer=_open_tensors(path / OPTIMIZER_FILE),
            rng=dict(_open_tensors(path / RNG_FILE)),
            state=decode_state((path / STATE_FILE).read_bytes()),
        )
    except (Damaged, OSError) as reason:
        raise _unusable(path, reason) from None


def read_state(path: Path) -> dict[str, Any]:
    """Verify and load ``state.json`` alone. Raises UserError as ``read`` does."""
    try:
        _check_content(path, STATE_FILE, check_sizes(path))
        return decode_state((path / STATE_FILE).read_bytes())
    except (Damaged, OSError) as reason:
        raise _unusable(path, reason) from None


def _open_tensors(path: Path) -> TensorFiles:
    files = TensorFiles([path])
    return files.renamed({name: name for name in files} | json.loads(files.metadata["aliases"]))


def _unusable(path: Path, reason: Exception) -> UserError:
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
    """``(step, folder)``, newest first, of what is named as a checkpoint, complete or not."""
    names = [entry.name.removesuffix(REPLACED) for entry in directory.iterdir()] if directory.is_dir() else []
    steps = {int(match[1]) for name in names if (match := STEP_NAME.fullmatch(name))}
    for step in sorted(steps, reverse=True):
        for name in (step_name(step), step_name(step) + REPLACED):
            if (directory / name).is_dir():
                yield step, directory / name


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Step → folder, ascending, of the checkpoints that have all their files in the right size. No file is read."""
    found: dict[int, Path] = {}
    for step, folder in step_folders(directory):
        try:
            check_sizes(folder)
        except Damaged:
            continue
        found.setdefault(step, folder)
    return dict(reversed(found.items()))


def check_sizes(folder: Path) -> Manifest:
    """The manifest, once every file that it lists is there in the right size. Raises Damaged."""
    with _reading(MANIFEST_FILE):
        manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes())
    for name, entry in manifest.files.items():
        with _reading(name):
            size = (folder / name).stat().st_size
        if size != entry.size:
            raise Damaged(f"{name} has {size} bytes instead of {entry.size}")
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest, once every file is as it was written, by size and SHA-256. Raises Damaged."""
    manifest = check_sizes(folder)
    for name in manifest.files:
        _check_content(folder, name, manifest)
    return manifest


def _check_content(folder: Path, name: str, manifest: Manifest) -> None:
    with _reading(name):
        found = describe(folder / name)
    if found != manifest.files[name]:
        raise Damaged(f"{name} has the checksum {found.sha256[:16]}… instead of {manifest.files[name].sha256[:16]}…")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
