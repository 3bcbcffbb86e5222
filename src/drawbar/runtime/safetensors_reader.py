"""Tensors that stay in their files until they are asked for, and models whose parameters are still on the meta device.

With both, a model too large for one rank is built, sharded and loaded without ever being in memory in full.
"""

import json
import math
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Index = tuple[slice, ...]
"""One slice for each dim, in steps of 1."""

STORED_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls the types."""

_PIECE = 16 * 2**20
"""Most bytes that are read at once where only some columns of the rows are wanted."""


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is."""

    file: int
    """An open descriptor."""
    path: Path
    begin: int
    """Bytes from the beginning of the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of safetensors files by name; each is read when, and as often as, it is asked for.

    Files are read, never mapped: mapped pages count as memory of the process, and network file systems cannot delete a
    mapped file. They stay open while this object or a renamed one lives, so that a file may be deleted meanwhile.

    Args:
        paths: the files. If several have a tensor of one name, that of the last counts.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a file is no safetensors file, or is cut short.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.metadata: dict[str, str] = {}
        """What the files say besides their tensors."""
        self._stored: dict[str, _Stored] = {}
        self._origin: TensorFiles | None = None
        for path in paths:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, file)
            header, begin = read_header(file, path)
            self.metadata |= header.pop("__metadata__", {})
            self._stored |= {name: _located(entry, file, path, begin) for name, entry in header.items()}

    def renamed(self, names: Mapping[str, str]) -> "TensorFiles":
        """The same files under other names.

        Args:
            names: new name → present name. Several may stand for one tensor; present names left out are gone.
        """
        view = TensorFiles([])
        view.metadata = self.metadata
        view._stored = {new: self._stored[present] for new, present in names.items()}
        view._origin = self  # kept alive: the files are closed when it is collected
        return view

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, tuple(slice(0, size) for size in self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # Mapping's own method would read the tensor

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._stored[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name].dtype

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a tensor, in new memory and in the stored dtype. Little more than the part is ever in memory.

        Raises:
            OSError: the file cannot be read.
        """
        stored = self._stored[name]
        bounds = [part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True)]
        part = torch.empty([max(0, end - start) for start, end in bounds], dtype=stored.dtype)
        if part.numel() > 0:
            _read_part(stored, part, stored.begin, stored.shape, bounds)
        return part


def read_part(tensors: Mapping[str, Tensor], name: str, index: Index) -> Tensor:
    """``tensors[name][index]``; of tensors in files, only that part is read."""
    return tensors.read(name, index) if isinstance(tensors, TensorFiles) else tensors[name][index]


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """``tensors[name].shape``, without reading the tensor where it is in a file."""
    return tensors.shape(name) if isinstance(tensors, TensorFiles) else tensors[name].shape


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """``tensors[name].dtype``, without reading the tensor where it is in a file."""
    return tensors.dtype(name) if isinstance(tensors, TensorFiles) else tensors[name].dtype


def read_header(file: int, path: Path) -> tuple[dict[str, Any], int]:
    """What the file says of its tensors, and where their bytes begin: a length in 8 bytes, JSON, then the tensors."""
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if size < 8 + length:
            raise ValueError
        header = json.loads(os.pread(file, length, 8))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no safetensors file") from None
    if size != 8 + length + end:
        raise ValueError(f"{path} has {size} bytes instead of {8 + length + end}")
    return header, 8 + length


def _located(entry: dict[str, Any], file: int, path: Path, begin: int) -> _Stored:
    dtype = STORED_DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{path} has a tensor of the unknown type {entry['dtype']}")
    return _Stored(file, path, begin + entry["data_offsets"][0], tuple(entry["shape"]), dtype)


def _read_part(
    stored: _Stored, part: Tensor, begin: int, shape: tuple[int, ...], bounds: list[tuple[int, int]]
) -> None:
    """Read the rows and columns within ``bounds`` of a block of ``shape`` at ``begin`` into ``part``."""
    row = math.prod(shape[1:]) * part.element_size()
    begin += bounds[0][0] * row if bounds else 0
    if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        _read_bytes(stored, part, begin)
    elif row > _PIECE:
        for number, target in enumerate(part):
            _read_part(stored, target, begin + number * row, shape[1:], bounds[1:])
    else:
        many = _PIECE // row
        columns = tuple(slice(*bound) for bound in bounds[1:])
        room = torch.empty((min(many, len(part)), *shape[1:]), dtype=part.dtype)
        for first in range(0, len(part), many):
            rows = room[: len(part) - first]
            _read_bytes(stored, rows, begin + first * row)
            part[first : first + many] = rows[:, *columns]


def _read_bytes(stored: _Stored, target: Tensor, begin: int) -> None:
    """Fill ``target``, which is contiguous, from the file."""
    room = memoryview(target.reshape(-1).view(torch.uint8).numpy())
    while len(room) > 0:
        count = os.preadv(stored.file, [room], begin)
        if count == 0:
            raise OSError(f"{stored.path} ends too early")
        room, begin = room[count:], begin + count


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made in here have their parameters on the meta device, and so take no memory; buffers are made as ever.

    One parameter in two places stays one. (``torch.device("meta")`` would take the buffers along, and what is computed
    for them, such as rotary frequencies, would be lost. After accelerate's ``init_empty_weights``.)
    """
    register = nn.Module.register_parameter
    replaced = WeakTensorKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in replaced:
                replaced[parameter] = _without_values(parameter)
            parameter = replaced[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # load_state_dict
            yield
    finally:
        nn.Module.register_parameter = register


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)  # such as transformers' mark of an initialized parameter
    return empty
