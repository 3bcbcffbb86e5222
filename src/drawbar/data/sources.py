"""Records from files, globs and built-in sources. A record is a plain dict.

``.txt`` files give ``{"text": ...}`` by line, paragraph or whole file; ``.jsonl`` files give one JSON object a line.
``python_stdlib`` is real text that is on every machine: the source files of Python's own standard library.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

from drawbar.errors import UserError, nearest

Record = dict[str, Any]
SampleBy = Literal["line", "paragraph", "document"]

SUFFIXES = (".txt", ".jsonl")
PYTHON_STDLIB = "python_stdlib"
BUILT_IN_SOURCES = (PYTHON_STDLIB,)

_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}


class _Entry(NamedTuple):
    record: Record
    path: Path
    line: int | None
    """First line of the record in its file, from 1; None where the record is the whole file."""


class Records(Sequence[Record]):
    """Records in memory, each of which can say where it came from."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [entry.record for entry in self._entries[index]]
        return self._entries[index].record

    def where(self, index: int) -> str:
        """File and line of a record, for messages: ``data/train.jsonl:17``."""
        entry = self._entries[index]
        return str(entry.path) if entry.line is None else f"{entry.path}:{entry.line}"


def open_records(spec: str | list[str], split: str, sample_by: SampleBy) -> Records:
    """All records of the files that ``spec`` names, in the order given; a glob's files in the order of their names.

    Args:
        spec: a file, a glob, the name of a built-in source, or a list of them.
        split: ``train``, ``validation`` or ``test``: which part of a built-in source. Files are read whole.
        sample_by: what one record of a ``.txt`` file is.

    Raises:
        UserError: a file that is missing, empty, unreadable, not UTF-8 or of an unknown kind, or broken JSON.
    """
    entries: list[_Entry] = []
    for item in [spec] if isinstance(spec, str) else spec:
        try:
            if item == PYTHON_STDLIB:
                entries += _python_stdlib(split)
            else:
                for path in _files(item, key=f"data.{split}"):
                    entries += _read(path, sample_by)
        except OSError as error:
            raise UserError(
                f"cannot read {error.filename or item}: {error.strerror}",
                where=f"data.{split}",
                remedy="check the path and its permissions",
            ) from error
    return Records(entries)


def _files(item: str, key: str) -> list[Path]:
    """The files that one item of the setting ``key`` names."""
    path = Path(item)
    if path.is_dir():
        suffix = next((suffix for suffix in SUFFIXES if any(path.glob(f"*{suffix}"))), SUFFIXES[0])
        raise UserError(
            f"{item} is a folder", where=key, remedy=f"name the files in it with a glob: {path / ('*' + suffix)}"
        )
    if path.exists():
        return [path]
    if not glob.has_magic(item):
        raise _missing(path, key)
    matches = [Path(match) for match in sorted(glob.glob(item, recursive=True))]
    files = [match for match in matches if not match.is_dir()]
    if not files:
        raise UserError(
            f"no file matches {item}",
            where=key,
            remedy="check the folder and the pattern; ** stands for any number of folders",
        )
    return files


def _missing(path: Path, key: str) -> UserError:
    folder = path.parent
    if not folder.is_dir():
        return UserError(
            f"there is no file {path}: the folder {folder} does not exist",
            where=key,
            remedy=f"check the path; it is taken from the folder {Path.cwd()}",
        )
    names = {name: str(folder / name) for name in os.listdir(folder) if name.endswith(SUFFIXES)}
    if folder == Path():
        names |= {name: name for name in BUILT_IN_SOURCES}
    guess = nearest(path.name, names)
    hint = (
        f"did you mean {names[guess]}?" if guess else f"give a file, a glob, or one of: {', '.join(BUILT_IN_SOURCES)}"
    )
    return UserError(f"there is no file {path}", where=key, remedy=hint)


def _read(path: Path, sample_by: SampleBy) -> list[_Entry]:
    """All records of one file; at least one."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path} is of an unknown kind ({suffix or 'no extension'})",
            where=str(path),
            remedy=f"supported are: {', '.join(SUFFIXES)}; JSON must have one object a line (.jsonl)",
        )
    text = _text(path)
    if suffix == ".jsonl":
        entries = list(_json_lines(path, text))
    elif sample_by == "document":
        entries = [_Entry({"text": text}, path, None)] if text.strip() else []
    else:
        pieces = _lines(text) if sample_by == "line" else _paragraphs(text)
        entries = [_Entry({"text": piece}, path, line) for line, piece in pieces]
    if not entries:
        raise UserError(
            f"{path} has no records: {'it holds only blank lines' if text else 'it is empty'}",
            where=str(path),
            remedy="put data in the file, or leave it out",
        )
    return entries


def _text(path: Path) -> str:
    """A UTF-8 file without its byte order mark; every line ends in a bare newline."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}",
            where=f"{path}:{line}",
            remedy=f"convert it, for example: iconv -f ISO-8859-1 -t UTF-8 {path.name} > utf8-{path.name}",
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of every line that is not blank."""
    for number, line in enumerate(text.split("\n"), start=1):  # str.splitlines would cut at form feeds too
        if line.strip():
            yield number, line


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, paragraph); a paragraph is a run of lines that are not blank."""
    first, lines = 0, list[str]()
    for number, line in _lines(text):
        if lines and number != first + len(lines):
            yield first, "\n".join(lines)
            lines = []
        if not lines:
            first = number
        lines.append(line)
    if lines:
        yield first, "\n".join(lines)


def _json_lines(path: Path, text: str) -> Iterator[_Entry]:
    for number, line in _lines(text):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"line {number} of {path} is not valid JSON: {error.msg} at column {error.colno}",
                where=where,
                remedy="mend the line; a .jsonl file holds one complete JSON object on each line",
            ) from error
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"line {number} of {path} cannot be read: {error}",
                where=where,
                remedy="mend the line; numbers may have 4300 digits, and objects lie some hundred levels deep",
            ) from error
        if not isinstance(record, dict):
            raise UserError(
                f"line {number} of {path} holds a JSON {type(record).__name__}, not an object",
                where=where,
                remedy='write each record as an object, such as {"text": "..."}',
            )
        if "\\ud" in line.lower():  # only an escape can smuggle in half a character
            _refuse_half_characters(record, where)
        yield _Entry(record, path, number)


def _refuse_half_characters(record: Record, where: str) -> None:
    """Half of a surrogate pair is legal JSON, but no text: tokenizers refuse it with an obscure error."""
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            f"a string holds half of a surrogate pair (\\u{ord(half):04x}), which is not a character",
            where=where,
            remedy="remove it, or write the character whole",
        ) from error


def _python_stdlib(split: str) -> list[_Entry]:
    """One record a file, sorted by path. A hash of its path puts a file into the same split on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    entries = []
    for relative in _python_files(root):
        if _split_of(relative) != split:
            continue
        try:
            text = (root / relative).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few files are in old encodings, on purpose
        if text.strip():
            entries.append(_Entry({"text": text, "path": relative}, root / relative, None))
    if not entries:
        raise UserError(
            f"this Python has no standard library sources for the split {split!r} in {root}",
            where=f"data.{split}",
            remedy="name a file of your own",
        )
    return entries


def _python_files(root: Path) -> list[str]:
    """Paths of the library's modules, relative to ``root``, without tests and installed packages."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def _split_of(path: str) -> str:
    """One path in twenty is for validation, one for testing."""
    share = int.from_bytes(hashlib.sha256(path.encode()).digest()) % 20
    return {0: "validation", 1: "test"}.get(share, "train")
