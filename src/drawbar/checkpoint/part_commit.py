"""Makes one checkpoint of the parts that were written with ``write_part``.

The calls come in this order, so that the checkpoint is complete or absent whenever a process is killed. One process
that writes all parts, such as ``drawbar convert``, makes these::

    folder = begin_parts(directory, step)
    records = [write_part(folder, number, ...) for number in range(parts)]
    commit_parts(directory, step, records, ...)       # on failure, directory.discard

The ranks of a run make the same steps in phases (``train.checkpoint_layouts.PartsLayout``): rank 0 makes the folder,
every rank writes its part, and rank 0 calls ``commit_parts``.
"""

import errno
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drawbar.checkpoint.directory import CheckpointDirectory
from drawbar.checkpoint.format import (
    CHECKSUMS_SUFFIX,
    INDEX_FILE,
    RNG_FILE,
    STATE_FILE,
    FileEntry,
    encode_state,
    step_name,
)
from drawbar.checkpoint.part_record import PartRecord
from drawbar.checkpoint.save import save_tensors, write_manifest
from drawbar.checkpoint.tensor_index import TensorIndex

_VISIBLE_WITHIN_SECONDS = 60.0
"""Seconds within which a file written by another node must become visible: network file systems cache folder listings
for up to a minute (``acdirmax``)."""


def begin_parts(directory: CheckpointDirectory, step: int) -> Path:
    """Make an empty folder for the parts of a step. Leftovers of a killed process are removed.

    Raises:
        UserError: the disk is full, a quota or limit is reached, or the folder is not writable.
    """
    return directory.begin_write(step_name(step))


def commit_parts(
    directory: CheckpointDirectory,
    step: int,
    records: Iterable[PartRecord],
    state: dict[str, Any],
    rng: Mapping[str, Tensor],
) -> None:
    """Write the index, the state and the manifest, and rename the folder to its final name, once all parts are on the
    disk.

    Args:
        records: one from every rank that has written; consumed one by one.
        state, rng: as in ``Snapshot``.

    Raises:
        UserError: the disk is full, a quota or limit is reached, or the folder is not writable. The checkpoints that
            were written before are untouched.
        ValueError: the parts do not cover all tensors.
    """
    directory.finish_write(step_name(step), lambda folder: write_common_files(folder, step, records, state, rng))


def write_common_files(
    folder: Path,
    step: int,
    records: Iterable[PartRecord],
    state: dict[str, Any],
    rng: Mapping[str, Tensor],
) -> None:
    """Write index, state, RNG states and manifest into the folder of the parts.

    Raises:
        OSError: the disk is full, a quota or limit is reached, or the folder is not writable.
        ValueError: the parts do not cover all tensors.
    """
    parts: dict[str, int] = {}
    files: dict[str, FileEntry] = {}

    def listed() -> Iterable[PartRecord]:
        for record in records:
            for file in record.files:
                parts[file.name] = file.size
                files[file.name + CHECKSUMS_SUFFIX] = file.sums
            yield record

    index = TensorIndex.merge(listed())
    wait_until_visible(folder, parts | {name: entry.size for name, entry in files.items()})
    (folder / STATE_FILE).write_bytes(encode_state(state))
    (folder / INDEX_FILE).write_bytes(index.to_json())
    save_tensors(folder / RNG_FILE, rng)
    write_manifest(folder, step, [STATE_FILE, INDEX_FILE, RNG_FILE], files, parts)


def wait_until_visible(folder: Path, sizes: Mapping[str, int]) -> None:
    """Wait until the files that other nodes wrote are visible here. Raises OSError, naming the first that is not."""
    end = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    for name, size in sizes.items():
        while (found := _size(folder / name)) != size:
            if time.monotonic() > end:
                raise OSError(errno.EIO, f"{name} has {found} bytes, and its rank has written {size}")
            time.sleep(0.1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
