"""The order of labels: that of the model's own outputs, where it was trained for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from drawbar.config.schema.run_config import DataSection, RunConfig
from drawbar.config.schema.task_sections import SequenceClassificationConfig, TokenClassificationConfig
from drawbar.data.class_labels import ClassNumber
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.errors import UserError
from drawbar.tasks.classification import SequenceClassification, TokenClassification
from drawbar.tasks.labels import Labels, in_order_of, trained_labels
from drawbar.tasks.pretrained import PretrainedTask
from drawbar.tasks.task import require
from drawbar.tasks.task_context import TaskContext

TOKENIZER = train_byte_bpe([], 258, {"pad_token": "<|pad|>"})
BERT = {
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
OF_TASK = {
    "sequence_classification": (SequenceClassification, SequenceClassificationConfig, BertForSequenceClassification),
    "token_classification": (TokenClassification, TokenClassificationConfig, BertForTokenClassification),
}


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO")
    return caplog


def fine_tuned(folder: Path, kind: str, names: list[str]) -> torch.Tensor:
    """Write a classifier that was trained for these labels; returns the weights of its head."""
    torch.manual_seed(0)
    model = OF_TASK[kind][2](
        BertConfig(**BERT, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    )
    model.save_pretrained(folder)
    return model.classifier.weight


def task_of(folder: Path, kind: str, in_data: list[Any], **options: Any) -> PretrainedTask:
    """A task with what it finds in data of these labels."""
    records = [{"text": "a", "label": label, "tokens": ["a"], "tags": [label]} for label in in_data]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task_type, config_type, _ = OF_TASK[kind]
    data = DataSection(train=str(folder / "train.jsonl"), sequence_length=8)
    run_config = RunConfig(task=config_type(**{"model": str(folder / "model"), **options}), data=data)
    task = task_type(TaskContext(run_config, TOKENIZER))
    assert task.dataset_metadata
    return task


@pytest.mark.parametrize("kind", OF_TASK)
@pytest.mark.parametrize(
    ("trained", "listed", "order"),
    [
        (["good", "bad", "fair"], None, ["good", "bad", "fair"]),
        (["good", "bad", "fair"], ["bad", "fair", "good"], ["good", "bad", "fair"]),
        (["GOOD", "Bad", "fair"], None, ["good", "bad", "fair"]),  # as the task spells them
        (["LABEL_0", "LABEL_1", "LABEL_2"], None, ["bad", "fair", "good"]),
        (["LABEL_0", "LABEL_1", "LABEL_2"], ["good", "bad", "fair"], ["good", "bad", "fair"]),
    ],
)
def test_the_order_of_a_model_that_was_trained_for_the_labels(
    tmp_path: Path,
    messages: pytest.LogCaptureFixture,
    kind: str,
    trained: list[str],
    listed: list[str] | None,
    order: list[str],
) -> None:
    head = fine_tuned(tmp_path / "model", kind, trained)
    task = task_of(tmp_path, kind, ["good", "bad", "fair"], labels=listed)
    assert task.dataset_metadata["labels"] == order
    model = task.build_model()
    assert torch.equal(model.classifier.weight, head)
    assert model.config.id2label == dict(enumerate(order))
    assert ("in the order of the outputs of" in messages.text) is not trained[0].startswith("LABEL")


def test_a_model_that_was_trained_for_other_labels(tmp_path: Path, messages: pytest.LogCaptureFixture) -> None:
    """Its head is kept where it fits: nobody but the user knows what its outputs mean."""
    fine_tuned(tmp_path / "model", "sequence_classification", ["POSITIVE", "NEGATIVE"])
    task = task_of(tmp_path, "sequence_classification", ["good", "bad"])
    assert task.dataset_metadata["labels"] == ["bad", "good"]
    assert "was trained for the labels POSITIVE, NEGATIVE, and its outputs now stand for bad, good" in messages.text
    messages.clear()
    for in_data, listed in ((["good", "bad"], ["good", "bad"]), ([1, 0], None), (["x", "y", "z"], None)):
        task_of(tmp_path, "sequence_classification", in_data, labels=listed)
        assert "was trained for" not in messages.text  # that is meant, or the head is new


def test_a_model_from_scratch_has_no_order(tmp_path: Path) -> None:
    fine_tuned(tmp_path / "model", "sequence_classification", ["good", "bad"])
    task = task_of(tmp_path, "sequence_classification", ["good", "bad"], from_scratch={})
    assert task.dataset_metadata["labels"] == ["bad", "good"]


def test_numbers_of_a_model_are_its_order(tmp_path: Path) -> None:
    fine_tuned(tmp_path / "model", "sequence_classification", ["1", "0"])
    assert task_of(tmp_path, "sequence_classification", [0, True]).dataset_metadata["labels"] == [True, 0]


def test_names_that_a_config_gives_in_one_direction_alone() -> None:
    config = BertConfig(num_labels=2)
    assert trained_labels(config) is None
    config.label2id = {"good": 0, "bad": 1}
    assert trained_labels(config) == ["good", "bad"]
    assert in_order_of(["good", "bad"], ["good", "bad", "fair"]) is None


def of_datasets(folder: Path) -> DataSection:
    features = Features(
        {
            "text": Value("string"),
            "label": ClassLabel(names=["negative", "neutral", "Positive"]),
            "tokens": List(Value("string")),
            "tags": List(ClassLabel(names=["O", "B-X", "I-X"])),
        }
    )
    columns = {"text": ["a", "b"], "label": [2, 0], "tokens": [["a", "b"], ["c"]], "tags": [[1, 2], [0]]}
    Dataset.from_dict(columns, features=features).to_parquet(folder / "train.parquet")
    return DataSection(train=str(folder / "train.parquet"), sequence_length=8)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("kind", "names"),
    [("sequence_classification", ["negative", "neutral", "Positive"]), ("token_classification", ["O", "B-X", "I-X"])],
)
def test_the_classes_of_datasets_keep_their_names_and_order(
    tmp_path: Path, kind: str, names: list[str], streaming: bool
) -> None:
    """Those that do not occur, too; and a stream need not list them."""
    task_type, config_type, _ = OF_TASK[kind]
    data = of_datasets(tmp_path).model_copy(update={"streaming": streaming})
    run_config = RunConfig(task=config_type(model="bert", from_scratch=BERT), data=data)
    task = task_type(TaskContext(run_config, TOKENIZER))
    assert task.dataset_metadata["labels"] == names
    assert task.build_model().config.id2label == dict(enumerate(names))
    records = [{**record, "prediction": task.references([record])[0]} for record in task.records("train")]
    assert task.score(records) == (
        {"accuracy": 1.0}
        if kind == "sequence_classification"
        else {"entity_f1": 1.0, "entity_precision": 1.0, "entity_recall": 1.0, "tag_accuracy": 1.0}
    )


def test_a_split_of_one_label_has_the_positive_class_of_the_task() -> None:
    config = SequenceClassificationConfig(
        model="bert", from_scratch=BERT, labels=["neg", "pos"], metrics=["f1", "f1_macro"]
    )
    data = DataSection(train="none.jsonl", sequence_length=8)
    task = SequenceClassification(TaskContext(RunConfig(task=config, data=data), TOKENIZER, {"labels": ["neg", "pos"]}))
    records = [{"text": "a", "label": "neg", "prediction": "neg"}] * 3
    for _ in range(2):
        assert task.score(records) == {"f1": 0.0, "f1_macro": 1.0}


NAMES = ["positive", "negative"]


def numbers(names: list[str]) -> list[ClassNumber]:
    """The classes of a column that has these names."""
    return [ClassNumber(number, names) for number in range(len(names))]


@pytest.mark.parametrize(
    ("labels", "classes", "written", "outputs"),
    [
        (["positive", "negative"], NAMES, [0, "1", 1.0, "negative", *numbers(NAMES)], [0, 1, 1, 1, 0, 1]),
        (
            ["negative", "positive"],
            NAMES,
            [0, "1", "positive", *numbers(NAMES)],
            [1, 0, 1, 1, 0],
        ),  # as a model has them
        ([0, 1], NAMES, ["positive", 1, *numbers(NAMES)], [0, 1, 0, 1]),
        ([0, 1], NAMES, numbers(NAMES[::-1]), [1, 0]),  # another file, with another order
        ([0, 1], None, numbers(NAMES), [0, 1]),  # a run that learned from a .csv
        (NAMES, None, numbers(NAMES[::-1]), [1, 0]),
        ([1, 2, 3], ["1", "2", "3"], [1, "3", *numbers(["1", "2", "3"])], [0, 2, 0, 1, 2]),  # names that are numbers
        ([0, 1, 2], ["1", "2", "3"], numbers(["1", "2", "3"]), [0, 1, 2]),
        ([0, 1, 2], None, numbers(["1", "2", "3"]), [0, 1, 2]),
    ],
)
def test_a_class_may_be_written_as_its_name_or_its_number(
    labels: list[Any], classes: list[str] | None, written: list[Any], outputs: list[int]
) -> None:
    known = Labels(labels, classes)
    assert [known.output_of(label) for label in written] == outputs


def test_a_number_is_no_name_where_names_are_numbers() -> None:
    """Nobody knows whether it is the one or the other."""
    with pytest.raises(UserError, match=r"the label 0 is none of the task's: 1, 2"):
        Labels(["1", "2"], ["1", "2"]).output_of(0)
    with pytest.raises(UserError, match=r"the label 'fair' is none of the task's: good, bad"):
        Labels(["good", "bad"]).output_of(ClassNumber(0, ["fair", "good", "bad"]))


@pytest.mark.parametrize("labels", [None, ["Positive", "negative", "neutral"], [0, 1, 2]])
def test_validation_data_that_write_classes_as_numbers(tmp_path: Path, labels: list[Any] | None) -> None:
    config = SequenceClassificationConfig(model="bert", from_scratch=BERT, labels=labels)
    task = SequenceClassification(TaskContext(RunConfig(task=config, data=of_datasets(tmp_path)), TOKENIZER))
    trained = [task.encode(record, True)["labels"] for record in task.records("train")]
    assert [task.encode({"text": "a", "label": label}, False)["labels"] for label in (2, "0")] == trained
    assert [task.labels.names[number] for number in trained] == (
        [2, 0] if labels == [0, 1, 2] else ["Positive", "negative"]
    )


def test_files_with_and_without_names_have_the_same_classes(tmp_path: Path) -> None:
    data = of_datasets(tmp_path)
    (tmp_path / "more.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "a", "label": "negative"}\n')
    config = SequenceClassificationConfig(model="bert", from_scratch=BERT)
    both = data.model_copy(update={"train": [data.train, str(tmp_path / "more.jsonl")]})
    task = SequenceClassification(RunConfig(task=config, data=both))
    assert task.find_dataset_metadata()["labels"] == ["negative", "neutral", "Positive"]


def test_a_class_as_a_number_to_learn_and_as_a_text(tmp_path: Path) -> None:
    config = SequenceClassificationConfig(model="bert", from_scratch=BERT, problem="regression")
    task = SequenceClassification(TaskContext(RunConfig(task=config, data=of_datasets(tmp_path)), TOKENIZER))
    records = list(task.records("train"))
    assert [task.encode(record, True)["labels"] for record in records] == [2.0, 0.0]
    assert task.references(records) == [2.0, 0.0]
    assert [require(record, "label", "task.target_column") for record in records] == ["Positive", "negative"]


def test_a_label_inside_a_column(tmp_path: Path) -> None:
    record = {"about": {"text": "a", "mood": "good"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    config = SequenceClassificationConfig(
        model="bert", from_scratch=BERT, text_column="about.text", label_column="about.mood", labels=["bad", "good"]
    )
    run_config = RunConfig(task=config, data=DataSection(sequence_length=8))
    task = SequenceClassification(TaskContext(run_config, TOKENIZER, {"labels": ["bad", "good"]}))
    assert task.encode(record, True)["labels"] == 1
    assert task.references([record]) == ["good"]
    assert task.texts(record) == ["a"]


def test_labels_that_differ_in_case_alone_stay_two() -> None:
    assert in_order_of(["US", "us"], ["us", "US"]) == ["US", "us"]
    assert in_order_of(["NO", "yes"], ["Yes", "No"]) == ["No", "Yes"]
