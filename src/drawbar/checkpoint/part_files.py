"""Reads tensors, or regions of them, from a checkpoint in parts, and verifies the blocks that are read."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from drawbar.checkpoint.block_checksums import VerifiedFile
from drawbar.checkpoint.checked_files import check_sizes, open_file, read_checked
from drawbar.checkpoint.format import CHECKSUMS_SUFFIX, INDEX_FILE, Manifest
from drawbar.checkpoint.tensor_index import BoxedTensor, BoxIntersection, TensorIndex, intersections, torch_dtype
from drawbar.runtime.safetensors_reader import Slices, StoredTensors, fill_box, further_names, read_box
from drawbar.runtime.tensor_boxes import TensorBox

_MAX_OPEN_FILES = 64
"""Upper limit on part files open at the same time. Each may keep one block in memory."""


class PartFiles:
    """The tensors of a checkpoint of format 2.

    Every block is verified when it is read (``block_checksums``), so the checkpoint need not be verified before. A
    checkpoint of at most 64 part files may be deleted meanwhile, as all of them stay open. Those of a larger one are
    opened when they are needed, and at most 64 are open at the same time. One thread at a time may read.

    Raises:
        Unusable: it is damaged, or of another format. The message names the file.
        OSError: the disk cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        manifest = check_sizes(folder)
        if manifest.parts is None:
            raise ValueError(f"{folder} holds whole tensors, and no parts")
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

    def read_whole(self, name: str) -> Tensor:
        """A whole tensor. Raises as ``read`` does."""
        shape = self.shape(name)
        return self.read(name, [0] * len(shape), shape)

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
    return VerifiedFile(open_file(folder, name), name, (manifest.parts or {})[name], sums)


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
