"""Finds the files that a setting names and the reader for each, and checks that a file's content fits its reader."""

import glob
import gzip
import os
import shlex
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from drawbar.config.io.user_modules import cause, find_class
from drawbar.data.python_stdlib import PYTHON_STDLIB
from drawbar.data.readers import READERS, FileReader, Reader, ReadOptions
from drawbar.errors import UserError, nearest
from drawbar.runtime.log import logger
from drawbar.util.file_content import BEGIN_BYTES, GZIP, PAGES, PLAIN, Content, content_of, content_of_bytes, pointer

UNPACKERS = {".zst": "zstd -d", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zip": "unzip"}
"""Commands to unpack files compressed in other formats, keeping the original, by extension."""
BUILT_IN_SOURCES = (PYTHON_STDLIB,)
_pages_said: set[tuple[str, Path]] = set()
"""Settings and folders for which HTML pages were already logged, as files are opened several times."""


def reader_of(path: Path, options: ReadOptions, reader: str | None, key: str) -> FileReader:
    """The reader of one file: the requested one, or the default for the file's extension.

    Args:
        path: an existing file.
        reader: an extension such as ``.csv``, or the user's own as ``package.module:Class``.
        key: the setting that names the file.

    Raises:
        UserError: the file's format is unknown, or there is no such reader.
    """
    named = find_class(READERS, FileReader, reader, f"{key}.reader") if reader is not None else None
    made = named or _usual_reader(path)
    try:
        return made.open(path, options)
    except TypeError as error:  # it lacks a method
        what = f"the reader {made.__name__} cannot be created: {cause(error)}"
        raise UserError(what, where=str(path), remedy="define its methods units and decode") from error


def _usual_reader(path: Path) -> type[FileReader]:
    with suppress(LookupError):
        found = _reader_of_ending(_ending(path.name))
        if found.is_text or not path.name.lower().endswith(".gz"):
            return found
    unpack = UNPACKERS.get(path.suffix.lower())
    raise UserError(
        f"{path} has an unknown format ({''.join(path.suffixes[-2:]) or 'no extension'})",
        where=str(path),
        remedy=(f"unpack it: {unpack} {shlex.quote(str(path))}; " if unpack else "")
        + f"supported are: {', '.join(READERS.names())}; the text ones also as .gz",
    )


def _ending(name: str) -> str:
    """``.jsonl`` of ``a.jsonl.gz``."""
    return Path(name.lower().removesuffix(".gz")).suffix


@cache  # many files share an extension, and searching all packages is slow; errors are not cached
def _reader_of_ending(ending: str) -> type[FileReader]:
    """The reader for an extension. Raises LookupError if there is none, and UserError if it cannot be imported."""
    if ending not in READERS:
        raise LookupError(ending)
    return find_class(READERS, FileReader, ending, "data")


def is_empty(path: Path) -> bool:
    """Whether a file has no bytes; False if it cannot be opened or is a pipe: reading it will tell."""
    try:  # files in /proc report a size of 0, but have content
        return path.is_file() and path.stat().st_size == 0 and not path.read_bytes()
    except OSError:
        return False


def check_contents(reader: Reader, key: str) -> None:
    """Check by their first bytes that the files contain what the reader reads. Files that cannot be opened pass:
    reading them will report the error.

    Reading an HTML page as plain text may be intended, and is only logged.

    Args:
        key: the setting that names the files.

    Raises:
        UserError: a file contains something else.
    """
    for path in reader.checked_files:
        found = None
        with suppress(OSError):
            found = pointer(path) if reader.holds is None else _content(path)
        if found is None or found.name in (reader.holds or ()):
            if found is not None and found.name in PAGES and (key, path.parent) not in _pages_said:
                _pages_said.add((key, path.parent))
                logger.warning("%s: %s begins as %s does, and its tags are read as text", key, path, found.what)
            continue
        raise UserError(
            f"{path} is not what its name says, but {found.what}", where=str(path), remedy=found.remedy_for(path)
        )


def _content(path: Path) -> Content | None:
    """The content of a file, unpacked if its name ends in ``.gz``; None for plain text and the like."""
    found = content_of(path)
    if path.suffix.lower() != ".gz" or not path.is_file():
        return found
    if found is not GZIP:
        return found._replace(name=PLAIN.name) if found else PLAIN if path.stat().st_size else None
    with suppress(EOFError, zlib.error), gzip.open(path) as stream:
        return content_of_bytes(stream.read(BEGIN_BYTES))
    return None


def find_files(item: str, key: str) -> list[Path]:
    """The files that one item of the setting ``key`` names; those of a glob sorted by name.

    Raises:
        UserError: there are none, or it is a folder.
    """
    path = Path(item)
    if path.is_dir():
        check_not_saved_dataset(path, key)
        endings = READERS.names()
        known = [name for name in sorted(os.listdir(path)) if _ending(name) in endings]
        suffix = known[0][known[0].lower().rindex(_ending(known[0])) :] if known else endings[0]
        raise UserError(
            f"{item} is a folder", where=key, remedy=f"name the files in it with a glob: {path / ('*' + suffix)}"
        )
    if path.exists():
        return [path]
    if not glob.has_magic(item):
        _check_folder(path, key)
        raise _missing(path, key)
    matches = [Path(match) for match in sorted(glob.glob(item, recursive=True))]
    files = [match for match in matches if not match.is_dir()]
    if not files:
        raise UserError(
            f"no file matches {item}",
            where=key,
            remedy=f"check the folder and the pattern{_start_of(path)}; ** stands for any number of folders",
        )
    return files


def check_not_saved_dataset(folder: Path, key: str, split: str = "train") -> None:
    """Raise UserError for the folder of a ``DatasetDict`` that ``save_to_disk`` has written: each of its splits is a
    folder of Arrow files."""
    if (folder / "dataset_dict.json").exists():
        raise UserError(
            f"{folder} has the splits of a DatasetDict, as save_to_disk writes them",
            where=key,
            remedy=f"name the files of a split: {folder / split / '*.arrow'}",
        )


def find_text_file(item: str, key: str) -> Path:
    """The text file that a setting names, one of several parallel ones, with any extension, such as ``train.de``.

    Raises:
        UserError: there is none.
    """
    path = Path(item)
    if path.exists() and not path.is_dir():
        return path
    form = "a text file (also .gz), of which line n belongs to line n of the others"
    what = "a folder" if path.is_dir() else "a pattern" if glob.has_magic(item) else None
    if what is not None:
        raise UserError(f"{item} is {what}", where=key, remedy=f"name one file: {form}")
    _check_folder(path, key)
    files = [name for name in os.listdir(path.parent) if (path.parent / name).is_file()]
    guess = nearest(path.name, files)
    meant = f"did you mean {path.parent / guess}? Else " if guess else ""
    raise UserError(f"there is no file {path}", where=key, remedy=f"{meant}name {form}")


def _check_folder(path: Path, key: str) -> None:
    """Raise UserError if the folder of a file does not exist."""
    if not path.parent.is_dir():
        raise UserError(
            f"there is no file {path}: the folder {path.parent} does not exist",
            where=key,
            remedy=f"check the path{_start_of(path)}",
        )


def _missing(path: Path, key: str) -> UserError:
    folder = path.parent
    endings = READERS.names()
    names = {name: str(folder / name) for name in os.listdir(folder) if _ending(name) in endings}
    if folder == Path():
        names |= {name: name for name in BUILT_IN_SOURCES}
    guess = nearest(path.name, names)
    forms = f"give a file, a glob, or one of: {', '.join(BUILT_IN_SOURCES)}{_start_of(path)}"
    hint = f"did you mean {names[guess]}?" if guess else forms
    return UserError(f"there is no file {path}", where=key, remedy=hint)


def _start_of(path: Path) -> str:
    """The folder that a relative path starts from, as a run may have been trained in another folder."""
    return "" if path.is_absolute() else f"; a relative path starts at the folder {Path.cwd()}"
