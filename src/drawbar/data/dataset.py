"""Encoded samples, numbered, counted and fingerprinted: in memory, or in files."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from drawbar.data.columns import (
    Column,
    ColumnWriter,
    DifferenceWriter,
    FieldKinds,
    LongestField,
    MemoryStorage,
    Sample,
    Storage,
    Values,
    base_of,
    describe_kind_mismatch,
    fingerprint,
    read_column,
    read_differences,
)
from drawbar.data.encode import RESERVED_FIELDS, Chunk, Encode, OnProgress, encode_chunks, field_kinds_error
from drawbar.data.readers import Record
from drawbar.data.sources import KEPT_MESSAGES, Reading, read_list
from drawbar.errors import UserError

__all__ = [
    "RESERVED_FIELDS",
    "Encode",
    "EncodedDataset",
    "NoSamples",
    "OnProgress",
    "Sample",
    "encode_in_memory",
    "encode_records",
    "write_samples",
]

RECORD_OF = "record_of.bin"


class NoSamples(UserError):
    """No record gave a sample."""


@dataclass(frozen=True)
class EncodedDataset:
    """Samples 0..n-1. An item is a dict: the sample's fields, its number as ``id``, and ``[number]`` as ``ids``.

    Array fields are copies, which may be modified. Other fields are plain Python values.
    """

    columns: dict[str, Column]
    record_of: NDArray[np.int64]
    """Shape (samples,): the record that each sample came from; non-decreasing."""
    records: int
    """Number of records that gave samples or were dropped."""
    records_of_sources: list[int]
    """Number of records in each source, in order, without unreadable ones."""
    dropped: int
    """Number of records for which encode returned no sample."""
    skipped: list[str]
    """Error messages of skipped bad records: at most 1000 for unreadable records, and 1000 for failed encodings."""
    skipped_count: int
    """Number of skipped bad records."""
    truncated: int
    """Samples that encode reported as truncated."""
    tokens: int
    """Number of tokens in all samples; number of samples if they have no ``input_ids``."""
    fingerprint: str
    """Hex digest of every field of every sample in order, the same in every process."""

    def __len__(self) -> int:
        return len(self.record_of)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {**{name: column[index] for name, column in self.columns.items()}, "id": index, "ids": [index]}

    def with_numbers(self, fields: Mapping[str, NDArray[np.float64]]) -> "EncodedDataset":
        """The samples with further fields, a number for each sample. They do not count for the fingerprint."""
        no_dims, ends = np.empty((len(self), 0), np.int64), np.arange(1, len(self) + 1)
        added = {name: Column("number", values.dtype, values, no_dims, ends) for name, values in fields.items()}
        return replace(self, columns={**self.columns, **added})

    @property
    def fields(self) -> dict[str, str]:
        """Field name → ``scalar`` or ``array``."""
        return {name: "array" if column.kind == "array" else "scalar" for name, column in self.columns.items()}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Shape (samples,): number of tokens in ``input_ids``; 1 if samples have none."""
        return self.stored_lengths("input_ids")[:]

    @property
    def samples_of_sources(self) -> NDArray[np.int64]:
        """Shape (sources,): number of samples of each source; samples are ordered by source."""
        ends = np.searchsorted(self.record_of, np.cumsum(self.records_of_sources))
        return np.diff(ends, prepend=0)

    def field_lengths(self, name: str) -> NDArray[np.int64]:
        """Shape (samples,): the length of the first dim of an array field; 1 for a scalar."""
        return self.stored_lengths(name)[:]

    def stored_lengths(self, *names: str) -> Values:
        """Shape (samples,): the length of the longest of these fields in each sample, read on access; 1 if none of them
        is an array field."""
        arrays = [column for name, column in self.columns.items() if name in names and column.kind == "array"]
        return LongestField(arrays) if arrays else np.broadcast_to(np.int64(1), len(self))


def encode_records(
    records: Sequence[Record],
    encode: Encode,
    *,
    describe: Callable[[int], str],
    progress: OnProgress | None = None,
    on_bad_record: str = "error",
) -> EncodedDataset:
    """Encode every record, in order, in memory and in this process.

    Args:
        records: plain dicts.
        encode: see ``Encode``. Lists and tensors become numpy arrays. The field ``truncated`` of a sample is whether
            encode truncated it; such samples are counted, and the field is not stored.
        describe: describes the origin of record i, for messages.
        progress: see ``OnProgress``; the last call is (n, n).
        on_bad_record: ``skip`` omits records that ``encode`` fails on; ``error`` stops at the first.

    Raises:
        UserError: ``encode`` failed on a record or returned an invalid result, samples differ in their fields, or there
            are no samples.
    """
    return encode_in_memory(read_list(records, describe), encode, progress=progress, on_bad_record=on_bad_record)


def encode_in_memory(
    reading: Reading, encode: Encode, *, progress: OnProgress | None = None, on_bad_record: str
) -> EncodedDataset:
    """As ``encode_records``, for records that can be read only once (``Reading``)."""
    storage = MemoryStorage()
    about = write_samples(storage, reading, encode, progress=progress, on_bad_record=on_bad_record, workers=0)
    return read_samples(storage, about)


def write_samples(
    storage: Storage,
    reading: Reading,
    encode: Encode,
    *,
    progress: OnProgress | None,
    on_bad_record: str,
    workers: int | Literal["auto"],
    timeout: float = float("inf"),
) -> dict[str, Any]:
    """Encode every record into a storage; returns the metadata for ``read_samples``, as plain values.

    Only a few records and samples are in memory at a time.

    Args: as for ``encode_records`` and ``encode_chunks``.
    """
    writer = _SamplesWriter(storage)
    with closing(
        encode_chunks(reading, encode, skip=on_bad_record == "skip", workers=workers, timeout=timeout)
    ) as chunks:
        for chunk in chunks:
            writer.add(chunk)
            if progress:
                progress(writer.records + reading.bad_count, reading.total)
    return writer.finish(reading)


class _SamplesWriter:
    """Writes chunks, in the order of the records."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.columns: dict[str, ColumnWriter | DifferenceWriter] = {}
        self.records = self.samples = self.dropped = self.truncated = self.tokens = self.skipped_count = 0
        self.skipped: list[str] = []

    def add(self, chunk: Chunk) -> None:
        if len(chunk.record_of):
            self._add_samples(chunk)
        for error in chunk.skipped[: KEPT_MESSAGES - len(self.skipped)]:
            self.skipped.append(f"{error.where}: {error.what}")
        if chunk.fatal:
            raise chunk.fatal
        self.records += chunk.records
        self.samples += len(chunk.record_of)
        self.dropped += chunk.dropped
        self.truncated += chunk.truncated
        self.skipped_count += len(chunk.skipped)

    def _add_samples(self, chunk: Chunk) -> None:
        kinds: FieldKinds = {name: (piece.kind, piece.shapes.shape[1]) for name, piece in chunk.pieces.items()}
        if not self.samples:
            self.columns = {name: self._column(number, name, kinds) for number, name in enumerate(kinds)}
        expected: FieldKinds = {name: (column.kind, column.dims) for name, column in self.columns.items()}
        if kinds != expected:
            raise field_kinds_error(describe_kind_mismatch(expected, kinds), chunk.where)
        for name, piece in chunk.pieces.items():
            column = self.columns[name]
            if isinstance(column, DifferenceWriter):
                column.add(piece, chunk.pieces[column.base])
            else:
                column.add(piece)
        tokens = chunk.pieces.get("input_ids")
        self.tokens += len(chunk.record_of) if tokens is None else len(tokens.values)
        self.storage.append(RECORD_OF, chunk.record_of.tobytes())

    def _column(self, number: int, name: str, kinds: FieldKinds) -> ColumnWriter | DifferenceWriter:
        base = base_of(name, kinds)
        if base is not None:
            return DifferenceWriter(self.storage, f"{number:02d}", base)
        return ColumnWriter(self.storage, f"{number:02d}", *kinds[name])

    def finish(self, reading: Reading) -> dict[str, Any]:
        if not self.samples:
            raise NoSamples(
                f"no samples: the task's encode dropped all {self.records} records"
                + (f"; the first: {self.skipped[0]}" if self.skipped else ""),
                where=reading.first,
                remedy="check that the records contain what the task expects, and that they are long enough",
            )
        fields = {name: column.finish() for name, column in self.columns.items()}
        columns = _read_columns(self.storage, fields, self.samples)
        return {
            "samples": self.samples,
            "records": self.records - self.skipped_count,
            "sources": reading.counts,
            "fields": fields,
            "dropped": self.dropped,
            "skipped": reading.bad + self.skipped,
            "skipped_count": reading.bad_count + self.skipped_count,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "fingerprint": fingerprint(columns, self.samples),
        }


def read_samples(storage: Storage, about: dict[str, Any]) -> EncodedDataset:
    """The samples of a storage, from the metadata that ``write_samples`` returned. Raises ValueError if the counts
    differ."""
    return EncodedDataset(
        columns=_read_columns(storage, about["fields"], about["samples"]),
        record_of=storage.array(RECORD_OF, np.dtype(np.int64)).reshape(about["samples"]),
        records=about["records"],
        records_of_sources=about["sources"],
        dropped=about["dropped"],
        skipped=about["skipped"],
        skipped_count=about["skipped_count"],
        truncated=about["truncated"],
        tokens=about["tokens"],
        fingerprint=about["fingerprint"],
    )


def _read_columns(storage: Storage, fields: dict[str, dict[str, Any]], samples: int) -> dict[str, Column]:
    columns = {name: read_column(storage, about, samples) for name, about in fields.items()}
    for name, about in fields.items():
        if "base" in about:
            columns[name] = read_differences(storage, about, columns[about["base"]], samples)
    return columns
