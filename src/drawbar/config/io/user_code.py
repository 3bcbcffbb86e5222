"""Distinguishes the user's own code from installed code, and imports it. Uses only the standard library, as programs
that jobs start on nodes (``jobs/node``) import it."""

import importlib
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

SNAPSHOT = "DRAWBAR_SNAPSHOT"
"""Environment variable: a folder with a copy of the user's code, which precedes the current folder on the path."""
INSTALLED = ("site-packages", "dist-packages")
"""Names of folders for installed packages."""
DRAWBAR = Path(__file__).resolve().parents[2]
NOT_OF_A_PROJECT = (DRAWBAR, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")))
"""Folders of drawbar and of Python."""


def import_user_module(name: str) -> ModuleType:
    """Import a module from ``sys.path``, the copy of the user's code or the current folder. Exceptions raised by its
    code propagate; ``sys.exit()`` becomes an ``ImportError``."""
    # `python -m` puts the current folder on the path; the installed command `drawbar` does not
    for folder in (str(Path.cwd()), os.environ.get(SNAPSHOT)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except SystemExit as error:  # a script without `if __name__ == "__main__"`
        raise ImportError(f"the module ends the program when it is imported, with {error.code!r}") from error


def is_user_code(path: Path) -> bool:
    """Whether a file belongs to the user's project: it is neither installed, nor part of Python or drawbar."""
    return not is_installed(path) and not any(path.is_relative_to(folder) for folder in NOT_OF_A_PROJECT)


def is_installed(path: Path) -> bool:
    return any(part in INSTALLED for part in path.parts)
