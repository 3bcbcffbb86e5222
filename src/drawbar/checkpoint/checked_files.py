"""Checks a checkpoint's files against its manifest: sizes and SHA-256."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from drawbar.checkpoint.block_checksums import checksums_size
from drawbar.checkpoint.format import (
    CHECKSUMS_SUFFIX,
    INDEX_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    REPLACED,
    RNG_FILE,
    STATE_FILE,
    STEP_NAME,
    Damaged,
    FileEntry,
    Manifest,
    file_entry,
)
from drawbar.util.atomic_files import retried

T = TypeVar("T")


def check_sizes(folder: Path) -> Manifest:
    """Check that every file of a checkpoint is there in the right size, and return the manifest.

    Raises:
        Unusable: it is damaged, or of another format.
        OSError: the disk cannot be read.
    """
    manifest = read_manifest(folder)
    for name, size in manifest.sizes().items():
        check_size(folder, name, size)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, and check that it lists every file that its format requires, and the step of the folder's
    name. Raises as ``check_sizes`` does."""
    _file_size(folder, MANIFEST_FILE)
    manifest = Manifest.from_json(damaged_if_missing(MANIFEST_FILE, (folder / MANIFEST_FILE).read_bytes))
    _check_required_files(manifest)
    named = STEP_NAME.fullmatch(folder.name.removesuffix(REPLACED))
    if named is not None and int(named[1]) != manifest.step:
        raise Damaged(f"{MANIFEST_FILE} is that of step {manifest.step}")
    return manifest


def check_size(folder: Path, name: str, expected: int) -> None:
    """Raises Damaged where a file is missing or has another size."""
    size = _file_size(folder, name)
    if size != expected:
        raise Damaged(f"{name} has {size} bytes instead of {expected}")


def _check_required_files(manifest: Manifest) -> None:
    tensors = {MODEL_FILE, OPTIMIZER_FILE} if manifest.parts is None else {INDEX_FILE}
    for name in sorted({RNG_FILE, STATE_FILE} | tensors):
        if name not in manifest.files:
            raise Damaged(f"{MANIFEST_FILE} does not list {name}")
    for name, size in (manifest.parts or {}).items():
        if manifest.files[name + CHECKSUMS_SUFFIX].size != checksums_size(size):
            raise Damaged(f"{name}{CHECKSUMS_SUFFIX} does not have one checksum for each block of {name}")


def _file_size(folder: Path, name: str) -> int:
    """Bytes of a regular file. Refuses links, and devices and pipes, which could hang whoever reads them."""
    found = damaged_if_missing(name, (folder / name).lstat)
    if stat.S_ISDIR(found.st_mode):
        raise Damaged(f"{name} is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{name} is a link or a device, and no file of the checkpoint's own")
    return found.st_size


def check_content(folder: Path, name: str, manifest: Manifest) -> None:
    """Raises Damaged where a file is not as it was written, by its SHA-256; OSError where it cannot be read."""
    _compare(name, damaged_if_missing(name, lambda: file_entry(folder / name)), manifest.files[name])


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """The verified content of a small file. Raises as ``check_content`` does."""
    content = damaged_if_missing(name, (folder / name).read_bytes)
    _compare(name, FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest()), manifest.files[name])
    return content


def _compare(name: str, found: FileEntry, expected: FileEntry) -> None:
    if found != expected:
        raise Damaged(f"{name} has the checksum {found.sha256[:16]}… instead of {expected.sha256[:16]}…")


def open_file(folder: Path, name: str) -> int:
    """A descriptor to read a file of the checkpoint from; the caller closes it. Raises Damaged where it is
    missing, OSError where it cannot be opened."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    return damaged_if_missing(name, lambda: os.open(folder / name, flags))


def damaged_if_missing(name: str, read: Callable[[], T]) -> T:
    """Return ``read()``; raise Damaged where it finds that the file is missing."""
    try:
        return retried(read)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{name} is missing") from None
    except IsADirectoryError:
        raise Damaged(f"{name} is a folder") from None
