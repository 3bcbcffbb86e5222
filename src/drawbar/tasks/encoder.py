"""A task's ``encode`` as a value that worker processes can be given, and the key of what it makes."""

import hashlib
import json
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drawbar.config.schema import run_config_type
from drawbar.config.tasks import PretrainedTaskConfig
from drawbar.data.cache import content_key, records_digest
from drawbar.data.sources import Record
from drawbar.tasks.task import Task

NOT_FOR_ENCODING = {"metrics", "generation"}
"""Options of the built-in tasks that no sample depends on."""
LAST_CALL = {"truncation", "padding"}


class TaskEncoder:
    """``task.encode`` for one kind of split. It pickles: a worker makes its own task of the same parts."""

    def __init__(self, task: Task, train: bool) -> None:
        self.task = task
        self.train = train

    def __call__(self, record: Record) -> Any:
        return self.task.encode(record, self.train)

    def __reduce__(self) -> tuple[Any, ...]:
        task = self.task
        config = task.run_config.model_dump_json()
        return _rebuild, (type(task), config, task.tokenizer, task.facts, task.labelled, self.train)


def _rebuild(
    task_type: type[Task], config: str, tokenizer: Any, facts: dict[str, Any], labelled: bool, train: bool
) -> TaskEncoder:
    # the type of a configuration is made at run time for each task, and cannot be pickled itself
    task = task_type(run_config_type(task_type.Config).model_validate_json(config))
    task.tokenizer, task.facts, task.labelled = tokenizer, facts, labelled
    return TaskEncoder(task, train)


def samples_key(task: Task, records: Iterable[Record], train: bool) -> str | None:
    """The key of the samples that ``encode`` makes of these records: equal keys, equal samples.

    It covers the records, the tokenizer, the options and facts of the task, and its code: every Python file in the
    folders of its class and of that class's bases. None where one of them cannot be put into a key.
    """
    code, tokenizer = _code_digest(type(task)), _tokenizer_digest(task.tokenizer)
    if code is None or tokenizer is None:
        return None
    options = task.config.model_dump(mode="json")
    if isinstance(task.config, PretrainedTaskConfig):
        options = {name: value for name, value in options.items() if name not in NOT_FOR_ENCODING}
    of_records = records_digest(records)
    if of_records is None:
        return None
    parts = (options, task.facts, task.labelled, task.data.sequence_length, task.data.on_bad_record, train)
    return content_key(of_records, tokenizer, code, type(task).__qualname__, json.dumps(parts, sort_keys=True))


def _code_digest(task_type: type[Task]) -> str | None:
    folders = {_folder("drawbar.data.packing")}
    folders |= {_folder(base.__module__) for base in task_type.__mro__ if base is not object}
    digest = hashlib.blake2b()
    for folder in sorted(folder for folder in folders if folder is not None):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\n" + path.read_bytes())
    return None if None in folders else digest.hexdigest()


def _folder(module: str) -> Path | None:
    """The folder of a module's file; None for one that has no file, such as a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file).resolve().parent


def _tokenizer_digest(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # what the last call set, and no part of the tokenizer: a call says anew whether it cuts or pads
        lasting = {name: part for name, part in json.loads(backend.to_str()).items() if name not in LAST_CALL}
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
