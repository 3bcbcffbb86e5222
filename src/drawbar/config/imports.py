"""Importing what a user names as ``package.module:name``."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

SNAPSHOT = "DRAWBAR_SNAPSHOT"
"""Environment variable: the folder with a copy of the user's code, which comes before the code in the current one."""


def import_user_module(name: str) -> ModuleType:
    """A module on the path or in the current folder. Whatever its code raises comes through."""
    # the current folder as `python -m` does it; the installed command `drawbar` does not
    for folder in (str(Path.cwd()), os.environ.get(SNAPSHOT)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(name)


def cause(error: Exception) -> str:
    """The error, and the line of the user's file that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"
