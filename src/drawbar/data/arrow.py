"""Readers of ``.parquet`` and ``.arrow`` files, and what all readers of Arrow tables share. Values are plain Python."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from drawbar.data.class_labels import Feature, class_features, class_names, features_of, with_class_numbers
from drawbar.data.readers import BadRecord, FileReader, RawRecord, Reader, Record
from drawbar.errors import UserError

ROWS_AT_ONCE = 1024


class Group(NamedTuple):
    """Table rows that are stored together, in Arrow record batches, each read when one of its rows is asked for."""

    rows: int
    record_batches: Iterator[Any]
    """Or tables: both have rows and columns."""


class _RowFinder:
    """Finds rows of a group by number. Numbers must not decrease: record batches are read once and not cached."""

    def __init__(self, record_batches: Iterator[Any]) -> None:
        self._record_batches = record_batches
        self._begin = self._end = 0
        self._columns: list[tuple[str, Any]] = []

    def row(self, number: int) -> Record:
        while number >= self._end:
            batch = next(self._record_batches)
            self._begin, self._end = self._end, self._end + batch.num_rows
            self._columns = list(zip(batch.schema.names, batch.columns, strict=True))
        return {name: column[number - self._begin].as_py() for name, column in self._columns}


class ColumnarReader(Reader):
    """Reads rows of Arrow tables, group by group."""

    no_records: ClassVar[str] = "it has no rows"

    @abstractmethod
    def groups(self) -> Iterator[Group]:
        """The rows in order."""

    @property
    @abstractmethod
    def name(self) -> Path:
        """The path, for messages."""

    @property
    @abstractmethod
    def features(self) -> dict[str, Feature]:
        """The types of the columns, as `datasets` stored them; empty where another program wrote the rows."""

    @cached_property
    def _class_features(self) -> dict[str, Feature]:
        return class_features(self.features)

    def class_names(self, column: str) -> list[str] | None:
        return class_names(self._class_features, column)

    def units(self) -> Iterator[RawRecord]:
        import pyarrow as pa

        line = 0
        try:
            for group in self.groups():
                cursor = _RowFinder(group.record_batches)
                for number in range(group.rows):
                    line += 1
                    yield RawRecord((cursor, number), self.name, line)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    def where(self, unit: RawRecord) -> str:
        return f"{unit.path}, row {unit.line}"

    def decode(self, unit: RawRecord) -> Record:
        import pyarrow as pa

        cursor, number = unit.raw
        try:
            return with_class_numbers(cursor.row(number), self._class_features)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error
        except (ValueError, OverflowError) as error:  # not UTF-8; a date beyond those of Python; no such class
            raise BadRecord(
                f"a value cannot be a Python value: {error}",
                where=self.where(unit),
                remedy="write the column again as what it holds, such as binary, or text in UTF-8",
            ) from error

    def _damaged(self, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror:  # from the operating system: the file may be whole
            raise error
        reason = str(error).strip().split("\n")[0].rstrip(".")
        return UserError(
            f"{self.name} cannot be read as what its name says: {reason}",
            where=str(self.name),
            remedy="it is damaged, cut off or of another kind: copy, download or write it again",
        )


@dataclass(frozen=True)
class _ColumnarFile(FileReader, ColumnarReader):
    @property
    def name(self) -> Path:
        return self.path

    @property
    def features(self) -> dict[str, Feature]:
        import pyarrow as pa

        try:
            return features_of(self.schema().metadata)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from error

    @abstractmethod
    def schema(self) -> Any:
        """The ``pyarrow.Schema`` of the file: names and types of its columns."""


class ParquetFile(_ColumnarFile):
    """A ``.parquet`` file. Row groups of which no row is asked for are not read."""

    holds: ClassVar[frozenset[str]] = frozenset({"parquet"})

    def schema(self) -> Any:
        import pyarrow.parquet as pq

        return pq.read_schema(self.path)

    def groups(self) -> Iterator[Group]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            for number in range(file.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                yield Group(rows, file.iter_batches(ROWS_AT_ONCE, row_groups=[number]))


class ArrowFile(_ColumnarFile):
    """An IPC file or an IPC stream; `datasets` writes the latter."""

    holds: ClassVar[frozenset[str]] = frozenset({"arrow"})

    def schema(self) -> Any:
        with self._opened() as (schema, _):
            return schema

    def groups(self) -> Iterator[Group]:
        with self._opened() as (_, batches):
            for batch in batches:
                yield Group(batch.num_rows, iter([batch]))

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """The schema, and the record batches."""
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as source:
            if source.read(6) == b"ARROW1":  # how every IPC file begins
                file = pa.ipc.open_file(source)
                yield file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
            else:
                source.seek(0)
                stream = pa.ipc.open_stream(source)
                yield stream.schema, iter(stream)
