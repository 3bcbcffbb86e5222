"""Classes that `datasets` stores as numbers: records have these numbers, each of which knows its name."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from drawbar.config.schema.data_section import DataSection, SourceSection
from drawbar.data.class_labels import ClassNumber, class_features, class_names, with_class_numbers
from drawbar.data.dataset import encode_records
from drawbar.data.sources import Records, open_records
from drawbar.errors import UserError

MOODS, TAGS = ["positive", "negative"], ["O", "B-X", "I-X"]
FEATURES = Features(
    {
        "text": Value("string"),
        "mood": ClassLabel(names=MOODS),
        "tags": Sequence(ClassLabel(names=TAGS)),
        "parts": Sequence({"tag": ClassLabel(names=TAGS)}),
        "meta": {"mood": ClassLabel(names=MOODS), "n": Value("int64")},
    }
)
NUMBERS: dict[str, list[Any]] = {
    "text": ["a", "b", "c"],
    "mood": [0, 1, -1],
    "tags": [[0, 1], [2], []],
    "parts": [{"tag": [0]}, {"tag": [2, 1]}, {"tag": []}],
    "meta": [{"mood": 1, "n": 1}, {"mood": 0, "n": 0}, None],
}
NAMED = [
    {"mood": "positive", "tags": ["O", "B-X"], "parts": {"tag": ["O"]}, "meta": {"mood": "negative", "n": 1}},
    {"mood": "negative", "tags": ["I-X"], "parts": {"tag": ["I-X", "B-X"]}, "meta": {"mood": "positive", "n": 0}},
    {"mood": None, "tags": [], "parts": {"tag": []}},
]


def named(value: Any) -> Any:
    """The value with the names of its classes."""
    if isinstance(value, list):
        return [named(item) for item in value]
    if isinstance(value, dict):
        return {name: named(item) for name, item in value.items()}
    return value.name if isinstance(value, ClassNumber) else value


def dataset() -> Dataset:
    return Dataset.from_dict(NUMBERS, features=FEATURES)


def write_parquet(folder: Path) -> SourceSection:
    dataset().to_parquet(folder / "a.parquet")
    return SourceSection(files=str(folder / "a.parquet"))


def write_arrow(folder: Path) -> SourceSection:
    dataset().save_to_disk(folder / "saved")
    return SourceSection(files=str(folder / "saved" / "*.arrow"))


def write_ipc_file(folder: Path) -> SourceSection:
    table = dataset().with_format("arrow")[:]
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    return SourceSection(files=str(folder / "a.arrow"))


def write_folder(folder: Path) -> SourceSection:
    (folder / "data").mkdir()
    dataset().to_parquet(folder / "data" / "train.parquet")
    return SourceSection(dataset=str(folder / "data"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", [write_parquet, write_arrow, write_ipc_file, write_folder])
def test_records_have_numbers_that_know_their_names(
    tmp_path: Path, write: Callable[[Path], SourceSection], streaming: bool
) -> None:
    records = open_records(DataSection(train=write(tmp_path), streaming=streaming), "train")
    chosen = [{column: record[column] for column in one} for record, one in zip(records, NAMED, strict=True)]
    assert [named(record) for record in chosen] == NAMED
    assert [record["mood"] for record in chosen] == [0, 1, None]
    assert [record["tags"] for record in chosen] == NUMBERS["tags"]
    assert records.class_names("mood") == records.class_names("meta.mood") == MOODS
    assert records.class_names("tags") == records.class_names("parts.tag") == TAGS
    assert [records.class_names(column) for column in ("text", "meta", "meta.n", "none", "mood.x")] == [None] * 5


def test_names_of_columns_with_new_names(tmp_path: Path) -> None:
    data = DataSection(train=write_parquet(tmp_path), rename={"label": "meta.mood", "about": "meta"})
    records = open_records(data, "train")
    assert records.class_names("label") == records.class_names("about.mood") == MOODS


def two_files(folder: Path, second: list[str]) -> Records:
    for name, names in (("a", MOODS), ("b", second)):
        features = Features({"mood": ClassLabel(names=names)})
        Dataset.from_dict({"mood": [0, 1]}, features=features).to_parquet(folder / f"{name}.parquet")
    return open_records(DataSection(train=[str(folder / "a.parquet"), str(folder / "b.parquet")]), "train")


def test_files_that_number_their_classes_in_other_ways_do_not_mix_them(tmp_path: Path) -> None:
    records = two_files(tmp_path, MOODS[::-1])
    assert named([record["mood"] for record in records]) == ["positive", "negative", "negative", "positive"]
    assert records.class_names("mood") is None
    assert two_files(tmp_path, MOODS).class_names("mood") == MOODS


def test_a_file_without_names_has_the_classes_of_those_that_have(tmp_path: Path) -> None:
    dataset().to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"mood": 1}\n')
    train = [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]
    assert open_records(DataSection(train=train), "train").class_names("mood") == MOODS


def test_a_number_is_that_of_datasets_wherever_it_goes() -> None:
    """In code that was written for what `datasets` gives, in samples, in other processes and in files."""
    number = ClassNumber(1, MOODS)
    assert number == 1
    assert MOODS[number] == number.name == "negative"
    assert pickle.loads(pickle.dumps(number)).name == "negative"
    assert json.dumps([number]) == "[1]"
    samples = encode_records([{"mood": number, "moods": [number]}], lambda record: record, describe=str)
    assert (samples[0]["mood"], samples[0]["moods"].tolist()) == (1, [1])


def test_a_number_of_no_class_is_a_bad_record(tmp_path: Path) -> None:
    schema = dataset().with_format("arrow")[:].select(["mood"]).schema
    pq.write_table(pa.table({"mood": [0, 2]}, schema=schema), tmp_path / "a.parquet")
    data = DataSection(train=str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match=r"2 is not a class number[\s\S]*a.parquet, row 2"):
        len(open_records(data, "train"))
    assert len(open_records(data.model_copy(update={"on_bad_record": "skip"}), "train")) == 1


def test_lists_as_older_versions_of_datasets_describe_them() -> None:
    tag = {"names": TAGS, "num_classes": 3, "id": None, "_type": "ClassLabel"}
    features = {"a": [tag], "b": {"feature": {"tag": tag}, "length": -1, "_type": "Sequence"}}
    record = with_class_numbers({"a": [0, 1], "b": {"tag": [2, None]}}, class_features(features))
    assert named(record) == {"a": ["O", "B-X"], "b": {"tag": ["I-X", None]}}
    assert class_names(features, "a") == class_names(features, "b.tag") == TAGS
