"""Digests of the user's code that a task's ``encode`` may run."""

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

from drawbar.config.io.user_code import INSTALLED, NOT_OF_A_PROJECT, is_user_code
from drawbar.data.cache import content_key

_PROGRAM = ("__main__", "__mp_main__")
_OTHERS = tuple(f"{folder}{os.sep}" for folder in NOT_OF_A_PROJECT)


def code_digests(modules: Iterable[str]) -> dict[str, str] | None:
    """Digests of the files of a user's project, by their path in it; what is installed is no part of it.

    They are these modules, every module of the project that is loaded, and what those import, be it in a function that
    nobody has called yet; and the other Python files in the folders of these modules, without what they import.

    Args:
        modules: names of loaded modules of the user's; without any there is no project.

    Returns:
        None where one of them has no file, such as a notebook.
    """
    files: list[Path] = []
    roots: list[Path] = []
    for name in modules:
        file = _file_of(sys.modules.get(name))
        if file is None:
            return None
        files.append(file)
        roots.append(file.parents[_depth(name, file)])
    if not files:
        return {}
    roots = [root for root in dict.fromkeys([*roots, Path.cwd()]) if is_user_code(root)]
    search = list(dict.fromkeys([*roots, *_user_search_path()]))
    found = _with_imports([*files, *_loaded(roots)], search)
    found |= {path for file in files for path in file.parent.glob("*.py")}
    digests: dict[str, str] = {}
    for path in sorted(found):
        name = _name_in_project(path, search)
        digests[name] = content_key(digests.get(name), path.read_bytes())  # two roots may have files of one name
    return digests


def _file_of(module: ModuleType | None) -> Path | None:
    """The file of a module; None where it has none."""
    file = getattr(module, "__dict__", {}).get("__file__")  # getattr of __file__ itself would load a lazy module
    if not isinstance(file, str):
        return None
    path = Path(file).resolve()
    return path if path.is_file() else None


def _loaded(roots: list[Path]) -> list[Path]:
    """The files of all loaded modules below these folders, without the program itself: every command has another."""
    own = (module for name, module in list(sys.modules.items()) if name not in _PROGRAM and not _is_installed(module))
    files = [file for file in map(_file_of, own) if file is not None]
    return [file for file in files if is_user_code(file) and any(file.is_relative_to(root) for root in roots)]


def _is_installed(module: ModuleType) -> bool:
    """Whether a module is installed, or Python's or drawbar's own: a quick answer for most of thousands of modules,
    without a look at the disk."""
    file = str(getattr(module, "__dict__", {}).get("__file__"))
    return file.startswith(_OTHERS) or any(folder in file for folder in INSTALLED)


def _depth(module: str, file: Path) -> int:
    """How many levels the folder on Python's search path is above the folder of a module's file."""
    return module.count(".") + (file.name == "__init__.py")


def _user_search_path() -> Iterator[Path]:
    """Where Python looks for modules, without the folders of libraries."""
    for folder in map(Path, sys.path):
        if folder.is_dir() and is_user_code(folder.resolve()) and not any(folder.glob("*.dist-info")):
            yield folder.resolve()


def _with_imports(files: Iterable[Path], search: list[Path]) -> set[Path]:
    """The files, and those that they import, and so on."""
    found: set[Path] = set()
    waiting = list(files)
    names_in = cache(_names_in)  # both for this walk alone: files come and go
    find = cache(lambda names, folders: _find(names, folders, names_in))
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.suffix == ".py":
            for level, names in _imports(path.read_bytes()):
                folders = (path.parents[level - 1],) if level else tuple(search)
                waiting += [imported for imported in find(names, folders) if is_user_code(imported)]
    return found


@lru_cache(maxsize=1000)
def _imports(source: bytes) -> list[tuple[int, tuple[str, ...]]]:
    """Every import in a file, also inside functions: the number of leading dots, and the parts of the name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []  # Python itself will say so
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module.split(".") if node.module else []
            imports += [(node.level, (*package, alias.name)) for alias in node.names]
    return imports


def _names_in(folder: Path) -> frozenset[str]:
    """The names that can be imported from a folder, among others."""
    try:
        return frozenset(name.removesuffix(".py") for name in os.listdir(folder))
    except OSError:  # Python finds nothing there either
        return frozenset()


def _find(names: tuple[str, ...], folders: tuple[Path, ...], names_in: Callable[[Path], frozenset[str]]) -> list[Path]:
    """The files of a module and of the packages around it, in the first of the folders that has any; the last name may
    be that of something inside the module."""
    for folder in folders:
        if names[0] not in names_in(folder):
            continue
        stems = [folder.joinpath(*names[: count + 1]) for count in range(len(names))]
        files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
        if files:
            return [file.resolve() for file in files]
    return []


def _name_in_project(path: Path, roots: list[Path]) -> str:
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    return path.relative_to(root).as_posix()
