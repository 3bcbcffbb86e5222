"""Output at a path that the user names: checked before any work, and written completely or not at all."""

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
"""Number of bytes within which the first object of an output must end."""


def check_output(text: str, overwrite: bool, keys: Set[str], option: str = "--output") -> Path:
    """The file that an option names; refused, before any work, if it exists or cannot be written. A stream such as
    ``/dev/stdout`` is accepted: it is not a file that could be lost.

    Args:
        overwrite: replace an earlier output, one that begins with a JSON object with these ``keys``. No other file is
            replaced: it may be the input, or belong to the run.

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
        raise UserError(f"{path} already exists", where=option, remedy="name another file, or add --overwrite")
    with writing(path, option):
        if path.exists() and not _is_output(path, keys):
            what = f"{path} already exists, and is not an output of this command"
            raise UserError(what, where=option, remedy="name another file, or remove this one")
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return path


def _is_output(path: Path, keys: Set[str]) -> bool:
    """Whether a file begins like an output; an empty one contains nothing that could be lost."""
    with path.open("rb") as file:
        begin = file.read(_BEGINNING).decode(errors="replace")
    try:
        return not begin or json.JSONDecoder().raw_decode(begin)[0].keys() >= keys
    except (ValueError, AttributeError):
        return False


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line, as they come; return their number. Raises UserError if the disk is full."""
    count = 0
    # opening a pipe blocks until somebody reads it
    waiting = told_while_waiting(f"a reader of {path}") if path.is_fifo() else nullcontext()
    with writing(path, "--output"), waiting, replacing(path, one_writer=False) as file:
        for record in records:
            file.write(json_line(record))
            count += 1
    return count


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Turn a disk error into one that names the option from which the path came."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}",
            where=option,
            remedy="free some space there, or name a path on another disk that you may write to",
            exit_code=ExitCode.FAILED,
        ) from error


def check_new_folder(folder: Path, option: str) -> None:
    """Raise UserError if a folder to write already exists and is not empty, or is a file."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file", where=option, remedy="name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", where=option, remedy="name a new folder")
