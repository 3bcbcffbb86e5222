"""``TaskEncoder``: a picklable ``task.encode`` for worker processes; and the cache key of the samples it makes."""

import hashlib
import json
import pickle
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drawbar.config.schema.task_sections import PretrainedTaskConfig
from drawbar.data.cache import content_key
from drawbar.data.sources import Record
from drawbar.errors import UserError
from drawbar.tasks.code import code_digests
from drawbar.tasks.task import Task

NOT_FOR_ENCODING = {"attention", "cross_entropy", "generation", "metrics"}
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
        **{name: version(name) for name in LIBRARIES},
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
        "the task's facts": content_key(json.dumps(task.dataset_metadata, sort_keys=True)),
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
        # state left by the last call, not part of the tokenizer: each call sets truncation and padding anew
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
