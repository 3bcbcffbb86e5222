"""Readers of ``.csv`` and ``.tsv`` files. All values are strings."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from drawbar.data.readers import BadRecord, FileReader, RawRecord, ReadOptions, Record
from drawbar.data.text_readers import binary_lines, expect_no_utf16, holds_nul, not_utf8, stored_lines, text_of
from drawbar.errors import UserError

SEPARATORS = ";,|\t"
"""What may separate the fields of a table."""


def value_at(record: Record, column: str) -> Any:
    """A record's value under a column: ``translation.en`` is that of ``en`` in ``translation``.

    A column that has this very name comes first.

    Raises:
        KeyError: there is no such column.
    """
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, dict):
            raise KeyError(column)
        value = value[name]
    return value


def old_name(column: str, rename: Mapping[str, str]) -> str:
    """The name that a column has in the file, be it inside a column that was renamed.

    Args:
        rename: old names by new ones.
    """
    first, dot, inner = column.partition(".")
    return rename.get(column) or f"{rename.get(first, first)}{dot}{inner}"


def columns_of(record: Record) -> list[str]:
    """The names of a record's columns, and of those inside them, as ``value_at`` takes them."""
    names = []
    for name, value in record.items():
        inner = columns_of(value) if isinstance(value, dict) else []
        names += [name, *(f"{name}.{column}" for column in inner)]
    return names


def misread_header(column: str, record: Record) -> str | None:
    """A remedy if the header was split wrongly, so that the column is part of another name; None otherwise."""
    for name in record:
        if name.strip() == column:
            return f"write {column!r} without spaces around it; in a table, the names are in the header"
        for separator in SEPARATORS:
            if column in (part.strip() for part in name.split(separator)):
                return name_separator(separator)
    return None


def name_separator(separator: str) -> str:
    """The remedy for a table whose fields are not separated as they were read."""
    return (
        f"the fields of the file seem to be separated by {separator!r}: set 'data.separator={json.dumps(separator)}', "
        "which files named .csv take"
    )


LONGEST_FIELD = 2**31 - 1
"""Bytes. Python's own limit of 128 KiB is too small for a document."""


def check_names(names: Iterable[str], where: str, remedy: str) -> None:
    """Refuse column names that are empty or occur twice."""
    for name, count in Counter(names).items():
        if not name.strip():
            raise UserError("a column has no name", where=where, remedy=remedy)
        if count > 1:
            raise UserError(f"two columns are named {name!r}", where=where, remedy=remedy)


@dataclass(frozen=True)
class _Table(FileReader):
    """A table whose first line names the columns, unless ``columns`` does."""

    columns: tuple[str, ...] | None
    is_text: ClassVar[bool] = True
    holds: ClassVar[frozenset[str]] = frozenset()
    takes_columns: ClassVar[bool] = True
    no_records: ClassVar[str] = "it holds only blank lines, or a header alone"

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> FileReader:
        return cls(path, options.columns)

    @cached_property
    def header(self) -> tuple[str, ...]:
        """Names of the columns; one without a name, as pandas writes its index, is ``column 1`` by its place.

        Raises:
            UserError: the file has no first line, or it names two columns alike.
        """
        if self.columns is not None:
            return self.columns
        first = next(self.rows(), None)
        if first is None:
            raise self.empty()
        fields = self.fields(first)
        self.check_first_line(fields)
        names = tuple(name if name.strip() else f"column {at}" for at, name in enumerate(fields, start=1))
        remedy = "correct the header; for a file without one, name the columns: data.columns=[...]"
        check_names(names, f"{self.path}:{first.line}", remedy)
        return names

    def check_first_line(self, fields: list[str]) -> None:
        """Raise UserError where the first line cannot be a header."""

    def rows(self) -> Iterator[RawRecord]:
        """Every row that is not blank, the header too."""
        raise NotImplementedError

    def fields(self, row: RawRecord) -> list[str]:
        """The fields of a row. Raises ``BadRecord``."""
        raise NotImplementedError

    def units(self) -> Iterator[RawRecord]:
        rows = self.rows()
        if self.columns is None and self.header:
            next(rows)
        return rows

    def decode(self, unit: RawRecord) -> Record:
        values, header = self.fields(unit), self.header
        if len(values) != len(header):
            source = "the setting columns" if self.columns is not None else "the header"
            raise BadRecord(
                f"the line has {len(values)} fields, but {source} names {len(header)}: {', '.join(header)}",
                where=self.where(unit),
                remedy=self._other_separator(values)
                or "correct the line; look for a separator that is missing, or that is part of the text",
            )
        return dict(zip(header, values, strict=True))

    def _other_separator(self, values: list[str]) -> str | None:
        """A remedy if the header, or a row of a file without one, has more fields with another separator."""
        for separator in SEPARATORS:
            fields = sum(text.count(separator) for text in (self.header if self.columns is None else values)) + 1
            if fields > len(self.header) if self.columns is None else fields == len(self.columns):
                return name_separator(separator)
        return None


class TsvTable(_Table):
    """Fields between tabs, without quoting: a ``"`` is text."""

    def rows(self) -> Iterator[RawRecord]:
        lines = enumerate(binary_lines(self.path), start=1)
        return (RawRecord(line, self.path, number) for number, line in lines if line)

    def fields(self, row: RawRecord) -> list[str]:
        return text_of(row.raw, row.path, row.line or 1).split("\t")


@dataclass(frozen=True)
class CsvTable(_Table):
    """Fields between commas, or another ``separator``. One in quotes may hold separators, newlines and doubled quotes
    (RFC 4180)."""

    separator: str = ","

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> FileReader:
        return cls(path, options.columns, options.separator)

    def settings(self) -> list[str]:
        """A comma is not named, so that runs from before there were other separators can resume."""
        return [text for text in super().settings() if text != "separator=','"]

    def rows(self) -> Iterator[RawRecord]:
        csv.field_size_limit(LONGEST_FIELD)
        # Bytes that are not UTF-8 must not stop the reader in the middle of a row: `fields` refuses them.
        # Line breaks as they are stored: those inside quotes belong to the field.
        lines = (line.decode("utf-8", "surrogateescape") for line in stored_lines(self.path))
        reader = csv.reader(lines, delimiter=self.separator, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                row: Any = next(reader, None)
            except csv.Error as error:
                row = error
                if "unexpected end" in str(error):
                    self._never_closed(line)
            if row is None:
                return
            if row:
                yield RawRecord(row, self.path, line)

    def check_first_line(self, fields: list[str]) -> None:
        mark = self.separator.join(fields)
        if re.fullmatch(r"\ufeff?sep=.", mark):
            raise UserError(
                f"the first line, {mark}, tells Excel the separator, and is no header",
                where=f"{self.path}:1",
                remedy=f"remove the line, and set 'data.separator={json.dumps(mark[-1])}'",
            )

    def fields(self, row: RawRecord) -> list[str]:
        where = self.where(row)
        if isinstance(row.raw, csv.Error):
            expect_no_utf16(row.path)  # in UTF-16, the carriage return of a line break stands alone
        if isinstance(row.raw, csv.Error) and "new-line character" in str(row.raw):  # csv's words are for programmers
            raise BadRecord(
                "the row holds a carriage return outside of quotes",
                where=where,
                remedy="where that is how the lines of the file end, as on old Macs, convert it: "
                f"tr '\\r' '\\n' < {self.path.name} > new-{self.path.name}; else put quotes around the field",
            )
        if isinstance(row.raw, csv.Error):
            raise BadRecord(
                f"the row is not valid CSV: {row.raw}", where=where, remedy="correct it; RFC 4180 has the rules"
            )
        try:
            "\n".join(row.raw).encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF  # how surrogateescape keeps a byte
            raise not_utf8(row.path, row.line or 1, f"byte 0x{byte:02x}") from error
        for number, field in enumerate(row.raw, start=1):
            if "\0" in field:
                raise holds_nul(row.path, row.line or 1, f"the first in field {number}")
        return row.raw

    def _never_closed(self, line: int) -> NoReturn:
        raise UserError(
            f"a quoted field of the row at line {line} is never closed: the file ends within it",
            where=f"{self.path}:{line}",
            remedy='close it with a quote; a quote within a quoted field is written twice: ""',
        )
