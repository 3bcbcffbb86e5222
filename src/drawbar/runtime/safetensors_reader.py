"""Tensors that stay in their files until they are needed, and models whose parameters are still on the meta device:
together, they build, shard and load a model too large for one rank without ever holding all of it in memory. And copies
of live tensors in host memory.
"""

import math
import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from drawbar.util.file_content import BEGIN_BYTES, content_of_bytes
from drawbar.util.strict_json import read_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtypes, by the names that settings use."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a full tensor, to be written or filled."""

    name: str
    """Name of the full tensor: ``lm_head.weight``, for the optimizer ``lm_head.weight/exp_avg``."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    """Where the box begins, one number per dim."""
    data: torch.Tensor
    """The values of the box; its shape is the size of the box."""


Slices = tuple[slice, ...]
"""One slice per dim, with a step of 1."""

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
"""The dtypes that drawbar stores and reads, by safetensors' names for them (safetensors has a few more)."""

_PIECE = 16 * 2**20
"""Upper limit on the bytes of one read when whole rows are read but only some of their columns are needed."""


class ByteSource(Protocol):
    """An open file that tensors are read from."""

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill ``buffer`` with the bytes from ``begin`` on. Raises OSError if they cannot be read."""


@dataclass(frozen=True)
class _OpenFile:
    """A file that is read without checksums: a ``ByteSource``."""

    descriptor: int
    path: Path

    def read_into(self, buffer: memoryview, begin: int) -> None:
        while len(buffer) > 0:
            count = os.preadv(self.descriptor, [buffer], begin)
            if count == 0:
                raise OSError(f"{self.path} ends too early")
            buffer, begin = buffer[count:], begin + count


@dataclass(frozen=True)
class _Stored:
    """The location of a tensor in a file."""

    source: ByteSource
    begin: int
    """Bytes from the beginning of the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name; each is read from a file, or computed, every time it is accessed."""

    @abstractmethod
    def shape(self, name: str) -> torch.Size: ...

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype: ...

    @abstractmethod
    def read(self, name: str, index: Slices) -> Tensor:
        """A slice of a tensor, in the stored dtype; it must not be changed in place. From files, little more than the
        slice is ever in memory.

        Raises:
            OSError: the file cannot be read.
        """

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same tensors under other names; nothing is read.

        Args:
            names: new name → present name. Several may refer to one tensor; present names left out are dropped.
        """

    @abstractmethod
    def tied(self) -> dict[str, str]:
        """Further name → first name, for each tensor that has several names."""

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, tuple(slice(0, size) for size in self.shape(name)))

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...  # Mapping's own method would read the tensor


class TensorFiles(StoredTensors):
    """The tensors of safetensors files.

    Files are read, never mapped: mapped pages count as memory of the process, and network file systems cannot delete a
    mapped file. They stay open while this object or a renamed one lives, so a file may be deleted in the meantime.

    Args:
        paths: the files. If several have a tensor of the same name, the last one counts.

    Raises:
        OSError: a file cannot be opened.
        ValueError: a file is not a safetensors file, or is cut off.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.metadata: dict[str, str] = {}
        """The ``__metadata__`` of the files' headers, merged."""
        self._stored: dict[str, _Stored] = {}
        self._origin: TensorFiles | None = None
        for path in paths:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, file)
            header, begin = read_header(file, path)
            self.metadata |= header.pop("__metadata__", {})
            self._stored |= {name: _located(entry, _OpenFile(file, path), begin) for name, entry in header.items()}

    def renamed(self, names: Mapping[str, str]) -> "TensorFiles":
        view = TensorFiles([])
        view.metadata = self.metadata
        view._stored = {new: self._stored[present] for new, present in names.items()}
        view._origin = self  # kept alive: the files are closed when it is collected
        return view

    def tied(self) -> dict[str, str]:
        return further_names({name: id(stored) for name, stored in self._stored.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._stored[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name].dtype

    def read(self, name: str, index: Slices) -> Tensor:
        stored = self._stored[name]
        bounds = [part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True)]
        return read_box(stored.source, stored.begin, stored.shape, stored.dtype, bounds)


def further_names(identities: Mapping[str, Hashable]) -> dict[str, str]:
    """Name → the first name with the same identity, for each name that is not itself the first."""
    seen: dict[Hashable, str] = {}
    firsts = {name: seen.setdefault(identity, name) for name, identity in identities.items()}
    return {name: first for name, first in firsts.items() if name != first}


def read_slice(tensors: Mapping[str, Tensor], name: str, index: Slices) -> Tensor:
    """``tensors[name][index]``; for tensors in files, only that slice is read."""
    return tensors.read(name, index) if isinstance(tensors, StoredTensors) else tensors[name][index]


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """``tensors[name].shape``, without reading a tensor that is in a file."""
    return tensors.shape(name) if isinstance(tensors, StoredTensors) else tensors[name].shape


def dtype_of(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    """``tensors[name].dtype``, without reading a tensor that is in a file."""
    return tensors.dtype(name) if isinstance(tensors, StoredTensors) else tensors[name].dtype


def read_header(file: int, path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, checked, and the byte at which the tensors begin.

    The file has the header's length in 8 bytes, the header as JSON, then the tensors; else this raises ValueError.
    """
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if size < 8 + length:
            raise ValueError
        header = read_json(os.pread(file, length, 8))
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        if not all(map(_is_plain, entries)) or not _is_text(header.get("__metadata__", {})):
            raise ValueError
        end = _end_of(entry["data_offsets"] for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        found = content_of_bytes(os.pread(file, BEGIN_BYTES, 0))
        but = f", but {found.what}" if found is not None and found.name != "safetensors" else ""
        raise ValueError(f"{path} is not a safetensors file{but}") from None
    if size != 8 + length + end:
        raise ValueError(f"{path} has {size} bytes instead of {8 + length + end}")
    return header, 8 + length


def _is_plain(entry: Any) -> bool:
    """Whether a tensor's entry in a header has values of valid types and signs. The file is not trusted."""
    start, end = entry["data_offsets"]
    numbers = [start, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or any(type(number) is not int for number in numbers):
        return False
    return min(numbers) >= 0 and start <= end


def _end_of(places: Iterable[list[int]]) -> int:
    """Where the last tensor ends. Raises ValueError if there are gaps or overlaps between tensors, which the format
    does not allow: with overlaps, a small file could declare any number of large tensors."""
    end = 0
    for first, last in sorted(places):
        if first != end:
            raise ValueError
        end = last
    return end


def _is_text(metadata: Any) -> bool:
    return all(isinstance(value, str) for value in metadata.values())


def _located(entry: dict[str, Any], file: _OpenFile, begin: int) -> _Stored:
    dtype = STORED_DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{file.path} has a tensor of the unknown type {entry['dtype']}")
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file.path} has a tensor of {end - start} bytes whose shape is {list(shape)}")
    return _Stored(file, begin + start, shape, dtype)


def read_box(
    source: ByteSource, begin: int, shape: tuple[int, ...], dtype: torch.dtype, bounds: Sequence[tuple[int, int]]
) -> Tensor:
    """The rows and columns within ``bounds`` (start and end of each dim) of the tensor of ``shape`` that is stored at
    ``begin``, in new memory. Little more than the box is ever in memory."""
    box = torch.empty([max(0, end - start) for start, end in bounds], dtype=dtype)
    fill_box(source, box, begin, shape, bounds)
    return box


def fill_box(
    source: ByteSource, box: Tensor, begin: int, shape: tuple[int, ...], bounds: Sequence[tuple[int, int]]
) -> None:
    """Like ``read_box``, but fill ``box``, which is contiguous, in host memory, and of the stored dtype."""
    if box.numel() > 0:
        _read_bounds(source, box, begin, shape, bounds)


def _read_bounds(
    source: ByteSource, part: Tensor, begin: int, shape: tuple[int, ...], bounds: Sequence[tuple[int, int]]
) -> None:
    """Read the rows and columns within ``bounds`` of a block of ``shape`` at ``begin`` into ``part``."""
    row = math.prod(shape[1:]) * part.element_size()
    begin += bounds[0][0] * row if bounds else 0
    if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        source.read_into(bytes_of(part), begin)
    elif row > _PIECE:
        for number, target in enumerate(part):
            _read_bounds(source, target, begin + number * row, shape[1:], bounds[1:])
    else:
        many = _PIECE // row
        columns = tuple(slice(*bound) for bound in bounds[1:])
        buffer = torch.empty((min(many, len(part)), *shape[1:]), dtype=part.dtype)
        for first in range(0, len(part), many):
            rows = buffer[: len(part) - first]
            source.read_into(bytes_of(rows), begin + first * row)
            part[first : first + many] = rows[:, *columns]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host: writing to the view changes the tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which new modules have their parameters, but not their buffers, on the meta device, without memory.

    Tied parameters stay tied. (``torch.device("meta")`` would also move the buffers, whose computed values, such as
    rotary frequencies, would be lost. Modelled on accelerate's ``init_empty_weights``.)
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


@dataclass(frozen=True, eq=False)
class OnDemandTensor:
    """A tensor that is not in memory. Tied names share one such object."""

    shape: torch.Size
    dtype: torch.dtype
    get: Callable[[], Tensor]
    """Returns the tensor, in new memory or in memory that nobody changes. May raise."""


class OnDemandTensors(StoredTensors):
    """Maps names to tensors, each from an ``OnDemandTensor``. Reading a slice of a tensor computes all of it."""

    def __init__(self, tensors: Mapping[str, OnDemandTensor]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def of(cls, tensors: StoredTensors, get: Callable[[str], Tensor]) -> "OnDemandTensors":
        """The same tensors, each read by ``get``.

        Args:
            get: returns the same as ``tensors[name]``; it may raise other errors.
        """
        tied = tensors.tied()
        found = {
            name: OnDemandTensor(tensors.shape(name), tensors.dtype(name), partial(get, name))
            for name in tensors
            if name not in tied
        }
        return cls({name: found[tied.get(name, name)] for name in tensors})

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, index: Slices) -> Tensor:
        return self._tensors[name].get()[index]

    def renamed(self, names: Mapping[str, str]) -> "OnDemandTensors":
        return OnDemandTensors({new: self._tensors[present] for new, present in names.items()})

    def tied(self) -> dict[str, str]:
        return further_names({name: id(tensor) for name, tensor in self._tensors.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


def host_copies(
    tensors: Mapping[str, Tensor],
    keeps: bool = True,
    convert: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor.detach(),
) -> dict[str, Tensor]:
    """Copies in host memory that share no memory with the live tensors, so that training can continue while they are
    written.

    Names that share a tensor share its copy. Views that merely overlap become tensors of their own.

    Args:
        keeps: False on a rank that only takes part in the collectives of ``convert``: it gets an empty dict.
        convert: returns the full tensor (collective if sharded); called once per tensor, in one order on all ranks.
    """
    first = tied_names(tensors)
    copies: dict[str, Tensor] = {}
    for name in unique_names(tensors):
        converted = convert(name, tensors[name])
        if keeps:
            copies[name] = converted.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {name: copies[first.get(name, name)] for name in tensors} if keeps else {}


def unique_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors; for tied ones, only the first."""
    further = tied_names(tensors)
    return [name for name in tensors if name not in further]


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each further name of a tied tensor to its first name."""
    return further_names({name: _identity(tensor) for name, tensor in tensors.items()})


def _identity(tensor: Tensor) -> Hashable:
    # A rank's part of a DTensor may be empty, and every rank must give the same answer. All empty tensors are at
    # address 0, which does not tie them; they may be parameters that ZeRO-3 has freed.
    if isinstance(tensor, DTensor) or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
