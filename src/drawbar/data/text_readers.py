"""The readers of text files: lines, paragraphs, documents, JSON, parallel lines. Text is read line by line; only
``.json`` files and whole documents are held in memory at once."""

import gzip
import json
import shlex
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from drawbar.data.readers import BadRecord, FileReader, RawRecord, Reader, ReadOptions, Record, open_binary
from drawbar.errors import UserError
from drawbar.runtime.log import logger
from drawbar.util.file_content import PAGES

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONG_LINE = 2**20
"""Bytes. People write no such lines, and programs rarely mean to."""


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, each with its newline; CRLF becomes a newline, and a byte order mark is left out. Raises as
    ``stored_lines``."""
    return (line[:-2] + b"\n" if line.endswith(b"\r\n") else line for line in stored_lines(path))


def stored_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, each with its newline or CRLF; a byte order mark is left out.

    Raises:
        UserError: a ``.gz`` file that is damaged or cut off.
    """
    number = 0
    with open_binary(path) as stream:
        try:
            for number, line in enumerate(stream, start=1):  # cuts only at newlines, not at form feeds
                yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path} is not a complete gzip file: {str(error).rstrip('.')}",
                where=f"{path}:{number + 1}",
                remedy="copy or download it again; `gzip -t` tells whether a file is whole",
            ) from error


def binary_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their newlines. Raises as ``whole_lines``."""
    return (line.removesuffix(b"\n") for line in whole_lines(path))


def text_of(data: bytes, path: Path, line: int) -> str:
    """UTF-8 decoded; ``line`` is the number of the first line. Raises ``BadRecord`` for other bytes, and for NUL."""

    def place(start: int) -> tuple[int, int]:
        return line + data.count(b"\n", 0, start), start - data.rfind(b"\n", 0, start)

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at_line, column = place(error.start)
        raise not_utf8(path, at_line, f"byte 0x{data[error.start]:02x} at column {column}") from error
    if b"\0" in data:
        at_line, column = place(data.index(b"\0"))
        raise holds_nul(path, at_line, f"the first at column {column}")
    return text


def holds_nul(path: Path, line: int, first: str) -> BadRecord:
    return BadRecord(
        f"the line holds NUL bytes, which no text does: {first}",
        where=f"{path}:{line}",
        remedy="a file of UTF-16 has many, and is converted by: "
        f"{_iconv(path, 'UTF-16LE')}; a file with some is damaged: copy it again",
    )


def not_utf8(path: Path, line: int, byte: str) -> BadRecord:
    with open_binary(path) as stream:
        is_utf16 = stream.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE)
    what, encoding = (": the file is UTF-16", "UTF-16") if is_utf16 else ("", "ISO-8859-1")
    return BadRecord(
        f"the line is not UTF-8 text: {byte}{what}",
        where=f"{path}:{line}",
        remedy=f"convert the file{'' if is_utf16 else ', for example'}: " + _iconv(path, encoding),
    )


def _iconv(path: Path, encoding: str) -> str:
    """The command that converts a file, to paste."""
    source, target = (shlex.quote(str(one)) for one in (path, path.with_name(f"utf8-{path.name}")))
    return f"iconv -f {encoding} -t UTF-8 {source} > {target}"


def expect_no_utf16(path: Path) -> None:
    """Raise ``BadRecord`` if the file begins like UTF-16: with its mark, or with NUL bytes."""
    with open_binary(path) as stream:
        begin = stream.read(256)
    if begin[:2] in (BOM_UTF16_LE, BOM_UTF16_BE):
        raise not_utf8(path, 1, f"byte 0x{begin[0]:02x}")
    if b"\0" in begin:
        raise holds_nul(path, 1, f"the first is byte {begin.index(0) + 1} of the file")


def _is_blank(data: bytes) -> bool:
    # bytes.strip is the quick check, and str.strip the correct one: it knows the spaces beyond ASCII too
    return not data.strip() or not data.decode("utf-8", "replace").strip()


def _numbered_text(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of every line that is not blank."""
    return ((number, line) for number, line in enumerate(lines, start=1) if not _is_blank(line))


def _warn_of_long(lines: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """The lines of a text, each of which is a record or a part of one, with a warning of the first that is too long to
    be intended."""
    said = False
    for number, line in enumerate(lines, start=1):
        if len(line) > LONG_LINE and not said:
            said = True
            _warn_of_long_line(path, number, f"{len(line) / 2**20:.1f} MiB", _looks_like(line))
        yield line


def _looks_like(line: bytes) -> str:
    begin = line.lstrip()[:1]
    if line.count(b"\r") > 1:
        return "its lines end in carriage returns alone, and are one line to everybody else: tr '\\r' '\\n' mends that"
    if begin in (b"{", b"["):
        return "it looks like JSON, which is read from .json and .jsonl files"
    if begin == b"<":
        return "it looks like HTML or XML, of which the text must be taken out first"
    return "it looks like a text without line breaks: data.sample_by=document says that this is meant"


@cache  # a file is read several times, but this is reported once
def _warn_of_long_line(path: Path, line: int, size: str, looks_like: str) -> None:
    logger.warning("%s:%d is a line of %s: %s", path, line, size, looks_like)


class TextLines(FileReader):
    """``{"text": line}`` of every line that is not blank."""

    is_text: ClassVar[bool] = True
    holds: ClassVar[frozenset[str]] = PAGES

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> FileReader:
        return {"line": TextLines, "paragraph": TextParagraphs, "document": TextDocument}[options.sample_by](path)

    def units(self) -> Iterator[RawRecord]:
        return (RawRecord(line, self.path, number) for number, line in self._lines())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        return _numbered_text(_warn_of_long(binary_lines(self.path), self.path))

    def decode(self, unit: RawRecord) -> Record:
        return {"text": text_of(unit.raw, unit.path, unit.line or 1)}


class TextParagraphs(TextLines):
    """A paragraph is a run of lines that are not blank."""

    def units(self) -> Iterator[RawRecord]:
        first, lines = 0, list[bytes]()
        for number, line in self._lines():
            if lines and number != first + len(lines):
                yield RawRecord(b"\n".join(lines), self.path, first)
                lines = []
            if not lines:
                first = number
            lines.append(line)
        if lines:
            yield RawRecord(b"\n".join(lines), self.path, first)


class TextDocument(TextLines):
    """The whole file is one record."""

    def units(self) -> Iterator[RawRecord]:
        text = b"".join(whole_lines(self.path))
        if not _is_blank(text):
            yield RawRecord(text, self.path, None)


class JsonLines(FileReader):
    """One JSON object a line; blank lines are left out."""

    is_text: ClassVar[bool] = True
    holds: ClassVar[frozenset[str]] = frozenset()

    def units(self) -> Iterator[RawRecord]:
        return (RawRecord(line, self.path, number) for number, line in _numbered_text(binary_lines(self.path)))

    def decode(self, unit: RawRecord) -> Record:
        where = self.where(unit)
        line = text_of(unit.raw, unit.path, unit.line or 1)
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadRecord(
                f"the line is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}",
                where=where,
                remedy="correct the line; a .jsonl file holds one complete JSON object on each line",
            ) from error
        except (ValueError, RecursionError) as error:
            raise _beyond_limits(error, where) from error
        record = _object(value, where)
        if "\\ud" in line.lower():  # only such an escape can produce half of a surrogate pair
            _refuse_half_characters(record, where)
        return record


class JsonFile(FileReader):
    """A ``.json`` file: one array of objects, or one object whose only list is that array; or, as `datasets` reads such
    files, one object a line."""

    is_text: ClassVar[bool] = True
    holds: ClassVar[frozenset[str]] = frozenset()
    no_records: ClassVar[str] = "its list is empty"

    def units(self) -> Iterator[RawRecord]:
        if self._has_lines():
            return self._lines.units()
        return (RawRecord(value, self.path, number) for number, value in enumerate(self._values(), start=1))

    def where(self, unit: RawRecord) -> str:
        return self._lines.where(unit) if _is_line(unit) else f"{unit.path}, record {unit.line}"

    def decode(self, unit: RawRecord) -> Record:
        if _is_line(unit):
            return self._lines.decode(unit)
        record = _object(unit.raw, self.where(unit))
        _refuse_half_characters(record, self.where(unit))
        return record

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path)

    def _has_lines(self) -> bool:
        """Whether the first line is an object without a list of records in it, or is one and not the only line."""
        lines = _numbered_text(binary_lines(self.path))
        _, first = next(lines, (0, b""))
        try:
            value = json.loads(first) if first.lstrip()[:1] == b"{" else None
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and (next(lines, None) is not None or not _lists(value))

    def _values(self) -> list[Any]:
        text = text_of(b"".join(whole_lines(self.path)), self.path, 1)
        if not text.strip():
            return []
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.path} is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}",
                where=f"{self.path}:{error.lineno}",
                remedy="correct the file: it holds one list of objects, or one object on each line",
            ) from error
        except (ValueError, RecursionError) as error:
            raise _beyond_limits(error, str(self.path)) from error
        lists = [content] if isinstance(content, list) else _lists(content)
        if len(lists) != 1:
            raise UserError(
                f"{self.path} holds no list of records: a JSON {type(content).__name__} with {len(lists)} lists",
                where=str(self.path),
                remedy='write [{"text": "..."}, ...], or one object a line',
            )
        return lists[0]


def _is_line(unit: RawRecord) -> bool:
    return isinstance(unit.raw, bytes)


def _lists(content: Any) -> list[list[Any]]:
    """The lists that are values of a JSON object."""
    return [value for value in content.values() if isinstance(value, list)] if isinstance(content, dict) else []


@dataclass(frozen=True)
class ParallelLines(Reader):
    """Line n of every file makes record n. Blank lines count: they are empty strings."""

    columns: tuple[str, ...]
    paths: tuple[Path, ...]
    """A file for each column."""
    holds: ClassVar[frozenset[str]] = PAGES

    @property
    def files(self) -> list[Path]:
        return list(self.paths)

    def units(self) -> Iterator[RawRecord]:
        rows = zip_longest(*(_warn_of_long(binary_lines(path), path) for path in self.paths))
        for number, lines in enumerate(rows, start=1):
            if None in lines:
                raise self._unequal()
            yield RawRecord(lines, self.paths[0], number)

    def decode(self, unit: RawRecord) -> Record:
        texts = (text_of(line, path, unit.line or 1) for line, path in zip(unit.raw, self.paths, strict=True))
        return dict(zip(self.columns, texts, strict=True))

    def _unequal(self) -> UserError:
        counts = {path: sum(1 for _ in binary_lines(path)) for path in self.paths}
        return UserError(
            "parallel files differ in length: " + ", ".join(f"{path} has {n} lines" for path, n in counts.items()),
            where=", ".join(str(path) for path in counts),
            remedy="line n of each must belong together: find where a line is missing or was split",
        )


def _object(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise BadRecord(
            f"it holds a JSON {type(value).__name__}, not an object",
            where=where,
            remedy='write each record as an object, such as {"text": "..."}',
        )
    return value


def _beyond_limits(error: Exception, where: str) -> BadRecord:
    return BadRecord(
        f"it cannot be read: {error}",
        where=where,
        remedy="correct it; numbers may have 4300 digits, and objects lie some hundred levels deep",
    )


def _refuse_half_characters(record: Record, where: str) -> None:
    """Half of a surrogate pair is legal JSON, but not text: tokenizers refuse it with an obscure error."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadRecord(
            f"a string holds half of a surrogate pair (\\u{ord(half):04x}), which is not a character",
            where=where,
            remedy="remove it, or write the character whole",
        ) from error
