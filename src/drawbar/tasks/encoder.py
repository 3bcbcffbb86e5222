"""``TaskEncoder``: a picklable ``task.encode`` for worker processes; and the cache key of the samples it makes."""

import ast
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from drawbar.config.io.user_code import INSTALLED, NOT_OF_A_PROJECT, is_user_code
from drawbar.config.schema.task_sections import PretrainedTaskConfig
from drawbar.data.cache import content_key
from drawbar.data.sources import Record
from drawbar.errors import UserError
from drawbar.tasks.task import Task
from drawbar.util.versions import installed

_PROGRAM = ("__main__", "__mp_main__")
_OTHERS = tuple(f"{folder}{os.sep}" for folder in NOT_OF_A_PROJECT)


def code_digests(modules: Iterable[str]) -> dict[str, str] | None:
    """Digests of the files of a user's project, by their path in it; what is installed is no part of it.

    They are these modules, every module of the project that is loaded, and what those import, be it in a function that
    nobody has called yet; and the other Python files in the folders of these modules, without what they import.

    Args:
        modules: names of the user's loaded modules; without any there is no project.

    Returns:
        None if one of them has no file, such as a notebook.
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
    """The file of a module; None if it has none."""
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
    names_in = cache(_names_in)  # both only for this walk: files come and go
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


NOT_FOR_ENCODING = {
    *("attention", "cross_entropy", "generation", "metrics"),
    *("label_smoothing", "z_loss", "class_weights"),
    *("beta", "gamma", "desirable_weight", "undesirable_weight"),
}
"""Options of the built-in tasks that no sample depends on."""
PER_CALL_STATE = {"truncation", "padding"}
LIBRARIES = ("drawbar", "tokenizers", "transformers")
"""Installed packages that decide what samples are made of a record."""


class TaskEncoder:
    """``task.encode`` for one kind of split. It pickles, as tasks do."""

    def __init__(self, task: Task, train: bool) -> None:
        self.task = task
        self.train = train

    def __call__(self, record: Record) -> Any:
        return self.task.encode(record, self.train)


def cache_inputs(task: Task, train: bool) -> dict[str, str] | None:
    """The inputs of the cache key: all that ``encode``'s samples depend on, but for the record itself, by name.

    The result of ``settings_of``, the user's code, drawbar's, and library versions. None if one of them cannot
    be hashed.
    """
    code, settings = code_of(task), settings_of(task, train)
    if code is None or settings is None:
        return None
    return {
        **settings,
        **code,
        "the code of drawbar": _drawbar_digest(filter(_is_of_drawbar, _modules(task))),
        **{name: str(installed(name)) for name in LIBRARIES},
    }


def settings_of(task: Task, train: bool) -> dict[str, str] | None:
    """The inputs of the cache key besides records and code: tokenizer, options and dataset metadata of the task, and
    the files that it declares. None if the tokenizer cannot be hashed."""
    tokenizer = _tokenizer_digest(task.tokenizer)
    if tokenizer is None:
        return None
    options = task.config.model_dump(mode="json")
    if isinstance(task.config, PretrainedTaskConfig):
        options = {name: value for name, value in options.items() if name not in NOT_FOR_ENCODING}
    return {
        "the tokenizer": tokenizer,
        **{f"task.{name}": json.dumps(value, sort_keys=True) for name, value in options.items()},
        # saved positions of streams hold a digest of these names and values: do not rename them
        "the dataset metadata": content_key(json.dumps(task.dataset_metadata, sort_keys=True)),
        "the labels of records": "read" if task.has_labels else "left out",
        "the use of the samples": "training" if train else "evaluation",
        "data.sequence_length": str(task.data.sequence_length),
        "data.on_bad_record": task.data.on_bad_record,
        **_declared_digests(task),
    }


def code_of(task: Task) -> dict[str, str] | None:
    """The task's class, and digests of the user's code (see ``code_digests``) by file; None if a module has no file."""
    own = [name for name in _modules(task) if not _is_of_drawbar(name) and name not in sys.stdlib_module_names]
    code = code_digests(own)
    return None if code is None else {"the task's class": type(task).__qualname__, **code}


def _modules(task: Task) -> list[str]:
    """The modules of the task's class and of all its base classes."""
    return list(dict.fromkeys(base.__module__ for base in type(task).__mro__))


def _is_of_drawbar(module: str) -> bool:
    return module.partition(".")[0] == "drawbar"


def _drawbar_digest(modules: Iterable[str]) -> str:
    """Digest of the Python files of ``drawbar.data`` and of the folders of these modules."""
    files = {Path(str(sys.modules[module].__file__)) for module in ("drawbar.data.packing", *modules)}
    paths = sorted(path for folder in {file.parent for file in files} for path in folder.glob("*.py"))
    return content_key([(f"{path.parent.name}/{path.name}", path.read_bytes()) for path in paths])


def _declared_digests(task: Task) -> dict[str, str]:
    """Digests of the files that the task declares.

    Raises:
        UserError: one of them cannot be read.
    """
    digests = {}
    for path in map(Path, task.encoding_files()):
        try:
            with path.open("rb") as file:
                digests[str(path)] = hashlib.file_digest(file, "blake2b").hexdigest()
        except OSError as error:
            raise UserError(
                f"{type(task).__name__}.encoding_files names {path}, which cannot be read: {error.strerror}",
                remedy=f"name files; a path is taken from the folder {Path.cwd()}",
            ) from error
    return digests


def _tokenizer_digest(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # state left by the last call, not part of the tokenizer: each call sets truncation and padding again
        lasting = {name: part for name, part in json.loads(backend.to_str()).items() if name not in PER_CALL_STATE}
        return content_key(
            json.dumps(lasting),
            type(tokenizer).__qualname__,
            json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True),
            str(getattr(tokenizer, "chat_template", None)),
        )
    try:
        return hashlib.blake2b(pickle.dumps(tokenizer)).hexdigest()
    except Exception:  # noqa: BLE001 - whatever keeps a user's own tokenizer from being pickled
        return None
