"""What a task inherits, and how its class is found."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from drawbar.config.schema.run_config import DataSection, RunConfig, TaskConfig, run_config_type
from drawbar.errors import UserError
from drawbar.tasks.causal_lm import CausalLM
from drawbar.tasks.task import Task, require
from drawbar.tasks.task_context import TaskContext
from drawbar.tasks.task_registry import task_class
from drawbar.train.setup import check_predicts


class Halves(Task):
    """A task of a few lines: everything else is inherited."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def predict(self, model: torch.nn.Module, batch: object) -> list[float]:
        return []


def test_a_small_task_has_the_rest() -> None:
    task = Halves(RunConfig())
    record = {"x": [1.0, 2.0]}
    assert task.encode(record, train=True) is record
    assert task.augment(record, train=True, rng=np.random.default_rng(0)) is record
    rows = [{"x": np.array([1.0, 2.0]), "id": 0, "ids": [0]}, {"x": np.array([3.0, 4.0]), "id": 1, "ids": [1]}]
    batch = task.collate(rows)
    assert batch["x"].shape == (2, 2)
    assert task.num_targets(batch) == 2
    assert task.build_tokenizer() is None
    assert task.predicts
    assert task.score([]) == {}
    with pytest.raises(UserError, match="makes no predictions") as none:
        check_predicts(Task(RunConfig(task=TaskConfig())), probabilities=False)
    assert "task.generation" not in str(none.value.remedy)  # which this task does not have
    assert task.loss_scores(6.0, 3.0, []) == {"loss": 2.0}


class Words(Task):
    """A task with an ``__init__`` of its own, which uses all that a task has."""

    built = 0

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self.number = {word: number for number, word in enumerate(self.tokenizer)}
        self.known = (self.dataset_metadata, self.has_labels, self.has_checkpoint)

    def build_tokenizer(self) -> list[str]:
        type(self).built += 1
        return ["the", "load"]

    def find_dataset_metadata(self) -> dict[str, object]:
        return {"sizes": (len(self.tokenizer), self.built)}


def test_a_task_is_complete_when_it_is_built() -> None:
    task = Words(TaskContext(RunConfig(), ["hill"], {"sizes": [9]}, has_checkpoint=True, has_labels=False))
    assert (task.number, task.known) == ({"hill": 0}, ({"sizes": [9]}, False, True))
    assert Words.built == 0


class Circular(Task):
    def build_tokenizer(self) -> list[str]:
        return [*self.tokenizer, "the"]

    def find_dataset_metadata(self) -> dict[str, object]:
        return {**self.dataset_metadata, "sizes": [1]}


@pytest.mark.parametrize("attribute", ["tokenizer", "dataset_metadata"])
def test_what_makes_an_attribute_may_not_use_it(attribute: str) -> None:
    with pytest.raises(UserError, match="calls itself without end") as caught:
        getattr(Circular(RunConfig()), attribute)
    assert f"do not use self.{attribute}" in str(caught.value.remedy)
    assert "test_task.py" in str(caught.value.where)


class Prefixed(Halves):
    """An option whose default is of another type, as pydantic allows."""

    class Config(TaskConfig):
        prefix: str = None  # type: ignore[assignment]


def test_a_task_is_sent_to_processes_with_the_options_that_it_has() -> None:
    config = run_config_type(Prefixed.Config)(data=DataSection(workers=2))
    sent = pickle.loads(pickle.dumps(Prefixed(TaskContext(config, "its tokenizer", {"sizes": [9]}, has_labels=False))))
    assert sent.run_config == config
    assert (sent.config.prefix, sent.tokenizer, sent.dataset_metadata) == (None, "its tokenizer", {"sizes": [9]})
    assert not sent.has_labels


def test_a_task_of_a_configuration_alone_makes_the_rest_once() -> None:
    task = Words(RunConfig())  # type: ignore[arg-type]
    assert (task.number, task.known) == ({"the": 0, "load": 1}, ({"sizes": [2, 1]}, True, False))
    assert task.tokenizer is task.tokenizer
    assert Words.built == 1


def test_a_method_that_is_missing_is_named() -> None:
    task = Task(RunConfig())
    assert not task.predicts
    with pytest.raises(UserError, match=r"the task Task does not define build_model\(\)"):
        task.build_model()
    with pytest.raises(UserError, match=r"the task Halves does not define loss\(\)"):
        Halves(RunConfig()).loss(None, None)  # type: ignore[arg-type]


def test_records_of_a_split(tmp_path: Path) -> None:
    rows = [{"text": "one", "n": 1}, {"text": "two", "n": 2}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task(RunConfig(data=DataSection(train=str(tmp_path / "train.jsonl"))))
    assert list(task.records("train")) == rows
    with pytest.raises(UserError, match=r"no validation data[\s\S]*data.validation"):
        task.records("validation")


def test_a_task_by_name() -> None:
    assert task_class("causal_lm") is CausalLM
    assert task_class("drawbar.tasks.causal_lm:CausalLM") is CausalLM


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("causal", "there is no task 'causal'"),
        ("no_such_module:Task", "no_such_module"),
        ("drawbar.tasks.causal_lm:Missing", "Missing"),
        ("drawbar.tasks.batch:Batch", "not a subclass"),
        ("drawbar.tasks.batch:PADDING", "is not a class"),
        (":Task", "Empty module name"),
        ("", "there is no task"),
    ],
)
def test_what_is_no_task_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"{message}[\s\S]*task.type[\s\S]*package.module:Class"):
        task_class(name)


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        (["text;label"], "separated by ';': set 'data.separator=\";\"'"),
        (["text,label"], "separated by ','"),
        (["text; label ;id"], "separated by ';'"),
        (["text", " label"], "'label' without spaces around it"),
        (["text", "labels"], "set task.label_column to the right key"),
    ],
)
def test_a_header_that_was_misread(columns: list[str], remedy: str) -> None:
    with pytest.raises(UserError, match="the record has no 'label'") as error:
        require(dict.fromkeys(columns, "a"), "label", "task.label_column")
    assert remedy in str(error.value.remedy)
