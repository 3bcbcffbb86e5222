"""The interfaces of readers of records, and the registry of readers by file extension.

A reader yields undecoded records (``RawRecord``), so a process that needs every eighth record decodes only every
eighth.
"""

import gzip
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

from drawbar.errors import UserError
from drawbar.util.registry import Registry

Record = dict[str, Any]


class BadRecord(UserError):
    """A record that cannot be read, while those after it can. ``data.on_bad_record=skip`` skips it."""


class RawRecord(NamedTuple):
    """A record that has not been decoded."""

    raw: Any
    """Input of the reader's ``decode``, such as the bytes of a line, a list of fields, or a position in a table."""
    path: Path
    line: int | None
    """The record's first line, or in Arrow and .json files its number, from 1. None if it is the whole file."""


@dataclass(frozen=True)
class Reader(ABC):
    """Reads one file, or several in parallel. Its methods call a ``RawRecord`` a unit.

    Subclasses are frozen dataclasses: their fields are their settings.
    """

    no_records: ClassVar[str] = "it holds only blank lines"
    """Why a non-empty file has no records, for the message."""
    holds: ClassVar[frozenset[str] | None] = None
    """The kinds of content, recognized by their first bytes (``util.file_content``), that its files may have; None for
    all except pointers."""

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """All files that it reads."""

    @property
    def checked_files(self) -> list[Path]:
        """The files whose first bytes are checked before they are read."""
        return self.files

    @abstractmethod
    def units(self) -> Iterator[RawRecord]:
        """All raw records, in file order; each is valid until the next one is requested.

        Raises:
            UserError: the file as a whole cannot be read.
        """

    @abstractmethod
    def decode(self, unit: RawRecord) -> Record:
        """The record of one of this reader's units. Raises ``BadRecord``."""

    def class_names(self, column: str) -> list[str] | None:
        """The names of all classes of a column, in the order of their numbers; None if the file does not have them."""
        return None

    def where(self, unit: RawRecord) -> str:
        """File and line of a record, for messages: ``data/train.jsonl:17``."""
        return str(unit.path) if unit.line is None else f"{unit.path}:{unit.line}"

    def content(self, unit: RawRecord) -> bytes:
        """The record as bytes that do not depend on where and in what order records are stored."""
        if isinstance(unit.raw, bytes):
            return unit.raw
        try:
            record = self.decode(unit)
        except BadRecord as error:
            return error.what.encode("utf-8", "replace")
        return json.dumps(record, sort_keys=True, default=str).encode()

    def settings(self) -> list[str]:
        """Everything that determines the records, besides the contents of the files."""
        names = [field.name for field in fields(self) if field.name not in ("path", "paths")]
        return [type(self).__name__, *(f"{name}={getattr(self, name)!r}" for name in names)]

    def empty(self) -> UserError:
        """The error for a reader that has no units."""
        path = self.files[0]
        with open_binary(path) as stream:
            reason = self.no_records if stream.read(1) else "it is empty"
        return UserError(
            f"{path} has no records: {reason}", where=str(path), remedy="put data in the file, or leave it out"
        )


@dataclass(frozen=True)
class ReadOptions:
    """The configuration's options for reading files; a reader uses those that apply to it."""

    sample_by: Literal["line", "paragraph", "document"] = "line"
    """``data.sample_by``: what one record of a text file is."""
    columns: tuple[str, ...] | None = None
    """``columns``: column names of a table without a header."""
    separator: str = ","
    """``separator``: field separator of ``.csv`` files."""


@dataclass(frozen=True)
class FileReader(Reader):
    """Reads one file. The file's extension, or the setting ``reader``, selects the subclass."""

    path: Path
    is_text: ClassVar[bool] = False
    """Whether it reads ``.gz`` files of its kind, too, as ``open_binary`` does."""
    takes_columns: ClassVar[bool] = False
    """Whether it takes ``ReadOptions.columns``."""

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> "FileReader":
        """The reader of a file that exists. Nothing is read yet."""
        return cls(path)

    @property
    def files(self) -> list[Path]:
        """The one file that is read."""
        return [self.path]


READERS: Registry[type[FileReader]] = Registry(
    "reader",
    "drawbar.readers",
    {
        ".txt": "drawbar.data.text_readers:TextLines",
        ".tsv": "drawbar.data.tables:TsvTable",
        ".csv": "drawbar.data.tables:CsvTable",
        ".json": "drawbar.data.text_readers:JsonFile",
        ".jsonl": "drawbar.data.text_readers:JsonLines",
        ".ndjson": "drawbar.data.text_readers:JsonLines",
        ".parquet": "drawbar.data.arrow:ParquetFile",
        ".arrow": "drawbar.data.arrow:ArrowFile",
    },
)
"""Readers by file extension, such as ``.csv``."""


def open_binary(path: Path) -> IO[bytes]:
    """Open a file, decompressing it if its name ends in ``.gz``."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
