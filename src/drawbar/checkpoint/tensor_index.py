"""``tensors.json``: maps each box of each tensor to a part file of the checkpoint.

For each tensor of the model and of the optimizer it has the type, the shape, further names (``aliases``: tied weights)
and three rows of numbers: the file of each box, where the box begins in the tensor, and how large it is::

    {"name": "lm_head.weight", "dtype": "F32", "shape": [1024, 64], "aliases": [],
     "files": [0, 1], "offsets": [0, 0, 512, 0], "sizes": [512, 64, 512, 64]}

The boxes of a file are stored back to back, in the order of the index, from its ``begin`` (the end of its header) to
its end.
An index is merged from the records in which the ranks describe what they have written (``PartRecord``). It is validated
when it is made, and again when it is read.
"""

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from drawbar.checkpoint.format import INDEX_FILE, Damaged, FileEntry
from drawbar.runtime.safetensors_reader import STORED_DTYPES
from drawbar.util.strict_json import read_json

Numbers = NDArray[np.int64]

KINDS = ("model", "optimizer")
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**60
_MOST_CUT_DIMS = 6
_MOST_PLACES = 2**62
_CACHED_TEXTS = 2**16
"""Size of the caches of tensor descriptions: all ranks name the same tensors."""


class TensorInfo(NamedTuple):
    """Name, dtype and full (unsharded) shape of a tensor of the model or of its optimizer."""

    name: str
    dtype: str
    """As safetensors calls it: ``F32``."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PartFile:
    """A file that a rank has written, and the boxes stored in it back to back, from byte ``begin`` to the end."""

    name: str
    size: int
    begin: int
    """Bytes before the first box: the header of safetensors."""
    sums: FileEntry
    """Size and checksum of the file that holds its block checksums."""
    tensors: tuple[TensorInfo, ...]
    """For each box, the tensor that it belongs to."""
    offsets: Numbers
    """Offset of each box in its tensor, one number for each dim, concatenated over the boxes."""
    sizes: Numbers
    """Sizes of each box, in the same layout."""


@dataclass(frozen=True)
class PartRecord:
    """The part that one rank has written."""

    rank: int
    files: tuple[PartFile, ...]
    """One for the model and one for the optimizer; fewer where the rank had nothing to write."""
    aliases: Mapping[str, str]
    """Tied weights: another name → the name that is stored."""

    def to_json(self) -> bytes:
        files = [_to_plain(file) for file in self.files]
        return json.dumps({"rank": self.rank, "files": files, "aliases": dict(self.aliases)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "PartRecord":
        """Inverse of ``to_json``. Not validated: only for messages from ranks of the same run."""
        fields = json.loads(text)
        return cls(fields["rank"], tuple(map(_from_plain, fields["files"])), fields["aliases"])


def _to_plain(file: PartFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "size": file.size,
        "begin": file.begin,
        "sums": file.sums.model_dump(),
        "tensors": list(map(_to_text, file.tensors)),
        "offsets": _to_base64(file.offsets),
        "sizes": _to_base64(file.sizes),
    }


def _from_plain(fields: dict[str, Any]) -> PartFile:
    return PartFile(
        name=fields["name"],
        size=fields["size"],
        begin=fields["begin"],
        sums=FileEntry(**fields["sums"]),
        tensors=tuple(map(_from_text, fields["tensors"])),
        offsets=_from_base64(fields["offsets"]),
        sizes=_from_base64(fields["sizes"]),
    )


@lru_cache(_CACHED_TEXTS)
def _to_text(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {','.join(map(str, tensor.shape))} {tensor.name}"


@lru_cache(_CACHED_TEXTS)
def _from_text(text: str) -> TensorInfo:
    dtype, shape, name = text.split(" ", 2)
    return TensorInfo(name, dtype, tuple(map(int, shape.split(","))) if shape else ())


def _to_base64(numbers: Numbers) -> str:
    return base64.b64encode(numbers.astype("<i8").tobytes()).decode()


def _from_base64(text: str) -> Numbers:
    return np.frombuffer(base64.b64decode(text), dtype="<i8").astype(np.int64)


@dataclass(frozen=True)
class BoxedTensor:
    """A tensor, and the locations of its boxes."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    files: Numbers
    """For each box, the number of its file."""
    offsets: Numbers
    """Where each box begins in the tensor: one row a box, one column a dim."""
    sizes: Numbers
    begins: Numbers
    """Where each box begins in its file, in bytes."""


@dataclass(frozen=True)
class BoxIntersection:
    """Where a stored box overlaps the requested region of a tensor."""

    file: int
    begin: int
    """Where the box begins in the file, in bytes."""
    shape: tuple[int, ...]
    """Of the box."""
    bounds: tuple[tuple[int, int], ...]
    """Start and end of the overlap within the box, for each dim."""
    target: tuple[slice, ...]
    """The overlap's slices within the region."""


class TensorIndex:
    """The locations of a checkpoint's tensors.

    Args:
        files: name of each part file, and its ``begin``: the bytes of its header.
        tensors: ``model`` and ``optimizer`` → name → tensor. Their ``begins`` are set here.
        sizes: of the part files, in bytes.

    Raises:
        ValueError: boxes do not exactly cover their tensors, or their files.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, int]],
        tensors: Mapping[str, Mapping[str, BoxedTensor]],
        sizes: Mapping[str, int],
    ) -> None:
        self.files = list(files)
        _check_files(self.files, sizes)
        total = sum(sizes[name] for name, _ in self.files)
        for kind in KINDS:
            of_kind = np.array([name.startswith(f"{kind}-") for name, _ in self.files], dtype=bool)
            for name, tensor in tensors[kind].items():
                _check_boxes(name, tensor, of_kind, total)
        _check_names(tensors)
        self.model = dict(tensors["model"])
        self.optimizer = dict(tensors["optimizer"])
        _set_file_offsets(self.files, [*self.model.values(), *self.optimizer.values()], sizes)

    @classmethod
    def merge(cls, records: Iterable[PartRecord]) -> "TensorIndex":
        """Merge the records of all ranks into an index; the records are consumed one by one.

        Raises:
            ValueError: the ranks disagree about a tensor, or their boxes do not exactly cover all tensors.
        """
        boxes = _BoxesOfRanks()
        for record in records:
            boxes.add(record)
        return boxes.index()

    def to_json(self) -> bytes:
        sections = {kind: ",\n".join(map(_tensor_line, *zip(*tensors.items(), strict=True))) if tensors else ""
                    for kind, tensors in (("model", self.model), ("optimizer", self.optimizer))}  # fmt: skip
        files = ",\n".join(json.dumps({"name": name, "begin": begin}) for name, begin in self.files)
        text = ",\n".join(f'"{key}": [\n{rows}\n]' for key, rows in {"files": files, **sections}.items())
        return f"{{{text}}}\n".encode()

    @classmethod
    def from_json(cls, text: bytes, sizes: Mapping[str, int]) -> "TensorIndex":
        """The index of a checkpoint whose part files have these sizes in bytes.

        Raises:
            Damaged: the text is not an index, or does not fit these files.
        """
        try:
            fields = read_json(text, _read_object)  # boxes become arrays as they are read
            files = [(file["name"], file["begin"]) for file in fields["files"]]
            tensors = {kind: dict(fields[kind]) for kind in KINDS}
            if any(len(tensors[kind]) != len(fields[kind]) for kind in KINDS):
                raise ValueError("it has two tensors of one name")
            if {name for name, _ in files} != sizes.keys():
                raise ValueError("it is the index of other files")
            return cls(files, tensors, sizes)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it is no index"
            raise Damaged(f"{INDEX_FILE} cannot be used: {reason}") from None


def intersections(tensor: BoxedTensor, offset: Sequence[int], sizes: Sequence[int]) -> Iterator[BoxIntersection]:
    """The overlaps of the stored boxes with the region of ``sizes`` at ``offset``."""
    start = np.array(offset, dtype=np.int64)
    low = np.maximum(tensor.offsets, start)
    high = np.minimum(tensor.offsets + tensor.sizes, start + np.array(sizes, dtype=np.int64))
    for box in np.flatnonzero((high > low).all(axis=1)):
        first, last = low[box], high[box]
        inside = zip((first - tensor.offsets[box]).tolist(), (last - tensor.offsets[box]).tolist(), strict=True)
        target = zip((first - start).tolist(), (last - start).tolist(), strict=True)
        yield BoxIntersection(
            file=int(tensor.files[box]),
            begin=int(tensor.begins[box]),
            shape=tuple(tensor.sizes[box].tolist()),
            bounds=tuple(inside),
            target=tuple(slice(*bounds) for bounds in target),
        )


class _BoxesOfRanks:
    """The boxes of all ranks as flat arrays: a large run has millions of them."""

    def __init__(self) -> None:
        self.files: list[PartFile] = []
        self.aliases: dict[str, str] = {}
        self.numbers: dict[tuple[str, TensorInfo], int] = {}
        """Kind and tensor → its number, in the order in which they turn up."""
        self.tensor_numbers: list[Numbers] = []
        """For each file, the number of each box's tensor."""
        self.offsets: list[Numbers] = []
        self.sizes: list[Numbers] = []

    def add(self, record: PartRecord) -> None:
        for name, stored in record.aliases.items():
            if self.aliases.setdefault(name, stored) != stored:
                raise ValueError(f"{name} is tied to {self.aliases[name]}, and on rank {record.rank} to {stored}")
        for file in record.files:
            kind = file.name.partition("-")[0]
            own = [self.numbers.setdefault((kind, tensor), len(self.numbers)) for tensor in file.tensors]
            self.files.append(
                PartFile(file.name, file.size, file.begin, file.sums, (), file.offsets[:0], file.sizes[:0])
            )
            self.tensor_numbers.append(np.array(own, dtype=np.int64))
            self.offsets.append(file.offsets)
            self.sizes.append(file.sizes)

    def index(self) -> TensorIndex:
        keys = list(self.numbers)
        order = sorted(range(len(keys)), key=lambda number: (keys[number][0], *stored_order(keys[number][1])))
        position = np.empty(len(keys), dtype=np.int64)  # of each tensor in the index
        position[order] = np.arange(len(keys))
        tensor_of_box = position[np.concatenate([*self.tensor_numbers, np.zeros(0, dtype=np.int64)])]
        files = np.repeat(np.arange(len(self.files)), [len(own) for own in self.tensor_numbers])
        dims = np.array([len(keys[number][1].shape) for number in order], dtype=np.int64)
        by_tensor = np.argsort(tensor_of_box, kind="stable")
        offsets, sizes = (_reordered_rows(rows, dims[tensor_of_box], by_tensor) for rows in (self.offsets, self.sizes))
        tensors: dict[str, dict[str, BoxedTensor]] = {kind: {} for kind in KINDS}
        names = _aliases_of(self.aliases)
        counts = np.bincount(tensor_of_box, minlength=len(keys)).tolist()
        box = number = 0  # first box of the tensor, and first number of its offsets and sizes
        for key, count in zip(order, counts, strict=True):
            kind, whole = keys[key]
            length = count * len(whole.shape)
            if whole.name in tensors[kind]:
                raise ValueError(f"the ranks do not agree about the type or shape of {whole.name}")
            tensors[kind][whole.name] = BoxedTensor(
                dtype=whole.dtype,
                shape=whole.shape,
                aliases=names.pop(whole.name, ()) if kind == "model" else (),
                files=files[by_tensor[box : box + count]],
                offsets=offsets[number : number + length].reshape(count, len(whole.shape)),
                sizes=sizes[number : number + length].reshape(count, len(whole.shape)),
                begins=np.zeros(count, dtype=np.int64),
            )
            box, number = box + count, number + length
        if names:
            raise ValueError(f"a weight is tied to {min(names)}, which no rank has written")
        listed = [(file.name, file.begin) for file in self.files]
        return TensorIndex(listed, tensors, {file.name: file.size for file in self.files})


def stored_order(tensor: TensorInfo) -> tuple[int, str]:
    """Sort key: tensors lie in a file by the size of their elements, the largest first, which aligns them all."""
    return -STORED_DTYPES[tensor.dtype].itemsize, tensor.name


def _aliases_of(stored: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Stored name → its further names, sorted: the inverse of ``stored``."""
    found: dict[str, tuple[str, ...]] = {}
    for alias in sorted(stored):
        found[stored[alias]] = (*found.get(stored[alias], ()), alias)
    return found


def _reordered_rows(rows: list[Numbers], lengths: Numbers, order: Numbers) -> Numbers:
    """Concatenate arrays whose rows have these ``lengths``, and reorder the rows: row i of the result is row
    ``order[i]``."""
    flat = np.concatenate([*rows, np.zeros(0, dtype=np.int64)])
    if len(flat) != lengths.sum():
        raise ValueError("a rank gives other numbers of offsets or sizes than its tensors have dims")
    begins, sorted_lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    shift = begins - (np.cumsum(sorted_lengths) - sorted_lengths)
    return flat[np.repeat(shift, sorted_lengths) + np.arange(len(flat))]


def _check_files(files: Sequence[tuple[str, int]], sizes: Mapping[str, int]) -> None:
    if len({name for name, _ in files}) != len(files):
        raise ValueError("it has two files of one name")
    for name, begin in files:
        if type(begin) is not int or not 8 <= begin <= sizes[name]:
            raise ValueError(f"{name} cannot begin at {begin}")


def _check_boxes(name: str, tensor: BoxedTensor, is_of_kind: np.ndarray, total_bytes: int) -> None:
    """Check that the boxes exactly cover the tensor, without allocating memory in proportion to its declared shape.

    Args:
        is_of_kind: for each file, whether it holds tensors of this one's kind.
        total_bytes: of all files together.
    """
    dtype, shape, (count, dims) = STORED_DTYPES.get(tensor.dtype), tensor.shape, tensor.offsets.shape
    if dtype is None or dims > _MOST_DIMS or math.prod(max(1, size) for size in shape) > _MOST_ELEMENTS:
        raise ValueError(f"{name} cannot be a tensor of type {tensor.dtype} and shape {list(shape)[:_MOST_DIMS]}")
    if math.prod(shape) * dtype.itemsize > total_bytes:
        raise ValueError(f"{name} is larger than all files together")
    if count and not (
        tensor.files.min() >= 0 and tensor.files.max() < len(is_of_kind) and is_of_kind[tensor.files].all()
    ):
        raise ValueError(f"{name} is in a file that cannot hold it")
    limits = np.array(shape, dtype=np.int64) - tensor.offsets
    if (tensor.offsets < 0).any() or (limits < 0).any() or (tensor.sizes < 0).any() or (tensor.sizes > limits).any():
        raise ValueError(f"a box of {name} is not inside it")
    if count == 0 or (math.prod(shape) > 0 and not covers_exactly_once(shape, tensor.offsets, tensor.sizes)):
        raise ValueError(f"the boxes of {name} overlap, or some of it is missing")


def _check_names(tensors: Mapping[str, Mapping[str, BoxedTensor]]) -> None:
    names = [name for kind in KINDS for own, tensor in tensors[kind].items() for name in (own, *tensor.aliases)]
    if len(set(names)) != len(names):
        raise ValueError("it has two tensors of one name")


def _set_file_offsets(
    files: Sequence[tuple[str, int]], tensors: Sequence[BoxedTensor], sizes: Mapping[str, int]
) -> None:
    """Set ``begins``: the boxes of a file are stored back to back, up to its end.

    Raises:
        ValueError: they do not fill it exactly.
    """
    none = np.zeros(0, dtype=np.int64)
    of_file = np.concatenate([*(tensor.files for tensor in tensors), none])
    lengths = np.concatenate([*(nbytes_of_boxes(tensor) for tensor in tensors), none])
    by_file = np.argsort(of_file, kind="stable")
    before = np.cumsum(lengths[by_file]) - lengths[by_file]
    counts = np.bincount(of_file, minlength=len(files))
    if (counts == 0).any():
        raise ValueError("it has a file without tensors")
    first = np.cumsum(counts) - counts
    start = np.array([begin for _, begin in files], dtype=np.int64)
    begins = np.empty_like(before)
    begins[by_file] = before + np.repeat(start - before[first], counts) if len(files) else before
    ends = start + np.add.reduceat(lengths[by_file], first) if len(files) else start
    for (name, _), end in zip(files, ends.tolist(), strict=True):
        if sizes[name] != end:
            raise ValueError(f"{name} has {sizes[name]} bytes, and its tensors end at {end}")
    box = 0
    for tensor in tensors:
        tensor.begins[:] = begins[box : box + len(tensor.files)]
        box += len(tensor.files)


def _tensor_line(name: str, tensor: BoxedTensor) -> str:
    return json.dumps(
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "aliases": tensor.aliases,
            "files": tensor.files.tolist(),
            "offsets": tensor.offsets.reshape(-1).tolist(),
            "sizes": tensor.sizes.reshape(-1).tolist(),
        },
        separators=(",", ":"),
    )


def _read_object(fields: dict[str, Any]) -> Any:
    """For ``read_json``: a tensor as (name, tensor), and everything else as it is."""
    if "offsets" not in fields:
        return fields
    name, dtype, shape, aliases = fields["name"], fields["dtype"], tuple(fields["shape"]), tuple(fields["aliases"])
    if not all(type(text) is str for text in (name, dtype, *aliases)) or any(type(size) is not int for size in shape):
        raise ValueError("it is no index")
    if any(size < 0 for size in shape):
        raise ValueError(f"{name} cannot have the shape {list(shape)}")
    files, offsets, sizes = (_numbers(fields[key]) for key in ("files", "offsets", "sizes"))
    count, dims = len(files), len(shape)
    if len(offsets) != count * dims or len(sizes) != count * dims:
        raise ValueError(f"it does not say where each box of {name} is")
    rows = offsets.reshape(count, dims), sizes.reshape(count, dims)
    return name, BoxedTensor(dtype, shape, aliases, files, *rows, begins=np.zeros(count, dtype=np.int64))


def _numbers(values: Any) -> Numbers:
    found = np.array(values if values else np.zeros(0, dtype=np.int64))
    if found.dtype != np.int64 or found.ndim != 1:
        raise ValueError("it is no index")
    return found


def torch_dtype(tensor: BoxedTensor) -> torch.dtype:
    return STORED_DTYPES[tensor.dtype]


def nbytes_of_boxes(tensor: BoxedTensor) -> Numbers:
    """Bytes that each box of a tensor takes in its file."""
    return np.prod(tensor.sizes, axis=1) * STORED_DTYPES[tensor.dtype].itemsize


def covers_exactly_once(shape: Sequence[int], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    """Whether the boxes cover every element of a tensor exactly once.

    Compares two sparse n-dimensional difference arrays, in which a box is +1 or -1 at each of its corners: the sum over
    all boxes must equal that of one box with the shape of the whole tensor. Also False where more than six dims are
    split, or the corners cannot be numbered in 62 bits.

    Args:
        shape: of the tensor; it has elements.
        offsets, sizes: one row a box, one column a dim; the boxes lie within the tensor.
    """
    whole = np.array([shape], dtype=np.int64).reshape(1, len(shape))
    offsets, sizes = np.concatenate([offsets, np.zeros_like(whole)]), np.concatenate([sizes, whole])
    cut = [dim for dim in range(len(shape)) if (sizes[:, dim] != shape[dim]).any()]
    if len(cut) > _MOST_CUT_DIMS or math.prod(shape[dim] + 1 for dim in cut) > _MOST_PLACES:
        return False
    corners, signs = np.zeros((len(offsets), 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    for dim in cut:
        begin = corners * (shape[dim] + 1) + offsets[:, dim : dim + 1]
        corners = np.concatenate([begin, begin + sizes[:, dim : dim + 1]], axis=1)
        signs = np.concatenate([signs, -signs])
    weights = np.tile(signs, (len(offsets), 1))
    weights[-1] *= -1  # the last box is the whole tensor, which is subtracted
    order = np.argsort(corners, axis=None, kind="stable")
    places, counts = corners.reshape(-1)[order], weights.reshape(-1)[order]
    first = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
    return not np.add.reduceat(counts, first).any()
