"""Finding the files that a setting names, and the reader for each."""

import glob
import os
import shlex
from pathlib import Path
from typing import Literal

from drawbar.data.arrow import ArrowFile, ParquetFile
from drawbar.data.python_stdlib import PYTHON_STDLIB
from drawbar.data.readers import JsonFile, JsonLines, Reader, TextDocument, TextLines, TextParagraphs
from drawbar.data.tables import CsvTable, TsvTable
from drawbar.errors import UserError, nearest

SampleBy = Literal["line", "paragraph", "document"]

TEXT_SUFFIXES = (".txt", ".tsv", ".csv", ".json", ".jsonl", ".ndjson")
"""Kinds that may be compressed: ``.txt.gz``."""
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")
UNPACKERS = {".zst": "zstd -d", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zip": "unzip"}
"""What unpacks other compressed files, and keeps them."""
BUILT_IN_SOURCES = (PYTHON_STDLIB,)

_TEXT_READERS = {"line": TextLines, "paragraph": TextParagraphs, "document": TextDocument}


def reader_of(path: Path, sample_by: SampleBy, columns: list[str] | None) -> Reader:
    """The reader of one file, by the end of its name.

    Args:
        path: an existing file.
        sample_by: what one record of a ``.txt`` file is.
        columns: names of the columns of a ``.tsv`` or ``.csv`` file without a header.

    Raises:
        UserError: a file of an unknown kind.
    """
    names = tuple(columns) if columns is not None else None
    match _kind(path.name):
        case ".txt":
            return _TEXT_READERS[sample_by](path)
        case ".tsv":
            return TsvTable(path, names)
        case ".csv":
            return CsvTable(path, names)
        case ".json":
            return JsonFile(path)
        case ".jsonl" | ".ndjson":
            return JsonLines(path)
        case ".parquet":
            return ParquetFile(path)
        case ".arrow":
            return ArrowFile(path)
    unpack = UNPACKERS.get(path.suffix.lower())
    raise UserError(
        f"{path} is of an unknown kind ({''.join(path.suffixes[-2:]) or 'no extension'})",
        where=str(path),
        remedy=(f"unpack it: {unpack} {shlex.quote(str(path))}; " if unpack else "")
        + f"supported are: {', '.join(SUFFIXES)}; the text ones also as .gz",
    )


def is_table(path: Path) -> bool:
    """Whether the columns of the file may have to be named by a setting."""
    return _kind(path.name) in (".tsv", ".csv")


def is_empty(path: Path) -> bool:
    """Whether a file has no bytes; False where it cannot be opened, or is a pipe: reading it will tell."""
    try:  # files of /proc say that they have no bytes, and have some
        return path.is_file() and path.stat().st_size == 0 and not path.read_bytes()
    except OSError:
        return False


def _kind(name: str) -> str | None:
    """The suffix that tells what a file holds; None where it is not one of ours."""
    plain = name.lower().removesuffix(".gz")
    suffix = Path(plain).suffix
    return suffix if suffix in (SUFFIXES if plain == name.lower() else TEXT_SUFFIXES) else None


def find_files(item: str, key: str) -> list[Path]:
    """The files that one item of the setting ``key`` names; those of a glob in the order of their names.

    Raises:
        UserError: there is none, or it is a folder.
    """
    path = Path(item)
    if path.is_dir():
        known = [name for name in sorted(os.listdir(path)) if _kind(name)]
        suffix = known[0][known[0].lower().rindex(str(_kind(known[0]))) :] if known else SUFFIXES[0]
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


def find_file(item: str, key: str) -> Path:
    """The one file that a setting names. Raises ``UserError`` where there is none."""
    if glob.has_magic(item) and not Path(item).exists():
        raise UserError(f"{item} is a pattern", where=key, remedy="name one file: line n belongs to line n of another")
    return find_files(item, key)[0]


def _missing(path: Path, key: str) -> UserError:
    folder = path.parent
    if not folder.is_dir():
        return UserError(
            f"there is no file {path}: the folder {folder} does not exist",
            where=key,
            remedy=f"check the path; it is taken from the folder {Path.cwd()}",
        )
    names = {name: str(folder / name) for name in os.listdir(folder) if _kind(name)}
    if folder == Path():
        names |= {name: name for name in BUILT_IN_SOURCES}
    guess = nearest(path.name, names)
    hint = (
        f"did you mean {names[guess]}?" if guess else f"give a file, a glob, or one of: {', '.join(BUILT_IN_SOURCES)}"
    )
    return UserError(f"there is no file {path}", where=key, remedy=hint)
