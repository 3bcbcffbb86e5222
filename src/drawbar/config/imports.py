"""Importing what a user names as ``package.module:name``."""

import importlib
import os
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from drawbar.errors import nearest

SNAPSHOT = "DRAWBAR_SNAPSHOT"
"""Environment variable: the folder with a copy of the user's code, which comes before the code in the current one."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders of what somebody installed."""
_DRAWBAR = Path(__file__).resolve().parents[1]
_NOT_OF_A_PROJECT = (_DRAWBAR, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")))
_PACKAGES = {"PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "yaml": "pyyaml"}
"""What is installed under another name than it is imported by."""


def import_user_module(name: str) -> ModuleType:
    """A module on the path or in the current folder. Whatever its code raises comes through."""
    # the current folder as `python -m` does it; the installed command `drawbar` does not
    for folder in (str(Path.cwd()), os.environ.get(SNAPSHOT)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(name)


def is_own(path: Path) -> bool:
    """Whether a file belongs to the user's project: nobody installed it, and it is none of Python's or of drawbar's."""
    return not _is_installed(path) and not any(path.is_relative_to(folder) for folder in _NOT_OF_A_PROJECT)


def _is_installed(path: Path) -> bool:
    return any(part in INSTALLED for part in path.parts)


def cause(error: Exception) -> str:
    """The error, the line of the user's file that led to it, and what to install where a module is missing."""
    advice = missing_module(error)
    return f"{type(error).__name__}: {error}{_place(error)}" + (f"; {advice}" if advice else "")


def _place(error: Exception) -> str:
    """The innermost line of the user's own; of a library, where there is none of them; never one of drawbar's."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if file.is_absolute() and is_own(file)]
    libraries = [(file, line) for file, line in frames if _is_installed(file) and not file.is_relative_to(_DRAWBAR)]
    found = own or libraries
    return f" ({found[-1][0]}:{found[-1][1]})" if found else ""


def missing_module(error: Exception) -> str | None:
    """What to do about a module that is not there; None where the error is another one."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = error.name.partition(".")[0]
    if find_spec(name) is not None:  # it lacks a part of itself
        return None
    here = Path.cwd()
    own = [path.stem for path in here.glob("*.py")] + [path.parent.name for path in here.glob("*/__init__.py")]
    near = nearest(name, own)
    meant = f"did you mean {near}? " if near else ""
    package = _PACKAGES.get(name, name)
    return f"{meant}If it is your own, start in its folder, or set PYTHONPATH to that; else `pip install {package}`"
