"""Finds checkpoints, checks them against their manifests, and reads their tensors, or regions of them.

The small files are verified by SHA-256 when a checkpoint is opened; of part files, only the size: each block of them is
verified when it is read.
"""

import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from drawbar.checkpoint.block_checksums import VerifiedFile, checksums_size
from drawbar.checkpoint.format import (
    CHECKSUMS_SUFFIX,
    EMA,
    INDEX_FILE,
    MANIFEST_FILE,
    REPLACED,
    RNG_FILE,
    RUN,
    STATE_FILE,
    STEP_NAME,
    Damaged,
    FileEntry,
    Manifest,
    Snapshot,
    Unusable,
    decode_state,
    file_entry,
    step_name,
)
from drawbar.checkpoint.tensor_index import BoxedTensor, BoxIntersection, TensorIndex, intersections, torch_dtype
from drawbar.errors import ExitCode, UserError
from drawbar.runtime.safetensors_reader import Slices, StoredTensors, TensorBox, fill_box, further_names, read_box
from drawbar.util.atomic_files import retried

T = TypeVar("T")
_MAX_OPEN_FILES = 64
"""Upper limit on part files open at the same time. Each may keep one block in memory."""


def read_snapshot(path: Path) -> Snapshot:
    """Like ``open_snapshot``, for what a user has named.

    Raises:
        UserError: it is missing, damaged or of another format, or the disk cannot be read. The message names the file.
    """
    with explain_unusable(path):
        return open_snapshot(path)


def open_snapshot(folder: Path) -> Snapshot:
    """Open a checkpoint, and verify its state and index. Its tensors are read lazily, whole or by region, as a rank may
    need few of them. Tied names refer to one stored tensor.

    The files stay open while the snapshot is used, so that the checkpoint may be deleted meanwhile (see ``PartFiles``).
    Each block is verified when it is read: that may raise ``Damaged``.

    Raises:
        Unusable: it is damaged, or of another format.
        OSError: the disk cannot be read.
    """
    parts = PartFiles(folder)
    return Snapshot(
        step=parts.manifest.step,
        model=parts.model,
        optimizer=parts.optimizer,
        rng=_read_generators(read_checked(folder, RNG_FILE, parts.manifest)),
        state=decode_state(read_checked(folder, STATE_FILE, parts.manifest)),
    )


def weights_to_use(snapshot: Snapshot) -> Mapping[str, Tensor]:
    """The model's tensors of an opened checkpoint, with the moving averages of those that have one (``optim.ema``)."""
    model, optimizer = snapshot.model, snapshot.optimizer
    assert isinstance(model, _PartTensors), "only opened checkpoints are used"
    assert isinstance(optimizer, _PartTensors), "only opened checkpoints are used"
    return model.with_averages(optimizer)


def is_of_other_run(folder: Path, run: str | None) -> bool:
    """Whether a checkpoint says that another run than ``run`` wrote it. False where either is unknown, or it cannot be
    read."""
    try:
        written_by = decode_state(read_checked(folder, STATE_FILE, check_sizes(folder))).get(RUN)
    except (Unusable, OSError):
        return False
    return None not in (run, written_by) and run != written_by


def read_state(path: Path) -> dict[str, Any]:
    """Verify and load ``state.json`` alone. Raises UserError as ``read_snapshot`` does."""
    with explain_unusable(path):
        return decode_state(read_checked(path, STATE_FILE, check_sizes(path)))


def _read_generators(content: bytes) -> dict[str, Tensor]:
    try:
        return load(content)
    except SafetensorError as error:
        raise Damaged(f"{RNG_FILE} is not a file of a checkpoint: {error}") from None


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
    for name in (INDEX_FILE, RNG_FILE, STATE_FILE):
        if name not in manifest.files:
            raise Damaged(f"{MANIFEST_FILE} does not list {name}")
    for name, size in manifest.parts.items():
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


class PartFiles:
    """The tensors of a checkpoint.

    Every block is verified when it is read (``block_checksums``), so the checkpoint need not be verified before. A
    checkpoint of at most 64 part files may be deleted meanwhile, as all of them stay open. Those of a larger one are
    opened when they are needed, and at most 64 are open at the same time. One thread at a time may read.

    Raises:
        Unusable: it is damaged, or of another format. The message names the file.
        OSError: the disk cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = manifest = check_sizes(folder)
        index = TensorIndex.from_json(read_checked(folder, INDEX_FILE, manifest), manifest.parts)
        self._tensors = index.model | index.optimizer
        self._stored = _stored_names(self._tensors)
        self._parts = _OpenPartFiles(folder, manifest, [name for name, _ in index.files])
        self._model = _stored_names(index.model)
        self._optimizer = _stored_names(index.optimizer)

    @property
    def model(self) -> StoredTensors:
        """The model's tensors under all their names."""
        return _PartTensors(self, self._model)

    @property
    def optimizer(self) -> StoredTensors:
        """The optimizer's tensors."""
        return _PartTensors(self, self._optimizer)

    def names(self) -> list[str]:
        """Names of all tensors of model and optimizer, further names of tied weights included."""
        return list(self._stored)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self._tensor(name))

    @property
    def bytes_read(self) -> int:
        """Bytes of the part files that were read so far, in whole blocks."""
        return self._parts.bytes_read()

    def read(self, name: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The region of ``sizes`` at ``offset`` of a tensor, in new memory and in the stored dtype.

        Raises:
            Damaged: a block does not match its checksum. The message names the file.
            OSError: the disk cannot be read.
        """
        region = torch.empty(tuple(sizes), dtype=self.dtype(name))
        self.read_into(TensorBox(name, tuple(self.shape(name)), tuple(offset), region))
        return region

    def read_into(self, box: TensorBox) -> None:
        """Fill a box of a tensor. Raises as ``read`` does."""
        self.fill([box])

    @torch.no_grad()
    def fill(self, boxes: Iterable[TensorBox]) -> None:
        """Fill boxes of tensors, on any device and of any dtype, in the order of the files, so that each block is read
        once. At most one stored box at a time is in host memory.

        Raises:
            ValueError: a tensor has another shape than that in the checkpoint.
            Damaged, OSError: as ``read`` does; some boxes are filled then.
        """
        wanted: list[tuple[BoxIntersection, BoxedTensor, Tensor]] = []
        for box in boxes:
            tensor = self._tensor(box.name)
            if tuple(box.shape) != tensor.shape:
                raise ValueError(f"{box.name} is {list(tensor.shape)} in the checkpoint, not {list(box.shape)}")
            wanted += [(piece, tensor, box.data) for piece in intersections(tensor, box.offset, box.data.shape)]
        for piece, tensor, target in sorted(wanted, key=lambda each: (each[0].file, each[0].begin)):
            source, dtype, part = self._parts.open(piece.file), torch_dtype(tensor), target[piece.target]
            if part.device.type == "cpu" and part.dtype == dtype and part.is_contiguous():
                fill_box(source, part, piece.begin, piece.shape, piece.bounds)
            else:
                part.copy_(read_box(source, piece.begin, piece.shape, dtype, piece.bounds))

    def _tensor(self, name: str) -> BoxedTensor:
        return self._tensors[self._stored[name]]


def verify_part(folder: Path, name: str, manifest: Manifest) -> None:
    """Verify every block of a part file.

    Raises:
        Damaged: a block does not match its checksum.
        OSError: the disk cannot be read.
    """
    file = open_verified(folder, name, manifest)
    try:
        file.verify()
    finally:
        file.close()


def open_verified(folder: Path, name: str, manifest: Manifest) -> VerifiedFile:
    """A part file, to be read block by block. Raises as ``verify_part`` does."""
    sums = read_checked(folder, name + CHECKSUMS_SUFFIX, manifest)
    return VerifiedFile(open_file(folder, name), name, manifest.parts[name], sums)


class _OpenPartFiles:
    """The part files of a checkpoint: all opened at once if there are at most ``_MAX_OPEN_FILES``, else when needed."""

    def __init__(self, folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
        self._folder = folder
        self._manifest = manifest
        self._names = names
        self._open: OrderedDict[int, VerifiedFile] = OrderedDict()
        self._closed_bytes = 0
        if len(names) <= _MAX_OPEN_FILES:
            for number in range(len(names)):
                self.open(number)

    def open(self, number: int) -> VerifiedFile:
        if number not in self._open:
            while len(self._open) >= _MAX_OPEN_FILES:
                file = self._open.popitem(last=False)[1]
                self._closed_bytes += file.bytes_read
                file.close()
            self._open[number] = open_verified(self._folder, self._names[number], self._manifest)
        self._open.move_to_end(number)
        return self._open[number]

    def bytes_read(self) -> int:
        return self._closed_bytes + sum(file.bytes_read for file in self._open.values())


class _PartTensors(StoredTensors):
    """A mapping of names to tensors in part files, which are read lazily.

    Args:
        names: name in this mapping → name in the files.
    """

    def __init__(self, files: PartFiles, names: Mapping[str, str]) -> None:
        self._files = files
        self._names = names

    def renamed(self, names: Mapping[str, str]) -> "_PartTensors":
        return _PartTensors(self._files, {new: self._names[present] for new, present in names.items()})

    def with_averages(self, optimizer: "_PartTensors") -> "_PartTensors":
        averages = {name: f"{stored}/{EMA}" for name, stored in self._names.items()}
        found = {name: optimizer._names[key] for name, key in averages.items() if key in optimizer}
        return _PartTensors(self._files, {**self._names, **found})

    def shape(self, name: str) -> torch.Size:
        return self._files.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(self._names[name])

    def read(self, name: str, index: Slices) -> Tensor:
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape(name), strict=True)]
        sizes = [max(0, end - start) for start, end in bounds]
        return self._files.read(self._names[name], [start for start, _ in bounds], sizes)

    def tied(self) -> dict[str, str]:
        return further_names(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _stored_names(tensors: Mapping[str, BoxedTensor]) -> dict[str, str]:
    """Every name → the name that the tensor is stored under: another one for further names of tied weights."""
    names = {name: name for name in tensors}
    return names | {alias: name for name, tensor in tensors.items() for alias in tensor.aliases}
