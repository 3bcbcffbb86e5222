"""A column that is stored as what differs from another: the labels of language models are mostly the tokens themselves.

Each run of differing values is stored as (first position, length) and its values; the other column has the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drawbar.data.columns import (
    BLOCK_VALUES,
    Column,
    ColumnWriter,
    FieldKinds,
    Kind,
    Piece,
    Storage,
    count_up_to,
    read_column,
)

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
