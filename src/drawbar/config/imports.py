"""Importing what a user names as ``package.module:name``."""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """A module on the path or in the current folder. Whatever its code raises comes through."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        # As `python -m` does; the installed command `drawbar` does not.
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def cause(error: Exception) -> str:
    """The error, and the line of the user's file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"
