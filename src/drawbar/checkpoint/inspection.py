"""Lists and verifies the checkpoints in a run's ``checkpoints/`` folder, for ``drawbar checkpoint``."""

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.checkpoint.directory import UNUSABLE, CheckpointDirectory
from drawbar.checkpoint.format import INDEX_FILE, MANIFEST_FILE, Damaged, Manifest, Unusable
from drawbar.checkpoint.read import (
    check_content,
    check_size,
    check_sizes,
    explain_read_errors,
    folders_in,
    open_file,
    open_snapshot,
    read_checked,
    read_manifest,
    step_folders,
    verify_part,
)
from drawbar.checkpoint.tensor_index import TensorIndex, nbytes_of_boxes
from drawbar.checkpoint.write import stored_key
from drawbar.runtime.safetensors_reader import read_header


@dataclass(frozen=True)
class CheckpointSummary:
    """A folder that is, or should be, a checkpoint."""

    folder: Path
    step: int
    parts: int
    """Processes that wrote it; 0 where nobody knows."""
    size: int
    """Bytes of all its files."""
    saved_at: float | None
    """When it was written, in seconds since 1970; None for a copy of which its object store does not say."""
    problem: str | None
    """Why it cannot be used, judged by its manifest and the sizes of its files."""


def summaries(directory: CheckpointDirectory) -> list[CheckpointSummary]:
    """Every checkpoint of a run, complete or not, by step. File sizes are checked, content is not.

    Raises:
        UserError: the disk cannot be read.
    """
    found = []
    with explain_read_errors(directory.path):
        for step, folder in step_folders(directory.path):
            with suppress(FileNotFoundError):  # a run that trains may delete it meanwhile
                found.append(_summary(folder, step))
    return found[::-1]


def _summary(folder: Path, step: int) -> CheckpointSummary:
    manifest, problem = None, None
    try:
        manifest = read_manifest(folder)
        check_sizes(folder)
    except Unusable as reason:
        problem = str(reason)
    with os.scandir(folder) as entries:
        stats = [entry.stat(follow_symlinks=False) for entry in entries]
    return CheckpointSummary(
        folder=folder,
        step=step,
        parts=number_of_writers(manifest),
        size=sum(stat.st_size for stat in stats),
        saved_at=max((stat.st_mtime for stat in stats), default=folder.stat().st_mtime),
        problem=problem,
    )


def number_of_writers(manifest: Manifest | None) -> int:
    """How many processes wrote part files; 0 where nobody knows."""
    return 0 if manifest is None else len({name.partition("-")[2] for name in manifest.parts})


def names_set_aside(directory: CheckpointDirectory) -> list[str]:
    """Names of the checkpoints that a run could not use, and has renamed."""
    with explain_read_errors(directory.path):
        return sorted(name for name in folders_in(directory.path) if UNUSABLE in name)


def unlisted_files(folder: Path) -> list[str]:
    """Files in a checkpoint's folder that its manifest does not list."""
    try:
        known = {MANIFEST_FILE, *read_manifest(folder).sizes()}
        return sorted(set(os.listdir(folder)) - known)
    except (Unusable, FileNotFoundError):
        return []


def problems(folder: Path) -> list[str]:
    """The messages on all that is wrong with a checkpoint. Reads every byte of it.

    Raises:
        OSError: the disk cannot be read.
    """
    try:
        manifest = read_manifest(folder)
    except Unusable as reason:
        return [str(reason)]
    found = [str(reason) for reason in damaged_files(folder, manifest).values()]
    if not found:
        try:
            open_snapshot(folder)
            _check_headers(folder, manifest)
        except Unusable as reason:
            found.append(str(reason))
    return found


def verify_every_byte(folder: Path) -> None:
    """Raises Damaged or OtherFormat for the first that is wrong, and OSError where the disk cannot be read."""
    read_manifest(folder)
    for problem in problems(folder):
        raise Damaged(problem)


def damaged_files(folder: Path, manifest: Manifest) -> dict[str, Damaged]:
    """The files that are missing, or are not as they were written, with the reason. Reads every byte.

    Raises:
        OSError: the disk cannot be read.
    """
    found = {}
    for name, size in sorted(manifest.sizes().items()):
        try:
            check_size(folder, name, size)
            if name in manifest.files:
                check_content(folder, name, manifest)
            else:
                verify_part(folder, name, manifest)
        except Damaged as reason:
            found[name] = reason
    return found


def _check_headers(folder: Path, manifest: Manifest) -> None:
    """Compare the safetensors headers of part files, which drawbar itself does not read, with the index. Raises
    Damaged."""
    index = TensorIndex.from_json(read_checked(folder, INDEX_FILE, manifest), manifest.parts)
    expected: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, tensor in (index.model | index.optimizer).items():
        rows = zip(tensor.files, tensor.begins, nbytes_of_boxes(tensor), tensor.offsets, tensor.sizes, strict=True)
        for file, begin, length, offset, sizes in rows:
            first = int(begin) - index.files[file][1]
            key = stored_key(name, tensor.shape, offset.tolist(), sizes.tolist())
            place = [first, first + int(length)]
            expected[file][key] = {"dtype": tensor.dtype, "shape": sizes.tolist(), "data_offsets": place}
    for number, (name, begin) in enumerate(index.files):
        descriptor = open_file(folder, name)
        try:
            header, end = read_header(descriptor, Path(name))
        except ValueError as error:
            raise Damaged(str(error)) from None
        finally:
            os.close(descriptor)
        header.pop("__metadata__", None)
        if header != expected[number] or begin != end:
            raise Damaged(f"{name} does not hold what {INDEX_FILE} says")
