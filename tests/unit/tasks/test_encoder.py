"""A task's encode in other processes, and the key of what it makes."""

import importlib
import importlib.util
import multiprocessing
import pickle
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import (
    GenerationSection,
    Seq2SeqConfig,
    SequenceClassificationConfig,
    TaskConfig,
)
from drawbar.data.cache import content_key, file_digest
from drawbar.data.sources import open_records
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.tasks import encoder
from drawbar.tasks.classification import SequenceClassification
from drawbar.tasks.encoder import TaskEncoder, cache_inputs
from drawbar.tasks.seq2seq import Seq2Seq
from drawbar.tasks.task import Task
from drawbar.tasks.task_context import TaskContext

RECORDS = [{"text": "a good road", "label": 1}, {"text": "a bad road" * 20, "label": 0}]
TOKENIZER = train_byte_bpe(["a good road and a bad road"] * 9, 280, {"pad_token": "<|pad|>"})


def classification(sequence_length: int = 16, **options: Any) -> SequenceClassification:
    config = SequenceClassificationConfig(model="bert", **options)
    run_config = RunConfig(task=config, data=DataSection(sequence_length=sequence_length))
    return SequenceClassification(TaskContext(run_config, TOKENIZER, {"labels": [0, 1]}))


def encode_there(pickled: bytes) -> list[Any]:
    return [pickle.loads(pickled)(record) for record in RECORDS]


@pytest.mark.exhaustive
def test_another_process_encodes_the_same() -> None:
    task = classification()
    task.has_labels = True
    encode = TaskEncoder(task, train=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply(encode_there, (pickle.dumps(encode),))
    assert there == [encode(record) for record in RECORDS]
    task.has_labels = False
    copy = pickle.loads(pickle.dumps(TaskEncoder(task, train=False)))
    assert copy.train is False
    assert "labels" not in copy(RECORDS[0])
    assert copy.task.run_config.model_dump() == task.run_config.model_dump()
    assert type(copy.task) is SequenceClassification


def samples_key(task: Task, records: Any, train: bool) -> str | None:
    parts = cache_inputs(task, train)
    return None if parts is None else content_key(parts, records.digest(file_digest))


def records_of(folder: Path, text: str) -> Any:
    path = folder / "train.txt"
    path.write_text(text)
    return open_records(DataSection(train=str(path)), "train")


@pytest.fixture
def records(tmp_path: Path) -> Any:
    return records_of(tmp_path, "one\ntwo\n")


def test_equal_parts_equal_keys(records: Any, tmp_path: Path) -> None:
    key = samples_key(classification(), records, True)
    assert key is not None
    assert samples_key(classification(), records, True) == key
    (tmp_path / "elsewhere").mkdir()
    assert samples_key(classification(), records_of(tmp_path / "elsewhere", "one\ntwo\n"), True) == key
    assert samples_key(classification(metrics=["f1"]), records, True) == key
    written = [
        Seq2Seq(TaskContext(RunConfig(task=Seq2SeqConfig(model="t5", generation=generation)), TOKENIZER))
        for generation in (None, GenerationSection(beams=3))
    ]
    assert samples_key(written[0], records, True) == samples_key(written[1], records, True)


def test_every_part_matters(records: Any, tmp_path: Path) -> None:
    other_tokenizer, other_facts, unlabelled = classification(), classification(), classification()
    other_tokenizer.tokenizer = train_byte_bpe(["good"], 257)
    other_facts.dataset_metadata = {"labels": [1, 0]}
    unlabelled.has_labels = False
    skipping = classification()
    skipping.data = skipping.data.model_copy(update={"on_bad_record": "skip"})
    (tmp_path / "changed").mkdir()
    keys = [
        samples_key(classification(), records, True),
        samples_key(classification(), records, False),
        samples_key(classification(), records_of(tmp_path / "changed", "one\n2\n"), True),
        samples_key(classification(sequence_length=17), records, True),
        samples_key(classification(text_column="other"), records, True),
        samples_key(classification(problem="multi_label"), records, True),
        *(samples_key(task, records, True) for task in (other_tokenizer, other_facts, unlabelled, skipping)),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_the_special_tokens_of_a_tokenizer_matter(records: Any) -> None:
    task = classification()
    task.tokenizer = train_byte_bpe(["a good road and a bad road"] * 9, 280, {"pad_token": "<|pad|>"})
    before = samples_key(task, records, True)
    task.tokenizer.chat_template = "{{ messages }}"
    with_template = samples_key(task, records, True)
    task.tokenizer.eos_token = "<|pad|>"
    assert len({before, with_template, samples_key(task, records, True)}) == 3


def test_a_tokenizer_that_has_cut_a_text_is_the_same(records: Any) -> None:
    """Else a process that encodes and one that reads the cache would look for different files."""
    task = classification()
    before = samples_key(task, records, True)
    TOKENIZER(["a good road", "a"], truncation=True, max_length=2, padding=True)
    assert samples_key(task, records, True) == before
    assert task.encode(RECORDS[1], True)["truncated"]
    assert samples_key(task, records, True) == before


OWN = """
from drawbar.tasks.task import Task

class Own(Task):
    def encode(self, record, train):
        return {"x": 1.0}
"""


def load(folder: Path, name: str) -> type[Task]:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Own


@pytest.mark.exhaustive
def test_the_code_beside_a_task_matters(records: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_task.py").write_text(OWN)
    task = load(folder, "own_task")(RunConfig(task=TaskConfig()))
    keys = [samples_key(task, records, True)]
    (folder / "helper.py").write_text("A = 1\n")
    keys.append(samples_key(task, records, True))
    (folder / "own_task.py").write_text(OWN + "# changed\n")
    keys.append(samples_key(task, records, True))
    (folder / "notes.txt").write_text("no code")
    assert samples_key(task, records, True) == keys[-1]
    assert None not in keys
    assert len(set(keys)) == 3


CLEAN = "def clean(text):\n    return text.{method}()\n"
CLEANING = """
import random
from typing import Generic, TypeVar

import drawbar
{before}

T = TypeVar("T")

class Own(Generic[T], drawbar.Task):
    def encode(self, record, train):
        {inside}
        return {{"x": clean(record["text"])}}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a user is in, with a helper in a folder of its own: what is imported from it is forgotten after."""
    folder = tmp_path / "project"
    (folder / "tasks").mkdir(parents=True)
    (folder / "words").mkdir()
    (folder / "words" / "clean.py").write_text(CLEAN.format(method="strip"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("from words.clean import clean", "..."),
        ("import words.clean; clean = words.clean.clean", "..."),
        ("", "from words.clean import clean"),
        ("import importlib; clean = importlib.import_module('words' + '.clean').clean", "..."),
        ("from tasks.near import clean", "..."),
        ("from .near import clean", "..."),
    ],
)
def test_a_helper_that_a_task_imports_matters(records: Any, project: Path, before: str, inside: str) -> None:
    (project / "tasks" / "near.py").write_text("from words.clean import clean\n")
    (project / "tasks" / "mine.py").write_text(CLEANING.format(before=before, inside=inside))
    (project / "words" / "other.py").write_text("A = 1\n")
    task = importlib.import_module("tasks.mine").Own(RunConfig(task=TaskConfig()))
    parts = cache_inputs(task, True)
    assert parts is not None
    assert {"tasks/mine.py", "words/clean.py"} <= set(parts)
    assert not [name for name in parts if name.startswith(("random", "typing", "drawbar/", "words/other"))]
    (project / "words" / "clean.py").write_text(CLEAN.format(method="lower"))
    changed = cache_inputs(task, True)
    assert changed is not None
    assert {name for name in parts if parts[name] != changed[name]} == {"words/clean.py"}


def test_a_project_that_is_moved_has_the_same_key(records: Any, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "tasks" / "mine.py").write_text(CLEANING.format(before="from words.clean import clean", inside="..."))
    keys = []
    for folder in (project, project.with_name("moved")):
        if folder != project:
            shutil.copytree(project, folder)
            for name in ("tasks", "tasks.mine", "words", "words.clean"):
                del sys.modules[name]
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        keys.append(samples_key(importlib.import_module("tasks.mine").Own(RunConfig(task=TaskConfig())), records, True))
    assert keys[0] == keys[1]


def test_what_is_installed_is_no_part_of_a_project(
    records: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = project / ".venv" / "lib" / "site-packages"
    library.mkdir(parents=True)
    (library / "installed_helper.py").write_text(CLEAN.format(method="strip"))
    monkeypatch.syspath_prepend(str(library))
    (project / "tasks" / "mine.py").write_text(
        CLEANING.format(before="from installed_helper import clean", inside="...")
    )
    program = types.ModuleType("__main__")
    program.__file__ = str(project / ".venv" / "drawbar")  # another one for every command
    Path(program.__file__).touch()
    monkeypatch.setitem(sys.modules, "__main__", program)
    task = importlib.import_module("tasks.mine").Own(RunConfig(task=TaskConfig()))
    parts = cache_inputs(task, True)
    assert parts is not None
    assert "tasks/mine.py" in parts
    assert not [name for name in parts if name.startswith(".venv") or "installed_helper" in name]


class Listing(SequenceClassification):
    """Reads a file that no setting names."""

    def encoding_files(self) -> list[str | Path]:
        return ["words.txt"]


def test_files_that_a_task_declares_matter(records: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_config = RunConfig(task=SequenceClassificationConfig(model="bert"))
    task = Listing(TaskContext(run_config, TOKENIZER, {"labels": [0, 1]}))
    with pytest.raises(UserError, match=r"Listing.encoding_files names words.txt"):
        samples_key(task, records, True)
    keys = []
    for text in ("one", "two"):
        (tmp_path / "words.txt").write_text(text)
        keys.append(samples_key(task, records, True))
    assert keys[0] != keys[1]


def test_the_versions_of_libraries_matter(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = samples_key(classification(), records, True)
    monkeypatch.setattr(encoder, "installed", lambda library: f"{library} 9.9")
    assert samples_key(classification(), records, True) != before


def test_what_cannot_be_put_into_a_key_has_none(records: Any) -> None:
    notebook = types.ModuleType("notebook_cells")  # has no __file__
    sys.modules["notebook_cells"] = notebook
    task = type("Own", (Task,), {"__module__": "notebook_cells"})(RunConfig(task=TaskConfig()))
    assert samples_key(task, records, True) is None
    own_tokenizer = classification()
    own_tokenizer.tokenizer = lambda text: [ord(letter) for letter in text]
    assert samples_key(own_tokenizer, records, True) is None


def test_a_tokenizer_of_ones_own_that_pickles_has_a_key(records: Any) -> None:
    keys = []
    for table in (np.arange(3), np.arange(4)):
        task = classification()
        task.tokenizer = table
        keys.append(samples_key(task, records, True))
    assert None not in keys
    assert keys[0] != keys[1]
