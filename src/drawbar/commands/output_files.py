"""What a command writes to a place that the user names: whole or not at all. A file is replaced only on request."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawbar.errors import ExitCode, UserError
from drawbar.util.atomic_files import replacing


def check_output(text: str, overwrite: bool) -> Path:
    """The file that ``--output`` names; refused, before any work, if it is there already or cannot be written.

    Raises:
        UserError: see above.
    """
    path = Path(text)
    if path.is_dir() or text.endswith("/"):
        raise UserError(f"{text} is a folder", where="--output", remedy="name a file, such as out.jsonl")
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already", where="--output", remedy="name another file, or add --overwrite")
    with writing(path, "--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    return path


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> int:
    """One JSON object a line, written as they come; returns how many. Raises UserError where the disk takes no more."""
    count = 0
    with writing(path, "--output"), replacing(path) as file:
        for record in records:
            file.write(f"{json.dumps(record, ensure_ascii=False, default=_plain)}\n".encode())
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
            remedy="make room there, or name a place on another disk that you may write to",
            exit_code=ExitCode.FAILED,
        ) from error


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays and numpy's numbers as lists and numbers, all else (dates, say) as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
