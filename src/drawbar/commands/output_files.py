"""Output at a path that the user names: refused before any work where it cannot be written, and whole or absent."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from drawbar.errors import ExitCode, UserError
from drawbar.runtime.log import told_while_waiting
from drawbar.util.atomic_files import is_stream, replacing, unwritable
from drawbar.util.strict_json import json_line

PREDICTIONS, TEXTS, FORECAST = {"prediction"}, {"prompt", "text"}, {"strategy", "peak"}
"""Keys of the JSON objects that ``predict``, ``generate`` and ``plan`` write."""
_BEGINNING = 1 << 24
"""Bytes in which the first object of an output must end."""


def check_output(text: str, overwrite: bool, keys: Set[str], option: str = "--output") -> Path:
    """The file that an option names; refused, before any work, if it is there already or cannot be written. A stream,
    such as ``/dev/stdout``, is no file that could be lost.

    Args:
        overwrite: to replace an earlier output, one that begins with a JSON object with these ``keys``. No other file
            is replaced: it may be the input, or the run's own.

    Raises:
        UserError: see above.
    """
    path = Path(text)
    reason = "a folder" if text.endswith("/") else unwritable(path)
    if reason is not None:
        raise UserError(f"{text} is {reason}", where=option, remedy="name a file")
    if is_stream(path):
        return path
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already", where=option, remedy="name another file, or add --overwrite")
    with writing(path, option):
        if path.exists() and not _is_output(path, keys):
            what = f"{path} is there already, and is no output of this command"
            raise UserError(what, where=option, remedy="name another file, or remove this one")
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return path


def _is_output(path: Path, keys: Set[str]) -> bool:
    """Whether a file begins as an output does; an empty one holds nothing that could be lost."""
    with path.open("rb") as file:
        begin = file.read(_BEGINNING).decode(errors="replace")
    try:
        return not begin or json.JSONDecoder().raw_decode(begin)[0].keys() >= keys
    except (ValueError, AttributeError):
        return False


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """One JSON object a line, written as they come; returns how many. Raises UserError where the disk takes no more."""
    count = 0
    # to open a pipe takes as long as it takes until somebody reads it
    waiting = told_while_waiting(f"a reader of {path}") if path.is_fifo() else nullcontext()
    with writing(path, "--output"), waiting, replacing(path, one_writer=False) as file:
        for record in records:
            file.write(json_line(record))
            count += 1
    return count


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Turn an error of the disk into one that names the option which the path came from."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}",
            where=option,
            remedy="free some space there, or name a place on another disk that you may write to",
            exit_code=ExitCode.FAILED,
        ) from error


def check_new_folder(folder: Path, option: str) -> None:
    """Refuse a folder to write that is there already, unless it is empty. Raises UserError."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file", where=option, remedy="name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", where=option, remedy="name a new folder")
