"""Samples in columnar storage: all values of one field concatenated, in memory or in files.

A column may be stored as its differences from another column, as the labels of language models mostly equal the tokens:
each run of differing values as (first position, length) and its values.
"""

import bisect
import hashlib
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, Any]
"""One encoded example: each field a numpy array, or a plain bool, int, float or str."""
Kind = Literal["array", "number", "text"]
FieldKinds = dict[str, tuple[Kind, int]]
"""Field name → its kind and number of dims."""

BLOCK_VALUES = 1 << 20  # values read at a time when a whole file is processed


class Values(Protocol):
    """An array that can be read in parts: a slice of its first dim, or some of its indices."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice | NDArray[np.int64], /) -> NDArray[Any]: ...


class Storage(Protocol):
    """Named byte sequences to append to."""

    def append(self, name: str, data: bytes) -> None:
        """Append bytes to a sequence, which is initially empty."""

    def array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The content as one array of this dtype, in memory or memory-mapped."""

    def values(self, name: str, dtype: np.dtype[Any], *row: int) -> Values:
        """The content as values of shape (-1, *row), read on access."""

    def replace(self, name: str, by: str) -> None:
        """Replace the content of ``name`` by that of ``by``, and remove ``by``."""


class MemoryStorage:
    """A ``Storage`` in this process's memory."""

    def __init__(self) -> None:
        self._contents: dict[str, bytearray] = {}

    def append(self, name: str, data: bytes) -> None:
        self._contents.setdefault(name, bytearray()).extend(data)

    def array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The content as one array, not copied."""
        content = self._contents.get(name, b"")
        return np.frombuffer(content, dtype) if content else np.empty(0, dtype)

    def values(self, name: str, dtype: np.dtype[Any], *row: int) -> NDArray[Any]:
        """The same array, of shape (-1, *row)."""
        return self.array(name, dtype).reshape(-1, *row)

    def replace(self, name: str, by: str) -> None:
        self._contents[name] = self._contents.pop(by)


class FileValues:
    """The values in a file, read on access. The file is not memory-mapped, as pages read from a mapped file count as
    memory of the process."""

    def __init__(self, path: Path, dtype: np.dtype[Any], *row: int) -> None:
        self._dtype = dtype
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._path = path
        self._item_bytes = dtype.itemsize * math.prod(row)
        self.shape = (os.fstat(self._file).st_size // self._item_bytes, *row)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice | NDArray[np.int64], /) -> NDArray[Any]:
        if isinstance(part, slice):
            start, stop, _ = part.indices(len(self))
            return self._read([start], max(0, stop - start))
        return self._read(part.tolist(), 1)

    def _read(self, starts: list[int], count: int) -> NDArray[Any]:
        """``count`` items from each start, concatenated."""
        values = np.empty((len(starts) * count, *self.shape[1:]), self._dtype)
        buffer, size = values.reshape(-1).view(np.uint8).data, count * self._item_bytes
        for index, start in enumerate(starts):
            part, begin = buffer[index * size : (index + 1) * size], start * self._item_bytes
            while part:
                done = os.preadv(self._file, [part], begin)
                if not done:
                    raise OSError(f"{self._path} ends too early")
                part, begin = part[done:], begin + done
        return values


class FolderStorage:
    """A ``Storage`` of files in an existing folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}

    def append(self, name: str, data: bytes) -> None:
        if name not in self._open:
            self._open[name] = (self.folder / name).open("ab")
        self._open[name].write(data)

    def array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The content as one array, memory-mapped: only accessed parts are read."""
        path = self._written(name)
        if not path.exists() or not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype, mode="r"))  # a plain array: slices of a memmap are slow to make

    def values(self, name: str, dtype: np.dtype[Any], *row: int) -> Values:
        """The content as values of shape (-1, *row), which are not held in memory."""
        path = self._written(name)
        return FileValues(path, dtype, *row) if path.exists() else np.empty((0, *row), dtype)

    def _written(self, name: str) -> Path:
        """The file of that name, after flushing what was appended."""
        if name in self._open:
            self._open[name].flush()
        return self.folder / name

    def replace(self, name: str, by: str) -> None:
        self._close(name)
        self._close(by)
        os.replace(self.folder / by, self.folder / name)

    def close(self) -> None:
        """Sync everything to disk, and close the files."""
        for name in list(self._open):
            self._close(name)

    def abandon(self) -> None:
        """Close the files of a discarded draft, even if their buffers cannot be written (disk full)."""
        for file in self._open.values():
            try:
                file.close()
            except OSError:
                continue
        self._open.clear()

    def _close(self, name: str) -> None:
        file = self._open[name]
        file.flush()
        os.fsync(file.fileno())
        file.close()
        del self._open[name]


@dataclass(frozen=True)
class Piece:
    """The values of one field in some consecutive samples, to be appended to a column."""

    kind: Kind
    values: NDArray[Any]
    """Shape (values,)."""
    shapes: NDArray[np.int64]
    """Shape (samples, dims)."""
    dtypes: frozenset[str]
    """The dtypes of the samples; ``values`` has one dtype that can hold them all."""


def field_kinds(sample: Sample) -> FieldKinds:
    """The kind of each field of a sample."""

    def kind(value: Any) -> tuple[Kind, int]:
        if isinstance(value, np.ndarray):
            return "array", value.ndim
        return ("text", 1) if isinstance(value, str) else ("number", 0)

    return {name: kind(value) for name, value in sample.items()}


def describe_kind_mismatch(expected: FieldKinds, found: FieldKinds) -> str:
    """Describe how a sample's fields differ from those of the samples before it."""

    def words(kind: Kind, dims: int) -> str:
        return f"an array of {dims} dims" if kind == "array" else f"a {kind}"

    for name in sorted(expected.keys() - found.keys()):
        return f"a sample has no field {name!r}, which the samples before it have"
    for name in sorted(found.keys() - expected.keys()):
        return f"a sample has a field {name!r}, which the samples before it lack"
    name = min(name for name in found if found[name] != expected[name])
    return (
        f"the field {name!r} of a sample is {words(*found[name])}; "
        f"in the samples before it, it is {words(*expected[name])}"
    )


def stack(samples: Sequence[Sample]) -> dict[str, Piece]:
    """Convert samples with fields of the same kinds to columns. Raises OverflowError for integers of more than 64
    bits."""
    kinds = field_kinds(samples[0]) if samples else {}
    return {name: _stack_field(kind, [sample[name] for sample in samples]) for name, (kind, _) in kinds.items()}


def _stack_field(kind: Kind, values: list[Any]) -> Piece:
    if kind == "array":
        dtypes = frozenset(value.dtype.newbyteorder("=").str for value in values)
        flat = np.concatenate([value.ravel() for value in values], dtype=common_dtype(dtypes), casting="unsafe")
        return Piece(kind, flat, np.array([value.shape for value in values], dtype=np.int64), dtypes)
    if kind == "text":
        texts = [value.encode("utf-8", "surrogatepass") for value in values]  # JSON may contain lone surrogates
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        return Piece(kind, np.frombuffer(b"".join(texts), np.uint8), lengths[:, None], frozenset({"|u1"}))
    dtypes = frozenset(number_dtype(value) for value in values)
    flat = np.array(values, dtype=common_dtype(dtypes))
    return Piece(kind, flat, np.empty((len(values), 0), np.int64), dtypes)


def number_dtype(value: bool | int | float) -> str:
    """The dtype for a plain Python number."""
    if isinstance(value, bool):
        return np.dtype(np.bool_).str
    return np.dtype(np.int64 if isinstance(value, int) else np.float64).str


def common_dtype(dtypes: Iterable[str]) -> np.dtype[Any]:
    # Promotion of three dtypes can depend on their order: sorted, the result depends on the set alone.
    return np.result_type(*(np.dtype(dtype) for dtype in sorted(dtypes)))


@dataclass(frozen=True)
class Column:
    """One field of all samples; item i is its value in sample i."""

    kind: Kind
    dtype: np.dtype[Any]
    """The dtype of returned values; the stored dtype may be smaller."""
    values: Values
    """Values of all samples, concatenated. Text is UTF-8."""
    shapes: Values
    """Shape (samples, dims)."""
    ends: Values
    """Shape (samples,): the end of each sample's values."""

    def __getitem__(self, index: int) -> Any:
        flat = self.stored(index, index + 1)
        if self.kind == "text":
            return flat.tobytes().decode("utf-8", "surrogatepass")
        value = flat.astype(self.dtype)  # a copy, which the caller may change
        if self.kind == "number":
            return value.item()
        return value if self.shapes.shape[1] == 1 else value.reshape(self.shapes[index : index + 1][0])

    def stored(self, first: int, last: int) -> NDArray[Any]:
        """The stored values of the samples ``first`` to ``last`` (exclusive), concatenated."""
        if last == 0:
            return self.values[:0]
        ends = self.ends[max(0, first - 1) : last]
        return self.values[ends[0] if first else 0 : ends[-1]]

    @property
    def size(self) -> int:
        """Total number of values in all samples."""
        return len(self.values)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All values of all samples, a block at a time, converted to ``dtype``."""
        for block in range(0, len(self.values), BLOCK_VALUES):
            yield self.values[block : block + BLOCK_VALUES].astype(self.dtype)


class ColumnWriter:
    """Appends pieces of one column to a storage, each in the smallest possible dtype; ``finish`` converts them to a
    common dtype."""

    def __init__(self, storage: Storage, name: str, kind: Kind, dims: int) -> None:
        self.storage = storage
        self.name = name
        self.kind = kind
        self.dims = dims
        self._total = 0
        self._dtypes: set[str] = set()
        self._runs: list[tuple[np.dtype[Any], int]] = []  # (stored dtype, how many consecutive values have it)

    def add(self, piece: Piece) -> None:
        self.add_stored(piece, piece.values, np.prod(piece.shapes, axis=1, dtype=np.int64))

    def add_stored(self, piece: Piece, values: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Add a piece of which only some values are stored.

        Args:
            values: the stored values.
            lengths: shape (samples,): number of stored values per sample.
        """
        stored = values.astype(self._stored_dtype(values))
        self._dtypes |= piece.dtypes
        if self._runs and self._runs[-1][0] == stored.dtype:
            self._runs[-1] = (stored.dtype, self._runs[-1][1] + len(stored))
        elif len(stored):
            self._runs.append((stored.dtype, len(stored)))
        self.storage.append(f"{self.name}.values.bin", stored.tobytes())
        self.storage.append(f"{self.name}.shapes.bin", piece.shapes.tobytes())
        self.storage.append(f"{self.name}.ends.bin", (self._total + np.cumsum(lengths)).tobytes())
        self._total += len(stored)

    def _stored_dtype(self, values: NDArray[Any]) -> np.dtype[Any]:
        """The smallest dtype for these values and those just before: ``finish`` would widen a narrower one anyway."""
        smallest = smallest_dtype(values)
        before = self._runs[-1][0] if self._runs else smallest
        return common_stored_dtype([before, smallest], values.dtype)

    def finish(self) -> dict[str, Any]:
        """Finish the column; return the metadata that ``read_column`` needs, as plain values."""
        dtype = common_dtype(self._dtypes)
        stored = common_stored_dtype([found for found, _ in self._runs], dtype)
        if any(found != stored for found, _ in self._runs):
            self._rewrite(stored)
        return {"name": self.name, "kind": self.kind, "dims": self.dims, "dtype": dtype.str, "stored": stored.str}

    def _rewrite(self, dtype: np.dtype[Any]) -> None:
        """Rewrite all values in one dtype."""
        written = self.storage.values(f"{self.name}.values.bin", np.dtype(np.uint8))
        start = 0
        for found, count in self._runs:
            end = start + count * found.itemsize
            for block in range(start, end, BLOCK_VALUES * found.itemsize):
                data = written[block : min(block + BLOCK_VALUES * found.itemsize, end)].view(found)
                self.storage.append(f"{self.name}.wider.bin", data.astype(dtype).tobytes())
            start = end
        self.storage.replace(f"{self.name}.values.bin", by=f"{self.name}.wider.bin")


def smallest_dtype(values: NDArray[Any]) -> np.dtype[Any]:
    """The smallest integer dtype that holds these integers; for values of another kind, their own dtype."""
    if values.dtype.kind not in "iu" or not values.size:
        return values.dtype
    return common_stored_dtype([np.min_scalar_type(values.min()), np.min_scalar_type(values.max())], values.dtype)


def common_stored_dtype(dtypes: Sequence[np.dtype[Any]], dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that holds values of all these: an integer smaller than ``dtype`` where one will do, else ``dtype``."""
    found = np.result_type(*dtypes) if dtypes else dtype
    smaller = dtype.kind in "iu" and found.kind in "iu" and found.itemsize < dtype.itemsize
    return found if smaller else dtype


def read_column(storage: Storage, about: dict[str, Any], samples: int) -> Column:
    int64, name, dims = np.dtype(np.int64), about["name"], about["dims"]
    column = Column(
        kind=about["kind"],
        dtype=np.dtype(about["dtype"]),
        values=storage.values(f"{name}.values.bin", np.dtype(about["stored"])),
        shapes=storage.values(f"{name}.shapes.bin", int64, dims) if dims else np.empty((samples, 0), np.int64),
        ends=storage.values(f"{name}.ends.bin", int64),
    )
    if len(column.shapes) != samples or len(column.ends) != samples:
        raise ValueError(f"the column {name} is not of {samples} samples")
    return column


class LongestField:
    """For each sample, the first dim of the longest of several array fields. This class implements ``Values``."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self.shape = columns[0].shapes.shape[:1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice | NDArray[np.int64], /) -> NDArray[np.int64]:
        longest: NDArray[np.int64] = np.maximum.reduce([column.shapes[part][:, 0] for column in self._columns])
        return longest


def count_up_to(ends: Values, limit: int) -> int:
    """How many of ``ends``, which ascend, are at most ``limit``. A bisection reads only few of them."""
    return bisect.bisect_right(range(len(ends)), limit, key=lambda index: int(ends[index : index + 1][0]))


def fingerprint(columns: dict[str, Column], samples: int) -> str:
    """Hex digest of every field of every sample in order, the same in every process, however they are stored."""
    digest = hashlib.blake2b(f"{samples} samples\n".encode(), digest_size=16)
    for name, column in sorted(columns.items()):
        about = f"{name!r} {column.kind} {column.dtype.str} {column.shapes.shape} ({column.size},)\n"
        digest.update(about.encode("utf-8", "surrogatepass"))
        for block in range(0, len(column.shapes), BLOCK_VALUES):
            digest.update(column.shapes[block : block + BLOCK_VALUES].tobytes())
        for values in column.blocks():
            digest.update(values.tobytes())
    return digest.hexdigest()


BASES = {"labels": "input_ids"}
"""Fields that are stored as differences, and the field that each is compared with."""
RUNS = "runs"


def base_of(name: str, kinds: FieldKinds) -> str | None:
    """The field that the field ``name`` is compared with; None if ``name`` is stored whole."""
    base = BASES.get(name)
    return base if kinds[name] == ("array", 1) and base is not None and kinds.get(base) == ("array", 1) else None


class DifferenceWriter:
    """As ``ColumnWriter``, but stores only the values that differ from a base column."""

    def __init__(self, storage: Storage, name: str, base: str) -> None:
        self.base = base
        self.kind: Kind = "array"
        self.dims = 1
        self._values = ColumnWriter(storage, name, "array", 1)
        self._runs = ColumnWriter(storage, f"{name}.{RUNS}", "array", 1)

    def add(self, piece: Piece, base: Piece) -> None:
        ends = np.cumsum(piece.shapes[:, 0])
        differs = _differing(piece, base)
        before = np.concatenate([[0], np.cumsum(differs)])
        self._values.add_stored(piece, piece.values[differs], np.diff(before[ends], prepend=0))
        self._runs.add(_runs(differs, ends))

    def finish(self) -> dict[str, Any]:
        """What ``read_differences`` needs to know, as plain values."""
        return {**self._values.finish(), "base": self.base, RUNS: self._runs.finish()}


def _differing(piece: Piece, base: Piece) -> NDArray[np.bool_]:
    """Shape (values,): which values are to be stored; all of them, where the two cannot be compared one by one."""
    whole = all(values.dtype.kind in "iu" for values in (piece.values, base.values))
    comparable = whole and np.array_equal(piece.shapes, base.shapes)
    return piece.values != base.values if comparable else np.ones(len(piece.values), np.bool_)


def _runs(differs: NDArray[np.bool_], ends: NDArray[np.int64]) -> Piece:
    """The runs of each sample; none goes on from one sample into the next."""
    begins_sample = np.zeros(len(differs) + 1, np.bool_)
    begins_sample[0] = begins_sample[ends] = True
    follows, goes_on = np.zeros((2, len(differs)), np.bool_)
    # a run goes on from one value to the next where both differ, and are of one sample
    follows[1:] = goes_on[:-1] = differs[:-1] & differs[1:] & ~begins_sample[1:-1]
    starts, stops = np.flatnonzero(differs & ~follows), np.flatnonzero(differs & ~goes_on) + 1
    samples = np.searchsorted(ends, starts, side="right")
    begins = np.concatenate([[0], ends])[samples]
    counts = 2 * np.bincount(samples, minlength=len(ends))
    flat = np.stack([starts - begins, stops - starts], axis=1).ravel().astype(np.int64)
    return Piece("array", flat, counts[:, None], frozenset({flat.dtype.str}))


@dataclass(frozen=True)
class DifferenceColumn(Column):
    """A column whose ``values`` are only those that differ from the values of ``base``."""

    base: Column
    runs: Column

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self._range(index, index + 1)

    @property
    def size(self) -> int:
        starts = range(0, len(self.shapes), BLOCK_VALUES)
        return sum(int(self.shapes[start : start + BLOCK_VALUES].sum()) for start in starts)

    def blocks(self) -> Iterator[NDArray[Any]]:
        first = 0
        while first < len(self.shapes):
            begin = int(self.base.ends[first - 1 : first][0]) if first else 0
            last = max(first + 1, count_up_to(self.base.ends, begin + BLOCK_VALUES))
            yield self._range(first, last)
            first = last

    def _range(self, first: int, last: int) -> NDArray[Any]:
        """The values of some samples, end to end."""
        lengths = self.shapes[first:last][:, 0]
        if not np.array_equal(lengths, self.base.shapes[first:last][:, 0]):
            if last - first > 1:
                return np.concatenate([self._range(index, index + 1) for index in range(first, last)])
            return self.stored(first, last).astype(self.dtype)  # nothing was compared: all of it is stored
        values = self.base.stored(first, last).astype(self.dtype)
        runs = self.runs.stored(first, last).astype(np.int64).reshape(-1, 2)
        if len(runs):
            ends = self.runs.ends[max(0, first - 1) : last]
            of_sample = np.diff(ends if first else np.concatenate([[0], ends])) // 2
            starts = runs[:, 0] + np.repeat(np.cumsum(lengths) - lengths, of_sample)
            within = np.arange(runs[:, 1].sum()) - np.repeat(np.cumsum(runs[:, 1]) - runs[:, 1], runs[:, 1])
            values[np.repeat(starts, runs[:, 1]) + within] = self.stored(first, last)
        return values


def read_differences(storage: Storage, about: dict[str, Any], base: Column, samples: int) -> DifferenceColumn:
    plain = read_column(storage, about, samples)
    runs = read_column(storage, about[RUNS], samples)
    return DifferenceColumn(plain.kind, plain.dtype, plain.values, plain.shapes, plain.ends, base, runs)
