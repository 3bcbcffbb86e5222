"""The built-in source ``python_stdlib``: the source files of Python's own standard library.

It is real text that is on every machine.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drawbar.data.readers import RawRecord, Reader, Record
from drawbar.errors import UserError

PYTHON_STDLIB = "python_stdlib"

_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class PythonStdlib(Reader):
    """One record a file, sorted by path. A hash of its path puts a file into the same split on every machine."""

    split: str

    @cached_property
    def files(self) -> list[Path]:
        root = _root()
        return [root / path for path in _python_files(root) if _split_of(path) == self.split]

    @property
    def checked_files(self) -> list[Path]:
        """None: Python has installed them."""
        return []

    def settings(self) -> list[str]:
        return [*super().settings(), *(_relative(path) for path in self.files)]  # a record holds its path

    def units(self) -> Iterator[RawRecord]:
        for path in self.files:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few files are in old encodings, on purpose
            if text.strip():
                yield RawRecord({"text": text, "path": _relative(path)}, path, None)

    def decode(self, unit: RawRecord) -> Record:
        return unit.raw

    def empty(self) -> UserError:
        return UserError(
            f"this Python has no standard library sources for the split {self.split!r} in {_root()}",
            where=f"data.{self.split}",
            remedy="name a file of your own",
        )


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _relative(path: Path) -> str:
    return path.relative_to(_root()).as_posix()


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
